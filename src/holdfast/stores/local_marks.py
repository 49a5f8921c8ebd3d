"""What jobs leave for each other below a run: claims, bars, and lines of text. Knows only paths."""

import contextlib
import errno
import os

from .._core import Vfs
from ..errors import StoreError

BAR_ATTEMPTS = 8  # of what has one writer, who makes it once


def claim(vfs: Vfs, path: str, note: bytes) -> bool:
    """Create a file in one exclusive step; return False when it is there already."""
    try:
        descriptor = vfs.create(path)
    except StoreError as error:
        if error.errno != errno.EEXIST:
            raise
        return False
    with contextlib.suppress(OSError):
        os.write(descriptor, note)
    with contextlib.suppress(StoreError):
        vfs.close(descriptor)
    return True


def bar(vfs: Vfs, path: str) -> None:
    """Put a directory where a file may be, or may yet be made, by another."""
    for _ in range(BAR_ATTEMPTS):
        try:
            vfs.make_directory(path)
            return
        except StoreError as error:
            if error.errno != errno.EEXIST:
                raise
        try:
            vfs.unlink(path)
        except StoreError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
    text = f"bar {path}: other processes created it again, {BAR_ATTEMPTS} times"
    raise _failure(text, errno.EEXIST)


def append(path: str, data: bytes) -> None:
    """Add lines to a file in one call, unsynced; the rest of a torn line stands alone."""
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _failure(f"append to {path}: {error.strerror}", error.errno) from error
    if written < len(data):
        text = f"append to {path}: {written} of {len(data)} bytes were written"
        raise _failure(text, errno.EIO)


def _failure(text: str, number: int | None) -> StoreError:
    error = StoreError(text)
    error.errno = number
    return error
