"""The small files that say how far a running job is: ``.progress-HOST`` beside the steps.

One file for each host, with a slot of fixed size for each of its ranks, which that rank overwrites.
Nothing is synced; no checkpoint needs it. Anybody may have written it: what is not as expected is
left out. Knows no file system.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..brief import shortened

PROGRESS_PREFIX = ".progress-"
SLOT_BYTES = 2048
FILE_BYTES_MAX = SLOT_BYTES * 4096  # more ranks than any host has
TEXT_MAX = 300  # characters of an error
_VERSION = 1
_NUMBERS = ("time_s", "took_s", "stall_s", "failed_s", "committed_s", "began_s", "due_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """What one rank of a running job last said of itself. Times are in seconds since 1970.

    Attributes:
        pid_space: where its pid counts, as the number of its PID namespace; 0: that is not known.
        time_s: when it said so.
        step: of training.
        due_step, due_s: when the next save is due, if that is known; -1, 0.0: it is not.
        save_step: of the save in flight or the last one; -1: there was none.
        state: of that save, as `holdfast.Progress` has it.
        began_s: when that save began.
        staged_bytes, written_bytes, total_bytes: as `holdfast.Progress` has them.
        committed_step, committed_s: of the last save that is durable; -1, 0.0: none of this job.
        took_s, stall_s: how long that save took, and held up training.
        failed_step, failed_s, failed: of the last save that failed, and its error.
    """

    host: str = ""
    pid: int = 0
    pid_space: int = 0
    rank: int = 0
    world_size: int = 1
    time_s: float = 0.0
    step: int = -1
    due_step: int = -1
    due_s: float = 0.0
    save_step: int = -1
    state: str = ""
    began_s: float = 0.0
    staged_bytes: int = 0
    written_bytes: int = 0
    total_bytes: int = 0
    committed_step: int = -1
    committed_s: float = 0.0
    took_s: float = 0.0
    stall_s: float = 0.0
    failed_step: int = -1
    failed_s: float = 0.0
    failed: str = ""


def progress_name(host: str, rank: int | None) -> str:
    """Name the file of a host; with ``rank``, of a rank that knows none of its neighbours."""
    plain = re.sub(r"[^A-Za-z0-9.-]", "_", host)[:64] or "host"
    return f"{PROGRESS_PREFIX}{plain}" + ("" if rank is None else f"-{rank}")


def encode_slot(said: RankProgress) -> bytes:
    """Return what a rank writes into its slot."""
    record: dict[str, Any] = {field.name: getattr(said, field.name) for field in fields(said)}
    record |= {
        "version": _VERSION,
        "host": said.host[:64],
        "failed": shortened(said.failed, TEXT_MAX),
    }
    data = json.dumps(record).encode()
    if len(data) >= SLOT_BYTES:  # a text of characters that take six bytes each
        failed = shortened(said.failed, TEXT_MAX // 6)
        data = json.dumps(record | {"failed": failed, "host": ""}).encode()
    return data.ljust(SLOT_BYTES - 1) + b"\n"


def decode_slots(data: bytes) -> Iterator[RankProgress]:
    """Yield what is whole in a file; empty and torn slots, and those of others, are left out."""
    for at in range(0, len(data), SLOT_BYTES):
        slot = data[at : at + SLOT_BYTES].strip(b"\0 \n")
        if not slot:
            continue
        try:
            record = json.loads(slot)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("version") == _VERSION:
            said = _said(record)
            if said is not None:
                yield said


def _said(record: Mapping[str, Any]) -> RankProgress | None:
    found: dict[str, Any] = {}
    for field in fields(RankProgress):
        value = record.get(field.name, field.default)
        if field.name in _NUMBERS and type(value) is int:
            value = float(value) if abs(value) < 2**53 else math.inf
        if type(value) is not type(field.default):
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if type(value) is int and not -1 <= value < 2**63:
            return None
        found[field.name] = value
    return RankProgress(**found)
