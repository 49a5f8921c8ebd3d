"""Slots of a pool, to new files: a store that can sends them from where they are.

So bytes that were read for a copy are not copied once more, and the next ones are read meanwhile.
Knows slots, descriptors and the queue of one store; not what the bytes mean.
"""

from contextlib import AbstractContextManager
from types import TracebackType

from .._core import Pool
from ..options import SLOT_BYTES
from ..stores.base import Queue, Store, forget_frames
from .stream import write_error

SLOTS_MAX = 16  # where nobody has said how much memory there may be: 256 MiB
# Of the queue of a disk, which lends no slots: "auto" would write a file to find out how.
_IO, _DEPTH = "buffered", 1


def slots_for(store: Store, pool_bytes: int | None = None) -> int:
    """Return how many slots keep a store busy while more is read; 0: it copies what it is given.

    Args:
        pool_bytes: memory that somebody has allowed; all of a pool is touched when it is made.
    """
    most = max(SLOTS_MAX, (pool_bytes or 0) // SLOT_BYTES)
    return min(most, store.queue_kind(_IO, _DEPTH, SLOT_BYTES).lent_slots)


class SlotWrites(AbstractContextManager["SlotWrites"]):
    """Writes parts of slots; see the module. Use it in one thread, as a context manager."""

    def __init__(self, store: Store, pool: Pool) -> None:
        self._vfs, self._pool = store.vfs, pool
        self._queue: Queue | None = None
        if slots_for(store):
            self._queue = store.queue_kind(_IO, _DEPTH, SLOT_BYTES).make(pool)
        self._flying: dict[int, tuple[str, int, int]] = {}  # by slot: file, offset, bytes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until nobody reads the slots; the files are closed by now."""
        if self._queue is None:
            return
        if error is not None and self._queue.pending:
            forget_frames(error)  # they may refer to the slots' memory
        try:
            while error is None and self._flying:
                self._reap()
        finally:
            while self._queue.pending:
                self._queue.wait()
            self._queue.close()

    def write(self, fd: int, slot: int, start: int, size: int, offset: int, where: str) -> None:
        """Write a part of a slot; `clear` says when the slot may be used again.

        Args:
            start: of the part, in the slot.
            offset: in the file.
            where: the file, for people.
        """
        if self._queue is None:
            self._vfs.write(fd, self._pool.view(slot)[start : start + size], offset)
            return
        self._flying[slot] = where, offset, size
        self._queue.submit_write(fd, self._pool.address(slot) + start, size, offset, slot)

    def is_clear(self, slot: int) -> bool:
        """Return whether a slot may be used again at once.

        Raises:
            StoreError: a write has failed.
        """
        while slot in self._flying and getattr(self._queue, "has_landed", False):
            self._reap()  # without a wait
        return slot not in self._flying

    def clear(self, slot: int) -> None:
        """Wait until a slot may be used again.

        Raises:
            StoreError: a write has failed.
        """
        while slot in self._flying:
            self._reap()

    def _reap(self) -> None:
        assert self._queue is not None
        failures = []
        for slot, done, code in self._queue.wait():
            where, offset, size = self._flying.pop(slot)
            if code or done != size:
                failures.append(write_error(where, offset, size, done, code))
        if failures:
            raise failures[0]
