"""The end of a file that others may still be writing to. Knows no kinds of stores."""

from collections.abc import Sequence

from ..errors import StoreError
from .base import Store


def read_tails(store: Store, names: Sequence[str], bytes_max: int) -> bytes:
    """Read the last bytes of files that continue each other, the oldest first.

    The first of them may be in the middle of a line. A file that is not there has none.
    """
    found = b""
    for name in reversed(names):
        try:
            fd = store.open(name, direct=False)
        except StoreError:
            continue
        try:
            size = store.vfs.size(fd)
            count = min(size, bytes_max - len(found))
            found = store.vfs.read(fd, count, size - count) + found
        finally:
            store.vfs.close(fd)
        if len(found) == bytes_max:
            break
    return found


def read_head(store: Store, name: str, bytes_max: int) -> bytes:
    """Read the first bytes of a file.

    Raises:
        StoreError: it is not there, or cannot be read.
    """
    fd = store.open(name, direct=False)
    try:
        return store.vfs.read(fd, min(store.vfs.size(fd), bytes_max), 0)
    finally:
        store.vfs.close(fd)
