"""Host memory that saves and loads pass through: touched once, reused for ever.

Two kinds, both pinned once CUDA is in use. What streams holds a small pool alone (`lease`): one for
each size and process; a second caller in the same process waits. A save in the background holds a
pool that takes its whole share of the state (`staging`): one for each process, as there is one such
save at a time, until it gives it back. Reads and writes in flight belong to the lease's queue, so
nothing outlives it.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import worker
from .._core import Pool
from ..brief import show_bytes
from ..errors import HoldfastError, OptionError
from ..options import SLOT_BYTES, STREAM_BYTES, Options
from ..stores.base import Queue, QueueKind, Store
from .memory import available_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("holdfast")

CACHED_BYTES = 256 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of this process


@dataclass(frozen=True)
class Lease:
    """A pool in use: its slots' addresses and views, and a queue that reads and writes them.

    Attributes:
        small_bytes: files of fewer go through the page cache, and no room is made for them.
        cached_bytes: of a save and of a load, the first so many bytes go through it too.
        give_back: lets the next one have it.
    """

    pool: Pool
    queue: Queue
    small_bytes: int
    cached_bytes: int
    give_back: Callable[[], None] = lambda: None

    @property
    def memory(self) -> "torch.Tensor":
        """All slots, one behind the other, as one uint8 tensor."""
        import torch

        return torch.frombuffer(self.pool.memory(), dtype=torch.uint8)

    def tensor(self, slot: int) -> "torch.Tensor":
        """Return the slot as a uint8 tensor."""
        import torch

        return torch.frombuffer(self.pool.view(slot), dtype=torch.uint8)


class _Queued:
    """A pool, and the queue last used with it."""

    def __init__(self, slots: int) -> None:
        self.pool = Pool(SLOT_BYTES, slots)
        self.queue: Queue | None = None
        self.queue_kind: QueueKind | None = None
        self._was_pinned = False  # or could not be
        self._unpin: Callable[[], None] | None = None

    def close(self) -> None:
        """End the queue, and unpin the memory."""
        if self.queue is not None:
            self.queue.close()
        if self._unpin is not None:
            self._unpin()

    def queue_for(self, store: Store, options: Options) -> Queue:
        """Return a queue for the memory, which is pinned where CUDA is in use by now."""
        torch = sys.modules.get("torch")
        if not self._was_pinned and torch is not None and torch.cuda.is_initialized():
            self._was_pinned = True  # that is tried once
            self._unpin = _pin(self.pool.address(0), self.pool.slots * SLOT_BYTES)
        kind = store.queue_kind(options.io, options.queue_depth, options.block_bytes)
        if self.queue is None or self.queue_kind != kind:
            if self.queue is not None:
                self.queue.close()
            self.queue = self.queue_kind = None  # when the next line fails, there is none
            self.queue, self.queue_kind = kind.make(self.pool), kind
        return self.queue


class _Shared(_Queued):
    """A pool that one thread after the other holds."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.lock = threading.Lock()
        self.owner = (0, 0)  # who holds the lock: a place of `worker`
        self._thread = 0  # that runs it

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the pool alone.

        Raises:
            HoldfastError: this very thread holds it, so waiting would be for ever.
        """
        place = worker.here.place or worker.place()
        if self._thread == threading.get_ident():
            raise HoldfastError(
                "this call comes from a callback of a save, load or copy, for whose end it would "
                "wait. Call it when that one has ended"
            )
        while not self.lock.acquire(timeout=worker.SLICE_S):
            worker.check()
            if self.owner[0] == place[0] and self.owner[1] < place[1]:
                raise HoldfastError(
                    "this call interrupts another save or load of this thread (from a signal "
                    "handler?). Let that one end first, or set a flag and save in the training loop"
                )
        self.owner, self._thread = place, threading.get_ident()
        try:
            yield
        finally:
            self.owner, self._thread = (0, 0), 0
            self.lock.release()


_pools: dict[tuple[int, int, str], _Shared] = {}
_pools_lock = threading.Lock()


def _forget() -> None:
    """In a forked child, where nobody would unlock it: pools are made anew there."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _lent.clear()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def lease(store: Store, options: Options, use: str = "") -> Iterator[Lease]:
    """Hold a pool for one save or load of files in a store.

    Args:
        use: what lasts long has a pool of its own, or others would wait for it.
    """
    slots = (options.pool_bytes or STREAM_BYTES) // SLOT_BYTES
    with _pools_lock:
        # Threads do not survive a fork, so neither does a pool with its queue.
        key = (os.getpid(), slots, use)
        if key not in _pools:
            _pools[key] = _Shared(slots)
        shared = _pools[key]
    with shared.held():
        queue = shared.queue_for(store, options)
        # What failed before may have left requests in flight, if it was interrupted again while
        # it waited for them: nobody may have their slots before they have ended.
        if queue.pending:
            _drain(queue)
        try:
            yield _lease(shared.pool, queue, options, CACHED_BYTES)
        finally:
            if queue.pending:
                _drain(queue)


def _pin(address: int, size_bytes: int) -> Callable[[], None] | None:
    """Pin host memory for fast copies from and to CUDA devices.

    Returns:
        what unpins it, or None when it could not be pinned: copies are slower then.
    """
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(runtime.cudaHostRegister(address, size_bytes, _PORTABLE)):
        # CUDA keeps the error for this thread's next kernel, which reports it as its own.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.uint8, device="cuda")
        logger.warning(
            "%s of host memory could not be pinned (CUDA error %d), so copies from and to "
            "CUDA devices are slower. Look at the limit of locked memory",
            *(show_bytes(size_bytes), code),
        )
        return None
    return lambda: runtime.cudaHostUnregister(address)


_staging: dict[int, _Queued] = {}  # by process; under the lock
_lent: set[int] = set()  # processes whose pool is out


def staging(store: Store, options: Options, size_bytes: int) -> Lease:
    """Return a pool of at least ``size_bytes`` for the one save in the background.

    It is made larger when that is needed, and otherwise the same for ever. Nobody else has it until
    `Lease.give_back`.

    Raises:
        HoldfastError: another save has it.
        OptionError: the machine has not that much memory to give.
    """
    slots, process = -(-size_bytes // SLOT_BYTES), os.getpid()
    with _pools_lock:
        if process in _lent:
            raise HoldfastError(
                "another background save of this process uses the memory for its copy; wait for "
                "its result() first"
            )
        _lent.add(process)
    try:
        held = _staging.get(process)
        if held is None or held.pool.slots < slots:
            freed = 0
            if held is not None:
                del _staging[process]
                held.close()
                freed = held.pool.slots * SLOT_BYTES
                held = None
            _check_memory(slots * SLOT_BYTES, freed)
            slots = max(slots, (options.pool_bytes or 0) // SLOT_BYTES)
            held = _staging[process] = _Queued(slots)
        queue = held.queue_for(store, options)
        _drain(queue)
    except BaseException:
        _lent.discard(process)
        raise
    # The copy into the page cache would take time of the training's CPUs.
    return _lease(held.pool, queue, options, 0, lambda: _lent.discard(process))


def check_pool(pool_bytes: int, needed_bytes: int, rank: int) -> None:
    """Check that a limit takes what a rank has to stage.

    Raises:
        OptionError: it does not; the text has both numbers.
    """
    if pool_bytes < needed_bytes:
        raise OptionError(
            f"pool_bytes is {pool_bytes}, but rank {rank} has to copy {needed_bytes} bytes: a "
            f"background save copies its whole share first. Give pool_bytes={needed_bytes} or "
            "more, or leave it out (the pool is then large enough), or use holdfast.save"
        )


def _check_memory(needed: int, freed: int) -> None:
    """Check before memory is touched: what is too much ends the process, not the call."""
    available = available_bytes() + freed
    if needed > available:
        raise OptionError(
            f"a background save needs {show_bytes(needed)} of host memory for a copy of this "
            f"rank's share, and {show_bytes(available)} are available. Use holdfast.save, which "
            "needs 128 MiB, or let more ranks write (Options.writers)"
        )


def _drain(queue: Queue) -> None:
    while queue.pending:
        queue.wait()


def _lease(
    pool: Pool,
    queue: Queue,
    options: Options,
    cached_bytes: int,
    give_back: Callable[[], None] = lambda: None,
) -> Lease:
    """Return a lease; what small files are, and cached ones, is said here.

    The page cache takes a file of one block at once, and its fsync writes it: that is one wait for
    the disk instead of two. A file of a small state is written through it as fast as past it, and
    whoever loads it soon finds it there. Who has chosen how files are written has it so for all,
    in the environment for all but those of one block.
    """
    small = options.block_bytes if options.io == "auto" else 0
    if not queue.direct or os.environ.get("HOLDFAST_IO"):
        cached_bytes = 0
    return Lease(pool, queue, small, small and max(small, cached_bytes), give_back)
