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
from ..errors import StoreError
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

    def queue_for(self, vfs: Vfs, backend: str, options: Options) -> Queue:
        key = (vfs, backend, options.queue_depth, options.block_bytes)
        if self.queue is None or self.queue_key != key:
            if self.queue is not None:
                self.queue.close()
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
    with shared.lock:
        backend = _probed(directory, vfs) if options.io == "auto" else options.io
        queue = shared.queue_for(vfs, backend, options)
        try:
            yield Lease(shared.pool, queue)
        finally:
            # A failed save may leave requests in flight: their slots must be free before the next
            # one.
            while queue.pending:
                queue.wait()


def _probed(directory: str, vfs: Vfs) -> str:
    try:
        return probe(_existing(directory), vfs)
    except StoreError:
        # The probe writes. A directory of others', a read-only or a full disk can still be read; a
        # save fails there by itself, and says on which file.
        return "buffered"


def _existing(directory: str) -> str:
    """Return the directory, or the nearest above it that exists: mostly the same file system."""
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
    return directory
