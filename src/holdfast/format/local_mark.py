"""What a local run says of itself: which store it belongs to, and the jobs that saved here.

The file ``.store`` names the store. A job adds itself, by an empty file ``.job-<name>``, before it
takes an epoch of the store. So when the newest epoch there is of a job that is named here, nobody
else has trained on since, and what only the local disk has counts. Each job has a file of its own,
so that none of two that begin at once is lost.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

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
        jobs: those that have saved here.
    """

    store: str = ""
    jobs: frozenset[str] = frozenset()


def decode_store(data: bytes) -> str | None:
    """Read which store the file names; None: it is none of ours."""
    try:
        store = json.loads(data)["store"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return store if isinstance(store, str) and store else None


def encode_store(store: str) -> bytes:
    """Write that."""
    return f"{json.dumps({'store': store})}\n".encode()


def job_name(job: str) -> str:
    """Name the file of a job."""
    return f"{JOB_PREFIX}{job}"


def jobs_in(names: Iterable[str]) -> frozenset[str]:
    """Return the jobs that files of a directory name."""
    return frozenset(match[1] for name in names if (match := _JOB.fullmatch(name)))
