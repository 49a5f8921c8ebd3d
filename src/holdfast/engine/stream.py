"""One file's bytes, in order, through a window of the pool to the disk.

A window is a ring: bytes are put down one behind the other, whole parts are handed to the queue,
and memory is used again when its write has ended. So the next bytes are filled in while those
before them are written. Knows memory, positions and the queue; not what the bytes mean.
"""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import NoSpaceError, StoreError
from ..format.spec import LARGE_ALIGN_BYTES
from ..options import SLOT_BYTES
from ..stores.base import Code, words_of
from .file_plan import Window
from .pool import Lease

# Enough to keep the deepest queue busy; a disk that fails is noticed after so much at the latest.
PARTS_IN_FLIGHT_MAX = 16
CACHED_PART_BYTES = 4 << 20  # of a small file: the disk begins sooner
LENT_IN_FLIGHT_MAX = 6  # of memory that is not the pool's
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class Writes:
    """What has become of writes.

    Attributes:
        done_bytes: handed over by the disk.
        waits, wait_s: how often, and how long, the disk was waited for.
        sync_s: how long fsync took.
    """

    done_bytes: int = 0
    waits: int = 0
    wait_s: float = 0.0
    sync_s: float = 0.0


class FileStream:
    """The bytes of one open file. Use it in one thread.

    Attributes:
        position: of the next byte, in the file.
        part_bytes: of memory to fill in at once; the disk writes it while more is filled in.
    """

    def __init__(
        self,
        lease: Lease,
        descriptor: int,
        where: str,
        window: Window,
        writes: Writes,
        *,
        cached: bool,
    ) -> None:
        """Begin at the first byte.

        Args:
            where: the file, for people.
            writes: counts them.
            cached: it goes through the page cache.
        """
        self._cached = cached
        memory_bytes = lease.pool.slots * lease.pool.slot_bytes
        self.part_bytes = min(CACHED_PART_BYTES if cached else SLOT_BYTES, memory_bytes // 4)
        self._lease, self._writes = lease, writes
        self._descriptor, self._where = descriptor, where
        self._base, self._memory = lease.pool.address(0), lease.pool.memory()
        self.position = 0
        self._submitted = 0  # file position up to which bytes were handed to the queue
        self._in_flight: dict[int, tuple[int, int]] = {}  # offset in memory → (in the file, bytes)
        self._lent: dict[int, tuple[int, int, Callable[[], None]]] = {}  # by address
        self._enter(window)

    def fits(self, at: int, size_bytes: int) -> bool:
        """Whether bytes of file position ``at`` on would stand in one piece before the turn."""
        return self._shift + at + size_bytes <= self._window[1]

    def turn(self) -> None:
        """Fill up the page, and go on at the beginning of the window."""
        self.move(self._window)

    def move(self, window: Window) -> None:
        """Fill up the page, and go on at the beginning of another window."""
        if rest := -self.position % LARGE_ALIGN_BYTES:
            self._zero_until(self.position + rest)
        self._submit()
        self._enter(window)

    def room(self, at: int, size_bytes: int) -> int:
        """Zero the gap before ``at``, wait until the memory behind it is free.

        Returns:
            where in the pool the bytes of file position ``at`` stand.
        """
        end = self._shift + at + size_bytes
        if end > self._free_until:
            self._claim(end)
        if at > self.position:
            self._zero_until(at)
        return self._shift + at

    def advance(self, size_bytes: int) -> None:
        """Take up bytes that now stand where `room` said."""
        self.position += size_bytes
        if self.position - self._submitted >= self.part_bytes:
            self._submit(self.part_bytes)

    def put(self, data: bytes) -> None:
        """Add bytes that need not stand in one piece."""
        while data:
            start = self._shift + self.position
            if start == self._window[1]:
                self.turn()
                continue
            part = data[: self._window[1] - start]
            if start + len(part) > self._free_until:
                self._claim(start + len(part))
            self._memory[start : start + len(part)] = part
            self.advance(len(part))
            data = data[len(part) :]

    def lend(self, address: int, size_bytes: int, done: Callable[[], None]) -> int:
        """Add whole pages that stand elsewhere, behind the page begun.

        Args:
            done: called when it has been written.

        Returns:
            their position.
        """
        if rest := -self.position % LARGE_ALIGN_BYTES:
            self._zero_until(self.position + rest)
        self._submit()
        while len(self._lent) >= LENT_IN_FLIGHT_MAX:
            self._reap()
        self._lent[address] = self.position, size_bytes, done
        queue = self._lease.queue
        begin, end = self.position, self.position + size_bytes
        queue.submit_write(self._descriptor, address, size_bytes, begin, address)
        self.position = self._submitted = end
        self._shift -= size_bytes
        return begin

    def finish(self, at: int, data: bytes) -> None:
        """Add the last bytes, at ``at``; hand over all there is, and wait for every write."""
        if at > self.position:
            self._zero_until(at)
        self.put(data)
        self.move(self._window)
        if self._in_flight or self._lent:
            self._reap(every=True)

    def _zero_until(self, position: int) -> None:
        """Add zeros up to a position behind this one."""
        start, end = self._shift + self.position, self._shift + position
        if end > self._free_until:
            self._claim(end)
        self._memory[start:end] = bytes(end - start)
        self.advance(end - start)

    def _enter(self, window: Window) -> None:
        self._window = window
        self._shift = window[0] - self.position  # memory offset minus file position
        self._free_until = window[0]

    def _claim(self, end: int) -> None:
        """Wait until memory is free from the next byte up to offset ``end``."""
        here = self._shift + self._submitted
        while end > self._free_until:
            ahead = filter(here.__le__, self._in_flight)
            self._free_until = min(ahead, default=self._window[1])
            if end > self._free_until:
                self._reap()

    def _submit(self, step: int = LARGE_ALIGN_BYTES) -> None:
        """Hand what is full to the queue: up to a multiple of ``step``, whole pages."""
        end = self.position // step * step
        size, start = end - self._submitted, self._shift + self._submitted
        if not size:
            return
        while len(self._in_flight) >= PARTS_IN_FLIGHT_MAX:
            self._reap()
        self._in_flight[start] = (self._submitted, size)
        queue, address = self._lease.queue, self._base + start
        queue.submit_write(self._descriptor, address, size, self._submitted, start, self._cached)
        self._submitted = end

    def _reap(self, every: bool = False) -> None:
        """Wait for a write, or for every one; each completion is checked."""
        failures, queue = [], self._lease.queue
        started = time.perf_counter()
        completions = queue.wait()
        while every and queue.pending:
            completions += queue.wait()
        self._writes.wait_s += time.perf_counter() - started
        self._writes.waits += 1
        for start, done, code in completions:
            if start in self._lent:
                offset, size, give_back = self._lent.pop(start)
                give_back()
            else:
                offset, size = self._in_flight.pop(start)
            self._writes.done_bytes += done
            if code or done != size:
                failures.append(write_error(self._where, offset, size, done, code))
        if failures:
            raise failures[0]


def write_error(where: str, offset: int, size: int, done: int, code: int) -> StoreError:
    """Return the error for a write that a queue hands back.

    Args:
        where: the file, for people.
        done: bytes written.
        code: as `Queue.wait` gives it.
    """
    why = words_of(code) if code else "the disk took no more"
    kind = NoSpaceError if code in _FULL or not code else StoreError
    text = f"write {where}[{offset}:+{size}]: {why} after {done} bytes"
    error = kind(why if isinstance(code, Code) else text)  # a store names the file itself
    error.errno = code or errno.ENOSPC
    error.__cause__ = OSError(error.errno, why, where)
    return error
