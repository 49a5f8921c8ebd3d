"""Extents → checked payloads in the pool. Knows slots, descriptors and checksums; no tensors.

Reads run ahead on the queue as far as the pool has slots. A payload is handed out only when its
checksum and the zero gap before it have been checked in memory that nothing else writes.
"""

import errno
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from types import TracebackType

import numpy as np

from .. import worker
from .._core import checksum, first_damaged, is_zero
from ..codecs.base import Payload
from ..errors import (
    CorruptError,
    NotCommittedError,
    ReplacedError,
    StoreError,
    TrustError,
    damaged,
)
from ..format import spec
from ..format.data_file import chunk_seed, seed_head
from ..format.manifest import CHUNKS, Manifest
from ..format.names import dotted
from ..format.signature import Statement
from ..plan.reads import ChunkRead, ReadRun
from ..stores.base import NOT_A_FILE, Store, words_of
from .pool import Lease
from .removed import check_not_removed, check_still_named, gone
from .trust import digest

Rest = Callable[[], None]  # what is still to be done of a run
Take = Callable[[ReadRun, int], Rest | None]


class DataFileReader(AbstractContextManager["DataFileReader"]):
    """Reads runs of a checkpoint's data files. Use it in one thread, as a context manager.

    Attributes:
        addresses: of the memory that each slot stands for.
    """

    def __init__(
        self, store: Store, lease: Lease, manifest: Manifest, cached_bytes: int = 0
    ) -> None:
        """Open nothing yet.

        Args:
            cached_bytes: files of so many together are read through the page cache; of the rest,
                small ones and those that are in it. 0: all are read past it.
        """
        self._cached_bytes, self._left_bytes = cached_bytes, cached_bytes
        self._small_bytes = lease.small_bytes if cached_bytes else 0
        self._cached, self._past = set[int](), set[int]()  # files read through the cache, past it
        self._store, self._lease, self._manifest = store, lease, manifest
        self._descriptors: dict[int, int] = {}
        self._fetched: set[int] = set()  # files that `fetch` reads
        self._lent: dict[int, memoryview] = {}  # by slot
        slots = range(lease.pool.slots)
        self.addresses = dict(zip(slots, map(lease.pool.address, slots), strict=True))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is in flight, then close the files."""
        while self._lease.queue.pending:
            self._lease.queue.wait()
        for descriptor in self._descriptors.values():
            self._store.vfs.close(descriptor)

    def stream(
        self,
        runs: Iterable[ReadRun],
        slots: Iterable[int] | None = None,
        *,
        in_order: bool = False,
        clear: Callable[[int], None] | None = None,
        is_clear: Callable[[int], bool] | None = None,
    ) -> Iterator[tuple[ReadRun, int]]:
        """Read runs ahead; yield each with its slot, which is reused for a later one.

        Args:
            slots: to read into; default: all of the pool.
            in_order: yield runs in the order given, not as they come.
            clear: called before a slot is read into again; waits until that may be.
            is_clear: whether it may be at once: else a read in flight is waited for instead.
        """
        queue, pool = self._lease.queue, self._lease.pool
        free, flying, coming = deque(slots or range(pool.slots)), dict[int, ReadRun](), iter(runs)
        landed: dict[int, tuple[int, int]] = {}
        while True:
            while free and (not flying or is_clear is None or is_clear(free[0])):
                if (run := next(coming, None)) is None:
                    break
                slot, extent = free.popleft(), run.extent
                if clear is not None:
                    clear(slot)
                self._close_idle({r.extent.file for r in flying.values()} | {extent.file})
                descriptor, address = self._descriptor(extent.file), pool.address(slot)
                size, at = extent.size_bytes, extent.offset
                queue.submit_read(descriptor, address, size, at, slot, extent.file in self._cached)
                flying[slot] = run
            if not flying:
                return
            first = next(iter(flying)) if in_order else None
            while not landed or (in_order and first not in landed):
                landed |= {slot: (done, code) for slot, done, code in queue.wait()}
            slot = next(iter(landed)) if first is None else first
            (done, code), run = landed.pop(slot), flying.pop(slot)
            self._check_read(run, done, code)
            if worker.here.job is not None and worker.here.job.interrupt is not None:
                worker.check()  # nothing more is placed for a caller that has gone on
            yield run, slot
            free.append(slot)

    def fetch(
        self, runs: Iterable[ReadRun], take: Take, meanwhile: Iterator[object]
    ) -> Generator[Rest, None, None]:
        """Read runs ahead, where the queue can `fetch`; close this to end what is under way.

        Args:
            take: called with each run and a slot that stands for its memory, in the thread that
                has read it. Returns what is still to be called.
            meanwhile: taken from while nothing is there yet, and in the end whole.

        Yields:
            That, run after run. The memory stays until the next one.
        """
        begin, job = self._lease.queue.fetch, worker.here.job
        assert begin is not None
        flying: deque[tuple[ReadRun, int, Future[Rest | None]]] = deque()
        most = 2 * self._lease.pool.slots  # with their rests, about as much memory as the pool has
        coming, slots = iter(runs), count(self._lease.pool.slots)

        def landed(run: ReadRun, slot: int, memory: memoryview) -> Rest | None:
            self._check_read(run, len(memory), 0)
            if job is not None:
                job.check()  # nothing more is placed for a caller that has gone on
            self._lent[slot] = memory
            self.addresses[slot] = np.frombuffer(memory, np.uint8).ctypes.data
            if (rest := take(run, slot)) is None:
                del self._lent[slot], self.addresses[slot]
            return rest

        try:
            while True:
                while len(flying) < most and (run := next(coming, None)) is not None:
                    extent, slot = run.extent, next(slots)
                    self._fetched.add(extent.file)
                    descriptor, call = self._descriptor(extent.file), partial(landed, run, slot)
                    future = begin(descriptor, extent.size_bytes, extent.offset, call)
                    flying.append((run, slot, future))
                if not flying:
                    deque(meanwhile, 0)
                    return
                run, slot, future = flying[0]
                while not future.done() and next(meanwhile, None) is not None:
                    pass
                try:
                    rest = future.result()
                except StoreError as error:
                    name = self._manifest.file_names[run.extent.file]
                    check_not_removed(self._store, name, error)
                    raise
                worker.check()
                if rest is not None:
                    yield rest
                    del self._lent[slot], self.addresses[slot]
                flying.popleft()
        finally:
            for _, _, future in flying:
                future.cancel()
            wait([future for _, _, future in flying])
            self._lent.clear()

    def is_whole(self, run: ReadRun, slot: int) -> bool:
        """Check all chunks of a run in its slot, and the gaps before them, at once.

        Returns:
            False where one is damaged; and of a signed checkpoint, where each has to be looked at.
            Then `check` says of a chunk what is wrong with it.
        """
        manifest, rows, file = self._manifest, run.reads.rows, run.extent.file
        if manifest.signed is not None:
            return False
        table, base = manifest.table, self.addresses[slot] - run.extent.offset
        head = seed_head(
            table.header.save_id, int(table.file_rank[file]), int(table.file_number[file])
        )
        columns = CHUNKS(manifest), table.chunk_checksum
        damaged = first_damaged(*columns, rows, file, base, head)
        return damaged == len(rows)

    def payload(self, run: ReadRun, row: int, slot: int) -> Payload:
        """Return where the payload of a chunk of a run is."""
        manifest = self._manifest
        base = self.addresses[slot] - run.extent.offset
        start, size = int(manifest.chunk_start[row]), int(manifest.chunk_bytes[row])
        return Payload(base + start, size, int(manifest.table.chunk_size_mode[row]) >> 24)

    def check(self, run: ReadRun, read: ChunkRead, slot: int) -> Payload:
        """Check one chunk of a run in its slot, and the gap before it.

        Raises:
            CorruptError: the text names file, extent, tensor and chunk.
        """
        manifest, row = self._manifest, read.row
        table, base = manifest.table, self.addresses[slot] - run.extent.offset
        start, size = int(manifest.chunk_start[row]), int(manifest.chunk_bytes[row])
        file = run.extent.file
        number = row - int(manifest.file_first_chunk[file])
        seed = chunk_seed(
            table.header.save_id, int(table.file_rank[file]), int(table.file_number[file]), number
        )
        found, expected = checksum(base + start, size, seed), int(table.chunk_checksum[row])
        gap = int(manifest.chunk_gap_start[row])
        if found != expected:
            what = self._what(read)
            raise damaged(
                self._store.location,
                f"{what}: checksum {found:016x}, MANIFEST says {expected:016x}; the bytes were "
                "damaged after they were written",
            )
        if not is_zero(base + gap, start - gap):
            what = self._what(read)
            raise damaged(
                self._store.location,
                f"{what}: the padding before it, from byte {gap}, is not zero",
            )
        if manifest.signed is not None:
            self._check_signed(manifest.signed, read, slot, start - run.extent.offset, size)
        return self.payload(run, row, slot)

    def _check_signed(
        self, signed: Statement, read: ChunkRead, slot: int, start: int, size: int
    ) -> None:
        memory = self._lent[slot] if slot in self._lent else self._lease.pool.view(slot)
        payload = memory[start : start + size] if size else b""
        if digest(payload) != signed.payloads[read.row].tobytes():
            raise TrustError(
                f"{self._what(read)}: these bytes are not the signed ones, and their checksum is "
                "right: they were changed on purpose. Get the checkpoint again from its publisher"
            )

    def _close_idle(self, busy: set[int]) -> None:
        """Close files that no read is in flight on; a checkpoint may have thousands of files."""
        for file in self._descriptors.keys() - busy - self._fetched:
            self._store.vfs.close(self._descriptors.pop(file))

    def _descriptor(self, file: int) -> int:
        if file not in self._descriptors:
            name, size = self._manifest.file_names[file], int(self._manifest.table.file_bytes[file])
            if file not in self._cached and file not in self._past and file not in self._fetched:
                if size < max(self._small_bytes, self._left_bytes):
                    self._left_bytes -= size
                    self._cached.add(file)
                elif self._cached_bytes > self._small_bytes and self._lease.queue.direct:
                    self._open_where_it_is(file, name, size)
        if file not in self._descriptors:
            direct = self._lease.queue.direct and file not in self._cached
            self._descriptors[file] = open_data_file(self._store, name, direct=direct)
        return self._descriptors[file]

    def _open_where_it_is(self, file: int, name: str, size: int) -> None:
        """Open a file that is read from memory, or from another machine; note any other."""
        descriptor = open_data_file(self._store, name, direct=False)
        if self._store.vfs.wants_direct(descriptor, size):
            self._store.vfs.close(descriptor)
            self._past.add(file)
        else:
            self._descriptors[file] = descriptor
            self._cached.add(file)

    def _check_read(self, run: ReadRun, done: int, code: int) -> None:
        file = run.extent.file
        if code:
            error = StoreError(f"read {self._where(file)}[{run.extent.offset}:]: {words_of(code)}")
            error.errno = code
            check_not_removed(self._store, self._manifest.file_names[file], error)
            raise error
        # The last page of a file is read only as far as the file goes.
        if run.extent.offset + done < min(
            run.extent.offset + run.extent.size_bytes, int(self._manifest.payload_end[file])
        ):
            # A read behind the end does not say where that is.
            end = min(run.extent.offset + done, self._store.vfs.size(self._descriptors[file]))
            raise damaged(
                self._store.location,
                f"{self._where(file)} ends at byte {end}, within its data; the file was cut",
            )

    def _what(self, read: ChunkRead) -> str:
        """Name a chunk: its place in its file, its tensor, and its number in the file."""
        manifest, row = self._manifest, read.row
        file = int(manifest.file_first_chunk.searchsorted(row, "right")) - 1
        start, size = int(manifest.chunk_start[row]), int(manifest.chunk_bytes[row])
        number = row - int(manifest.file_first_chunk[file])
        where = f"{self._where(file)}[{start}:+{size}]"
        return f"{where} (tensor {dotted(read.chunk.shard.tensor.path)}, chunk {number})"

    def _where(self, file: int) -> str:
        return f"{self._store.location}/{self._manifest.file_names[file]}"


@contextmanager
def still_there(store: Store) -> Iterator[None]:
    """Read something of a checkpoint; tell one that goes meanwhile from one that is damaged.

    Who removes a checkpoint removes MANIFEST first: what is missing while it stands is damage.

    Raises:
        NotCommittedError: another process has removed it, or what it was made from with it.
        CorruptError: what it was made from is gone, and it is not.
    """
    try:
        yield
    except (CorruptError, NotCommittedError, StoreError) as error:
        try:
            is_gone = not store.exists(spec.MANIFEST_NAME)
        except StoreError:
            is_gone = False  # for all that is known
        if is_gone:
            raise gone(store) from error
        if isinstance(error, ReplacedError):
            raise
        if isinstance(error, NotCommittedError):
            raise damaged(
                store.location, f"{store.location} is a delta of a missing checkpoint: {error}"
            ) from error
        raise


def open_data_file(store: Store, name: str, *, direct: bool) -> int:
    """Open a data file that the manifest names.

    Raises:
        CorruptError: it is missing or is not a regular file.
        NotCommittedError: MANIFEST is gone too, or of another save by now.
    """
    try:
        return store.open(name, direct=direct)
    except StoreError as error:
        if direct and error.errno == errno.EINVAL:
            # Said of what is no file, and by file systems that have no direct reads.
            store.vfs.close(open_data_file(store, name, direct=False))
        elif error.errno in (*NOT_A_FILE, errno.ENOENT, errno.ENOTDIR):
            check_still_named(store, name, error)
            raise damaged(
                store.location,
                f"{store.location}/{name} is missing or not a regular file, but MANIFEST names it",
            ) from error
        raise
