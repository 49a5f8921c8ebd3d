"""Files of HDFS that are open: new ones, which grow at their end, and ranged reads.

A DataNode keeps bytes in its memory until it is asked to sync them, and a sync is of the newest
block alone. So each block is synced when it is full, and the last one before the file is closed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from .hdfs_client import asked
from .remote_files import Written, short_read


class Upload(Written):
    """One new file. Others see it as soon as it is made, and its length when it is finished."""

    def __init__(self, writer: Any, where: str, block_bytes: int) -> None:
        super().__init__(where)
        self._writer, self._block_bytes = writer, block_bytes
        self._position = 0

    def finish(self) -> None:
        """Send what is held, and close; return when it is durable."""
        self._send(memoryview(self._held))
        self._ask(self._writer.hsync)
        self._ask(self._writer.close)

    def close(self) -> None:
        """Leave it as it is: who gives it up removes it by its name."""

    def _send(self, data: memoryview) -> None:
        while len(data):
            room = self._block_bytes - self._position % self._block_bytes
            part = bytes(data[:room])  # the call may outlive its limit
            self._ask(self._writer.write, part)
            self._position += len(part)
            if len(part) == room:
                self._ask(self._writer.hsync)
            data = data[room:]

    def _ask(self, call: Any, *args: Any) -> None:
        asked("write", self._where, call, *args)


class Opened(NamedTuple):
    """One file that is read."""

    reader: Any
    where: str
    size: int

    def read(self, size: int, offset: int) -> Any:
        """Return bytes of it, as a buffer; fewer only at its end."""
        size = max(0, min(size, self.size - offset))
        if not size:
            return b""
        found = asked("read", self.where, self.reader.read_range, offset, size)
        if len(found) != size:
            raise short_read(self.where, size, offset, len(found))
        return found

    def pieces(self, size: int, offset: int) -> Iterator[Any]:
        """Yield the same, in one piece."""
        if len(found := self.read(size, offset)):
            yield found
