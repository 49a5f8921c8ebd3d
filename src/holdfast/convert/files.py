"""Many files, read at offsets by many threads, of which few are open at once. Knows no format."""

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import CorruptError
from .source import open_file, read_at

OPEN_MAX = 64  # a process may often have 1024; more are open only while they are read


@dataclass(slots=True)
class _Open:
    """An open file: its descriptor, and how many threads read it."""

    descriptor: int
    users: int = 0


def _identity(descriptor: int) -> tuple[int, ...]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Files:
    """Opens each file when it is read. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._identities: dict[str, tuple[int, ...]] = {}  # of all that have been opened

    def read(self, path: str, offset: int, memory: memoryview) -> None:
        """Fill memory with bytes of a file.

        Raises:
            CorruptError: the file ends before.
            StoreError: it cannot be read, or is no regular file.
        """
        with self._opened(path) as descriptor:
            read_at(descriptor, path, offset, memory)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            StoreError: it cannot be opened, or is no regular file.
        """
        with self._opened(path) as descriptor:
            return os.fstat(descriptor).st_size

    def close(self) -> None:
        """Close all files; none may be read at the same time."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1].descriptor)

    def _same(self, path: str, descriptor: int) -> int:
        """Check that a file which is opened again is the one that it was."""
        found = _identity(descriptor)
        if self._identities.setdefault(path, found) != found:
            os.close(descriptor)
            raise CorruptError(
                f"{path} was changed while the checkpoint was read. Read it again when its "
                "writer has finished"
            )
        return descriptor

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        with self._lock:
            if path not in self._open:
                self._open[path] = _Open(self._same(path, open_file(path)))
            file = self._open[path]
            file.users += 1
            self._open.move_to_end(path)
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.users -= 1
                idle = [name for name, other in self._open.items() if not other.users]
                for name in idle[: max(len(self._open) - OPEN_MAX, 0)]:
                    os.close(self._open.pop(name).descriptor)
