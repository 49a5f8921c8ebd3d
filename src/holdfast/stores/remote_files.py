"""Files of a remote store that are open: their descriptors, and a queue of threads that reads them.

What is written is sent in its order. How bytes are sent and read, the files of each store know.
"""

import contextlib
import ctypes
import errno
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from .._core import Pool, copy
from ..errors import StoreError
from ..options import SLOT_BYTES
from .base import Code, forget_frames

HELD_BYTES = 4096  # of a new file's end, until it is known where that is
RUN_BYTES = 8 << 20  # of a read: below, waiting for the answer to begin takes too much of it
FIRST_DESCRIPTOR = 1 << 20  # no descriptor of this machine

Made = TypeVar("Made")


class Written(ABC):
    """One new file. A caller pads what it writes to pages, and then says where the end is.

    Attributes:
        keeps_memory: `write` keeps what it is given.
        gives_back: it does so until that is sent; else until the file ends.
        memory_bytes: how much it may keep at once.
    """

    keeps_memory = gives_back = False
    memory_bytes = 1 << 62

    def __init__(self, where: str) -> None:
        self._where = where
        self._held = b""
        self._sent = 0

    def expect(self, size: int) -> None:  # noqa: B027 - most stores need no more than this
        """Prepare for so many bytes."""

    def write(self, data: memoryview, offset: int) -> None:
        """Add bytes; return when they are copied."""
        if offset != self._sent + len(self._held):
            raise StoreError(
                f"write {self._where} at {offset}: expected {self._sent + len(self._held)}"
            )
        if len(data) < HELD_BYTES:
            data = memoryview(self._held + bytes(data))
        else:
            self._pass_on(memoryview(self._held))
        self._pass_on(data[:-HELD_BYTES])
        self._held = bytes(data[-HELD_BYTES:])

    def retained(self) -> int:
        """Count the writes whose memory stays until more is written, or `settle` is called."""
        return 0

    def settle(self) -> None:  # noqa: B027 - who keeps no memory has nothing to copy
        """Copy what they gave."""

    def truncate(self, size: int) -> None:
        """Say where the end is."""
        if not 0 <= size - self._sent <= len(self._held):
            raise StoreError(f"cut {self._where} at {size}: {self._sent} bytes have been sent")
        self._held = self._held[: size - self._sent]

    @abstractmethod
    def finish(self) -> None:
        """Send what is held, and end the file; return when it is durable."""

    @abstractmethod
    def close(self) -> None:
        """Give it up, unless it is finished."""

    @abstractmethod
    def _send(self, data: memoryview) -> None:
        """Send bytes; the caller may change them afterwards."""

    def _pass_on(self, data: memoryview) -> None:
        if len(data):
            self._send(data)
            self._sent += len(data)


class Readable(Protocol):
    """One file that is read."""

    @property
    def size(self) -> int: ...

    def read(self, size: int, offset: int) -> Any:
        """Return bytes of it, as a buffer; fewer only at its end."""

    def pieces(self, size: int, offset: int) -> Iterator[Any]:
        """Yield the same as buffers, one behind the other."""


class Files:
    """See `holdfast.stores.base.DataFiles`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(FIRST_DESCRIPTOR)
        self._written: dict[int, Written] = {}
        self._read: dict[int, Readable] = {}

    def add_written(self, file: Written) -> int:
        """Give a new file a descriptor."""
        descriptor = next(self._numbers)
        self._written[descriptor] = file
        return descriptor

    def add_read(self, file: Readable) -> int:
        """Give a file that is read a descriptor."""
        descriptor = next(self._numbers)
        self._read[descriptor] = file
        return descriptor

    def written(self, fd: int) -> Written:
        """Return what is written under a descriptor."""
        return self._written[fd]

    def opened(self, fd: int) -> Readable:
        """Return what is read under a descriptor."""
        return self._read[fd]

    def size(self, fd: int) -> int:
        """Return the size in bytes."""
        return self._read[fd].size

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Read ``size`` bytes, fewer only at the end."""
        return bytes(self._read[fd].read(size, offset))

    def write(self, fd: int, data: "bytes | bytearray | memoryview", offset: int) -> None:
        """Add ``data``."""
        kept = bytes(data) if self._written[fd].keeps_memory else data
        self._written[fd].write(memoryview(kept).cast("B"), offset)

    def allocate(self, fd: int, size: int) -> None:
        """Prepare for so many bytes: there is no room to reserve."""
        self._written[fd].expect(size)

    def truncate(self, fd: int, size: int) -> None:
        """Say how long the file is in the end."""
        self._written[fd].truncate(size)

    def start_sync(self, fd: int) -> None:
        """Do nothing: whole parts are on their way."""

    def wants_direct(self, fd: int, size: int) -> bool:
        """Return False: what is read comes from the store."""
        return False

    def sync(self, fd: int) -> None:
        """End the file; return when it is durable."""
        self._written[fd].finish()

    def close(self, fd: int) -> None:
        """Forget a descriptor; give up a new file that was not synced."""
        if self._read.pop(fd, None) is None:
            self._written.pop(fd).close()


FILES = Files()


class ThreadedQueue:
    """See `holdfast.stores.base.Queue`."""

    direct = False

    def __init__(self, depth: int, part_bytes: int, memory_bytes: int) -> None:
        self._depth, self._part_bytes = depth, part_bytes
        self._memory_bytes = memory_bytes
        self._threads: ThreadPoolExecutor | None = None
        self._over: SimpleQueue[tuple[int, int, int]] = SimpleQueue()
        self._lent: dict[int, weakref.ref[Any]] = {}  # by tag, memory that a file keeps
        self._codes: dict[int, Code] = {}  # and what went wrong with it
        self._file: Written | None = None  # that the last write was to
        self.pending = 0

    @property
    def has_landed(self) -> bool:
        """Whether `wait` would not block."""
        return not self._over.empty()

    def submit_write(
        self, fd: int, address: int, size: int, offset: int, tag: int, cached: bool = False
    ) -> None:
        """Give memory to a new file, which its client sends; it is whole when that lets it go."""
        self.pending += 1
        self._file = file = FILES.written(fd)
        if not file.gives_back:
            self._call(lambda: FILES.write(fd, _memory(address, size), offset), tag, size)
            return
        file.memory_bytes = self._memory_bytes
        memory = (ctypes.c_char * size).from_address(address)
        self._lent[tag] = weakref.ref(memory, lambda _: self._given_back(tag, size))
        try:
            file.write(memoryview(memory).cast("B"), offset)
        except BaseException as error:
            self._codes[tag] = _code_of(error)
            forget_frames(error)

    def _given_back(self, tag: int, size: int) -> None:
        """Take note that nothing refers to memory any more; called by any thread."""
        del self._lent[tag]
        code = self._codes.pop(tag, None)
        self._over.put((tag, 0 if code else size, code or 0))

    def submit_read(
        self, fd: int, address: int, size: int, offset: int, tag: int, cached: bool = False
    ) -> None:
        """Begin a ranged read, in parts."""
        self.pending += 1
        threads, file = self._started(), FILES.opened(fd)
        starts = range(0, size, self._part_bytes) or range(1)
        left, failures = iter(range(len(starts) - 1, -1, -1)), list[Code]()

        def read(start: int) -> None:
            try:
                target = address + start
                for piece in file.pieces(min(self._part_bytes, size - start), offset + start):
                    source = np.frombuffer(piece, np.uint8)
                    copy(target, source.ctypes.data, source.nbytes)
                    target += source.nbytes
            except BaseException as error:
                failures.append(_code_of(error))
            if not next(left):  # one call at a time, as for every iterator of C
                done = 0 if failures else max(0, min(size, file.size - offset))
                self._over.put((tag, done, failures[0] if failures else 0))

        for start in starts:
            threads.submit(read, start)

    def fetch(
        self, fd: int, size: int, offset: int, take: Callable[[memoryview], Made]
    ) -> Future[Made]:
        """Begin a ranged read; call a function with what came, in the thread that it came to."""
        file = FILES.opened(fd)
        return self._started().submit(lambda: take(memoryview(file.read(size, offset)).cast("B")))

    def wait(self) -> list[tuple[int, int, int]]:
        """Block until a request is whole; return (tag, bytes done, errno) of each that is."""
        if not self.pending:
            return []
        if self._file and self._over.empty() and self._file.retained() == self.pending:
            self._file.settle()  # nothing else would end any of them
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

    def _started(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._depth, "holdfast-store")
        return self._threads

    def _call(self, function: Any, tag: int, size: int) -> None:
        try:
            function()
        except BaseException as error:
            self._over.put((tag, 0, _code_of(error)))
            return
        self._over.put((tag, size, 0))


class ThreadedQueueKind(NamedTuple):
    """See `holdfast.stores.base.QueueKind`."""

    depth: int
    part_bytes: int = SLOT_BYTES
    lends: bool = False

    @property
    def lent_slots(self) -> int:
        """Count the slots of all parts that are sent at once, and of two that are read."""
        return -(-self.part_bytes * self.depth // SLOT_BYTES) + 2 if self.lends else 0

    def make(self, pool: Pool) -> ThreadedQueue:
        """Make a queue."""
        return ThreadedQueue(self.depth, self.part_bytes, pool.slots * SLOT_BYTES)


def short_read(where: str, size: int, offset: int, count: int) -> StoreError:
    """Return the error for a store that sent another number of bytes than it was asked for."""
    error = StoreError(f"read {where}[{offset}:+{size}]: the store sent {count} bytes")
    error.errno = errno.EIO
    return error


def _code_of(error: BaseException) -> Code:
    # Without the advice, which whoever raises an error of this number gives.
    text = BaseException.__str__(error) if isinstance(error, StoreError) else str(error)
    return Code(getattr(error, "errno", None) or errno.EIO, text)


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
