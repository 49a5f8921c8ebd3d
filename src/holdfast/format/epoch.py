"""The files that say which job has a run: ``.epoch-NUMBER`` beside the steps.

Anybody may have written them. What they are for: `runs/fence.py`. Knows no file system.
"""

import json
import re
from dataclasses import dataclass
from datetime import datetime

EPOCH_BYTES_MAX = 4096

_EPOCH = re.compile(r"\.epoch-(\d{8,15})")


@dataclass(frozen=True, slots=True)
class Taker:
    """The process that has taken an epoch, as it said; ``since_s`` is in seconds since 1970."""

    host: str
    pid: int
    since_s: float


def epoch_of(name: str) -> int | None:
    """Return the number of the epoch that a file has the name of; None: of none."""
    match = _EPOCH.fullmatch(name)
    return int(match[1]) if match else None


def decode_taker(data: bytes) -> Taker | None:
    """Read who has taken an epoch; None: the file does not say."""
    try:
        found = json.loads(data)
        since_s = datetime.fromisoformat(str(found["started"])).timestamp()
        return Taker(str(found["host"]), int(found["pid"]), since_s)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
