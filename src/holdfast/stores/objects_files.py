"""Objects that are open: uploads in parts, and ranged reads into memory. Knows no checkpoints.

An upload is seen by nobody before `sync` has ended; one that is closed without is aborted. Its
bytes come in their order. A client has threads of its own, which send parts while more come.
"""

import contextlib
import ctypes
import errno
import itertools
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from .._core import Pool
from ..errors import StoreError
from .base import Code
from .objects_client import api, errors_of

PART_BYTES = 16 << 20  # of an upload; larger where a file would have more than PARTS_MAX
PARTS_MAX = 9000  # S3 takes 10,000
PARTS_IN_FLIGHT = 8
HELD_BYTES = 4096  # of an upload's end, until it is known where that is
FIRST_DESCRIPTOR = 1 << 20  # no descriptor of this machine


class Upload:
    """One new object."""

    def __init__(self, client: Any, key: str, where: str) -> None:
        self._client, self._key, self._where = client, key, where
        self._part_bytes = PART_BYTES
        self._writer: Any = None
        self._held = b""
        self._sent = 0
        self._is_over = False

    def expect(self, size: int) -> None:
        """Choose parts for so many bytes."""
        self._part_bytes = max(PART_BYTES, -(-size // PARTS_MAX))

    def write(self, data: memoryview, offset: int) -> None:
        """Add bytes; return when they are copied."""
        if offset != self._sent + len(self._held):
            raise StoreError(
                f"write {self._where} at {offset}: expected {self._sent + len(self._held)}"
            )
        if len(data) < HELD_BYTES:
            data = memoryview(self._held + bytes(data))
        else:
            self._send(self._held)
        self._send(data[:-HELD_BYTES])
        self._held = bytes(data[-HELD_BYTES:])

    def truncate(self, size: int) -> None:
        """Say where the end is."""
        if not 0 <= size - self._sent <= len(self._held):
            raise StoreError(f"cut {self._where} at {size}: {self._sent} bytes have been sent")
        self._held = self._held[: size - self._sent]

    def finish(self) -> None:
        """Make it an object; return when it is durable."""
        with errors_of("write", self._where):
            if self._writer is None:
                api().put(self._client, self._key, self._held, use_multipart=False)
            else:
                self._writer.write(self._held)
                self._writer.close()
        self._is_over = True

    def close(self) -> None:
        """Abort it, unless it is finished."""
        if self._writer is not None and not self._is_over:
            self._is_over = True
            with contextlib.suppress(Exception):
                self._writer.__exit__(InterruptedError, InterruptedError(), None)

    def _send(self, data: "bytes | memoryview") -> None:
        if not len(data):
            return
        with errors_of("write", self._where):
            if self._writer is None:
                self._writer = api().open_writer(
                    self._client,
                    self._key,
                    buffer_size=self._part_bytes,
                    max_concurrency=PARTS_IN_FLIGHT,
                )
                self._writer.__enter__()
            self._writer.write(bytes(data))  # it keeps what it is given until it has sent it
        self._sent += len(data)


class Opened(NamedTuple):
    """One object that is read."""

    client: Any
    key: str
    where: str
    size: int

    def read(self, size: int, offset: int) -> Any:
        """Return bytes of it, as a buffer; fewer only at its end."""
        size = max(0, min(size, self.size - offset))
        if not size:
            return b""
        with errors_of("read", self.where):
            found = api().get_range(self.client, self.key, start=offset, length=size)
        if len(found) != size:
            error = StoreError(
                f"read {self.where}[{offset}:+{size}]: the store sent {len(found)} bytes"
            )
            error.errno = errno.EIO
            raise error
        return found


class Files:
    """See `holdfast.stores.base.DataFiles`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(FIRST_DESCRIPTOR)
        self._open: dict[int, Upload | Opened] = {}

    def add(self, file: "Upload | Opened") -> int:
        """Give a file a descriptor."""
        descriptor = next(self._numbers)
        self._open[descriptor] = file
        return descriptor

    def upload(self, fd: int) -> Upload:
        """Return what is written under a descriptor."""
        file = self._open[fd]
        assert isinstance(file, Upload)
        return file

    def opened(self, fd: int) -> Opened:
        """Return what is read under a descriptor."""
        file = self._open[fd]
        assert isinstance(file, Opened)
        return file

    def size(self, fd: int) -> int:
        """Return the size in bytes."""
        return self.opened(fd).size

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Read ``size`` bytes, fewer only at the end."""
        return bytes(self.opened(fd).read(size, offset))

    def write(self, fd: int, data: "bytes | bytearray | memoryview", offset: int) -> None:
        """Add ``data``."""
        self.upload(fd).write(memoryview(data).cast("B"), offset)

    def allocate(self, fd: int, size: int) -> None:
        """Choose parts for so many bytes: a store has no room to reserve."""
        self.upload(fd).expect(size)

    def truncate(self, fd: int, size: int) -> None:
        """Say how long the object is in the end."""
        self.upload(fd).truncate(size)

    def sync(self, fd: int) -> None:
        """Make the upload an object."""
        self.upload(fd).finish()

    def close(self, fd: int) -> None:
        """Forget a descriptor; abort an upload that was not synced."""
        if isinstance(file := self._open.pop(fd), Upload):
            file.close()


FILES = Files()


class ObjectQueue:
    """See `holdfast.stores.base.Queue`."""

    direct = False

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._threads: ThreadPoolExecutor | None = None
        self._over: SimpleQueue[tuple[int, int, int]] = SimpleQueue()
        self.pending = 0

    def submit_write(
        self, fd: int, address: int, size: int, offset: int, tag: int, at_once: bool = False
    ) -> None:
        """Copy memory into the parts of an upload, which its client sends."""
        self.pending += 1
        self._call(lambda: FILES.upload(fd).write(_memory(address, size), offset), tag, size)

    def submit_read(
        self, fd: int, address: int, size: int, offset: int, tag: int, at_once: bool = False
    ) -> None:
        """Begin a ranged read."""
        self.pending += 1
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._depth, "holdfast-objects")
        file = FILES.opened(fd)

        def read() -> None:
            found = memoryview(file.read(size, offset))
            _memory(address, len(found))[:] = found

        self._threads.submit(self._call, read, tag, max(0, min(size, file.size - offset)))

    def wait(self) -> list[tuple[int, int, int]]:
        """Block until a request is whole; return (tag, bytes done, errno) of each that is."""
        if not self.pending:
            return []
        done = [self._over.get()]
        with contextlib.suppress(Empty):
            while True:
                done.append(self._over.get_nowait())
        self.pending -= len(done)
        return done

    def close(self) -> None:
        """Finish what was submitted."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _call(self, function: Any, tag: int, size: int) -> None:
        try:
            function()
        except BaseException as error:
            code = getattr(error, "errno", None) or errno.EIO
            self._over.put((tag, 0, Code(code, str(error))))
            return
        self._over.put((tag, size, 0))


class ObjectQueueKind(NamedTuple):
    """See `holdfast.stores.base.QueueKind`."""

    depth: int

    def make(self, pool: Pool) -> ObjectQueue:
        """Make a queue."""
        return ObjectQueue(self.depth)


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
