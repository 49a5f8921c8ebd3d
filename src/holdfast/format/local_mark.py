"""What a local run says of itself: which store it belongs to, and the jobs that saved here.

The file ``.store`` names the store. Where hosts have a disk each, it also says which ranks of the
last job share this one, so that no file of another host is taken for lost.

A job adds itself, by an empty file ``.job-<name>``, before it takes an epoch of the store. So when
the newest epoch there is of a job that is named here, nobody else has trained on since, and what
only the local disk has counts. Each job has a file of its own, so that none of two that begin at
once is lost.
"""

import json
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MARK_NAME = ".store"
MARK_BYTES_MAX = 64 << 10
JOB_PREFIX = ".job-"
JOBS_MAX = 64  # older ones are forgotten, once it is known that none has the newest epoch

_JOB = re.compile(r"\.job-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class LocalMark:
    """What a local run says of itself.

    Attributes:
        store: location of the run in the store; empty: there is no such file.
        ranks: of the last job, those that share this disk; empty: all.
        world_size: of that job, where there are any.
        jobs: those that have saved here.
    """

    store: str = ""
    ranks: frozenset[int] = frozenset()
    world_size: int = 0
    jobs: frozenset[str] = frozenset()

    def is_elsewhere(self, rank: int, world_size: int) -> bool:
        """Whether another host has the files of a rank, of a step that as many ranks saved."""
        return bool(self.ranks) and rank not in self.ranks and world_size == self.world_size

    @property
    def lacks_manifests(self) -> bool:
        """Whether another host has rank 0, and so the MANIFEST of each step."""
        return bool(self.ranks) and 0 not in self.ranks


def decode_mark(data: bytes) -> LocalMark | None:
    """Read what the file says; None: it is none of ours."""
    try:
        found = json.loads(data)
        store, ranks, world_size = found["store"], found.get("ranks", []), found.get("of", 0)
        numbers = frozenset(map(operator.index, ranks))
        size = operator.index(world_size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return LocalMark(store, numbers, size) if isinstance(store, str) and store else None


def encode_mark(mark: LocalMark) -> bytes:
    """Write that; the jobs have files of their own."""
    found: dict[str, Any] = {"store": mark.store}
    if mark.ranks:
        found |= {"ranks": sorted(mark.ranks), "of": mark.world_size}
    return f"{json.dumps(found)}\n".encode()


def job_name(job: str) -> str:
    """Name the file of a job."""
    return f"{JOB_PREFIX}{job}"


def jobs_in(names: Iterable[str]) -> frozenset[str]:
    """Return the jobs that files of a directory name."""
    return frozenset(match[1] for name in names if (match := _JOB.fullmatch(name)))
