"""Host memory that saves and loads stream through: touched once, reused for ever.

One pool for each size and process. Whoever streams holds it alone (`lease`); a second caller in
the same process waits. Reads and writes in flight belong to the lease's queue, so nothing outlives
it.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._core import Pool, Queue, Vfs, probe
from ..errors import HoldfastError, StoreError
from ..options import SLOT_BYTES, Options

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Lease:
    """A pool in use: its slots' addresses and views, and a queue that reads and writes them."""

    pool: Pool
    queue: Queue

    def tensor(self, slot: int) -> "torch.Tensor":
        """Return the slot as a uint8 tensor."""
        import torch

        return torch.frombuffer(self.pool.view(slot), dtype=torch.uint8)


class _Shared:
    """A pool, its lock, and the queue last used with it."""

    def __init__(self, slots: int) -> None:
        self.pool = Pool(SLOT_BYTES, slots)
        self.lock = threading.Lock()
        self.queue: Queue | None = None
        self.queue_key: tuple[object, ...] = ()
        self.owner = 0  # the thread that holds the lock

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the pool alone.

        Raises:
            HoldfastError: this very thread holds it, so waiting would be for ever.
        """
        if self.owner == threading.get_ident():
            raise HoldfastError(
                "a save or load is running in this thread already, and was interrupted by this "
                "one (a signal handler?); let it end first, or set a flag and save in the loop"
            )
        with self.lock:
            self.owner = threading.get_ident()
            try:
                yield
            finally:
                self.owner = 0

    def queue_for(self, vfs: Vfs, backend: str, options: Options) -> Queue:
        key = (vfs, backend, options.queue_depth, options.block_bytes)
        if self.queue is None or self.queue_key != key:
            if self.queue is not None:
                self.queue.close()
            self.queue, self.queue_key = None, ()  # when the next line fails, there is none
            self.queue = Queue(vfs, backend, self.pool, options.queue_depth, options.block_bytes)
            self.queue_key = key
        return self.queue


_pools: dict[tuple[int, int], _Shared] = {}
_pools_lock = threading.Lock()


@contextlib.contextmanager
def lease(vfs: Vfs, directory: str, options: Options) -> Iterator[Lease]:
    """Hold a pool for one save or load of files in ``directory``."""
    slots = options.pool_bytes // SLOT_BYTES
    with _pools_lock:
        # Threads do not survive a fork, so neither does a pool with its queue.
        key = (os.getpid(), slots)
        if key not in _pools:
            _pools[key] = _Shared(slots)
        shared = _pools[key]
    with shared.held():
        backend = _probed(directory, vfs) if options.io == "auto" else options.io
        queue = shared.queue_for(vfs, backend, options)
        # What failed before may have left requests in flight, if it was interrupted again while
        # it waited for them: nobody may have their slots before they have ended.
        _drain(queue)
        try:
            yield Lease(shared.pool, queue)
        finally:
            _drain(queue)


def _drain(queue: Queue) -> None:
    while queue.pending:
        queue.wait()


def _probed(directory: str, vfs: Vfs) -> str:
    try:
        return probe(_nearby(directory), vfs)
    except StoreError:
        # The probe writes. A directory of others', a read-only or a full disk can still be read; a
        # save fails there by itself, and says on which file.
        return "buffered"


def _nearby(directory: str) -> str:
    """Return a directory of the same file system to probe in: above this one where there is one.

    A checkpoint's own directory holds nothing but the checkpoint, not even for a moment.
    """
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
    above = os.path.dirname(directory)
    same = os.stat(above).st_dev == os.stat(directory).st_dev
    return above if same and os.access(above, os.W_OK) else directory
