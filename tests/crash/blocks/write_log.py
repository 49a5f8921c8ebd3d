"""What a disk was told to do, in order: the log of `log_plugin`, read back."""

import struct
from dataclasses import dataclass
from pathlib import Path

RECORD = struct.Struct("<cQQ")  # kind (W or F), offset, length; the bytes of a write follow


@dataclass(frozen=True, slots=True)
class Entry:
    """A write, or a flush: then there is no data.

    Attributes:
        offset: on the disk, in bytes.
        data: what was written there; None for a flush.
        end: where the entry ends in the log, in bytes.
    """

    offset: int
    data: bytes | None
    end: int


def read_log(path: Path) -> list[Entry]:
    """Read a log whose writer is done."""
    text, entries, at = path.read_bytes(), [], 0
    while at < len(text):
        kind, offset, length = RECORD.unpack_from(text, at)
        begin = at + RECORD.size
        at = begin + length
        assert at <= len(text), f"the log ends inside the entry at byte {begin - RECORD.size}"
        entries.append(Entry(offset, text[begin:at] if kind == b"W" else None, at))
    return entries
