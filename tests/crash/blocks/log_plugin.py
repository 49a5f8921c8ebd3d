"""A disk for nbdkit that writes down every write and every flush in the order they were done.

Runs inside nbdkit, so it imports nothing of ours; `write_log` reads what it writes. One request at
a time: nbdkit's Python plugins are served so.
"""

import mmap
import os
import struct
from typing import Any

import nbdkit  # made by nbdkit itself

API_VERSION = 2
RECORD = struct.Struct("<cQQ")  # as in write_log: kind, offset, length; then the bytes of a write

_config: dict[str, str] = {}
_disk: Any = None
_log = -1


def config(key: str, value: str) -> None:
    """Take ``image=`` (changed in place) and ``log=`` (made anew)."""
    _config[key] = value


def config_complete() -> None:
    """Open both."""
    global _disk, _log
    image = os.open(_config["image"], os.O_RDWR)
    _disk = mmap.mmap(image, os.fstat(image).st_size)
    os.close(image)
    _log = os.open(_config["log"], os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)


def open(readonly: bool) -> object:
    """Serve any number of connections alike."""
    return nbdkit


def get_size(handle: object) -> int:
    """Return the size of the image."""
    return len(_disk)


def can_flush(handle: object) -> bool:
    """Say that flushes are wanted: a write is durable only after one."""
    return True


def pread(handle: object, buffer: bytearray, offset: int, flags: int) -> None:
    """Read what was written last."""
    buffer[:] = _disk[offset : offset + len(buffer)]


def pwrite(handle: object, buffer: bytearray, offset: int, flags: int) -> None:
    """Write, and write that down."""
    data = bytes(buffer)
    _disk[offset : offset + len(data)] = data
    _append(RECORD.pack(b"W", offset, len(data)) + data)


def flush(handle: object, flags: int) -> None:
    """Write down that all that came before is durable."""
    _append(RECORD.pack(b"F", 0, 0))


def _append(record: bytes) -> None:
    if os.write(_log, record) != len(record):
        raise OSError("the log is full")
