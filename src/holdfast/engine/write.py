"""Payloads → data files. Knows positions and descriptors; no tensors.

Room is reserved, the payload appended, and the file's stream writes what is full while more is
filled in. A file is synced when the next one begins, the last one by `finish`: until then its
descriptor stays open, since only that is told of every failure.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import NoSpaceError, StoreError
from ..format.data_file import align_payload, encode_footer, encode_header
from ..format.names import data_file_name
from ..format.table import Table
from ..stores.base import Store
from .file_plan import FOOTER_ROOM_BYTES, Images, WriterPlan
from .pool import Lease
from .stream import FileStream, Writes

Target = TypeVar("Target")  # a descriptor, or a name


class SyncError(StoreError):
    """An fsync failed: what is on the disk is not known, and a second fsync would lie."""


class DataFileWriter:
    """One rank's data files, one after the other. Use it in one thread.

    Attributes:
        number: of the file being written.
        base: address of the pool.
        window_bytes: of the memory that a file passes through.
        writes: of all files, which are durable when `finish` returns.
        tables: of the files that are closed.
    """

    def __init__(
        self, store: Store, lease: Lease, plan: WriterPlan, images: Images | None = None
    ) -> None:
        """Prepare; nothing is written yet.

        Args:
            images: where every chunk stands already.
        """
        self._store, self._lease, self.plan = store, lease, plan
        self._images = images
        self.number = plan.first_number - 1
        self.base = lease.pool.address(0)
        self.window_bytes = lease.pool.slots * lease.pool.slot_bytes
        self.writes = Writes()
        self.tables: list[Table] = []
        self._names: list[str] = []
        self._descriptor = -1  # of the file being written, or not synced yet
        self._stream: FileStream  # its bytes

    def open(self, expected_bytes: int, *, is_exact: bool) -> FileStream:
        """Begin the next file; return its bytes, of which the header is there.

        Args:
            expected_bytes: of header and payloads, for which room is made on the disk.
            is_exact: there will be so many; else what is encoded may fit on a full disk.
        """
        if self._descriptor >= 0:
            self._sync_file()
        plan, self.number = self.plan, self.number + 1
        name = data_file_name(plan.header.save_id, plan.rank, self.number)
        size, lease = expected_bytes + FOOTER_ROOM_BYTES, self._lease
        # An encoder takes the CPUs, which the copy into the page cache would take from it.
        among_first = is_exact and self.writes.done_bytes + size < lease.cached_bytes
        cached = size < lease.small_bytes or among_first
        self._descriptor = self._store.create(name, direct=lease.queue.direct and not cached)
        self._names.append(name)
        if size >= lease.small_bytes:
            expected = min(size, plan.file_bytes)
            # Writes into allocated space do not wait for the file to grow, and a full disk says so
            # first.
            with contextlib.nullcontext() if is_exact else contextlib.suppress(NoSpaceError):
                self._store.vfs.allocate(self._descriptor, expected)
        window = (0, self.window_bytes)
        if self._images and self._images.windows:
            window = self._images.windows[self.number - plan.first_number]
        elif self._images:
            window = self._images.footers
        where = f"{self._store.location}/{name}"
        self._stream = FileStream(
            self._lease, self._descriptor, where, window, self.writes, cached=cached
        )
        self._stream.put(encode_header(plan.header.save_id, plan.rank, self.number))
        return self._stream

    def close(self, table: Table) -> None:
        """Write the footer, wait for every write, cut the padding off.

        Args:
            table: of this file alone; size and checksum, which the footer has as 0, are put in.
        """
        stream = self._stream
        if self._images and self._images.windows:
            stream.move(self._images.footers)
        offset = align_payload(stream.position, 0)
        footer, checksum = encode_footer(table, offset)
        stream.finish(offset, footer)
        size = offset + len(footer)
        self._store.vfs.truncate(self._descriptor, size)
        self._store.vfs.start_sync(self._descriptor)
        table.file_bytes[0], table.file_footer_checksum[0] = size, checksum
        self.tables.append(table)

    def finish(self) -> list[Table]:
        """Make all files durable, and their names; return the table of each.

        Raises:
            SyncError: fsync failed; `abandon` and write it all again under other numbers.
        """
        if self._names:
            if self._descriptor >= 0:
                self._sync_file()
            self._sync(self._store.sync_made, self._names[0])
        return self.tables

    def abandon(self) -> None:
        """Wait for what is in flight and remove every file written; never raises a StoreError."""
        while self._lease.queue.pending:
            self._lease.queue.wait()
        with contextlib.suppress(StoreError):
            self._close_descriptor()
        for name in self._names:
            with contextlib.suppress(StoreError):
                self._store.remove(name)

    def _sync(self, call: Callable[[Target], None], target: Target) -> None:
        try:
            started = time.perf_counter()
            call(target)
            self.writes.sync_s += time.perf_counter() - started
        except NoSpaceError:
            raise  # a full disk is as full under another name
        except StoreError as error:
            lost = "; the written data may not be on the disk. Save again"
            failure = SyncError(f"{error}{'' if 'What to do' in str(error) else lost}")
            failure.errno = error.errno
            raise failure from error

    def _sync_file(self) -> None:
        self._sync(self._store.vfs.sync, self._descriptor)
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._store.vfs.close(descriptor)


def sync_files(store: Store, names: Sequence[str]) -> None:
    """Sync files that another process wrote: it may have ended before it did."""
    for name in names if store.can_link else ():  # elsewhere a file that is there is durable
        descriptor = store.open(name, direct=False)
        try:
            store.vfs.sync(descriptor)
        finally:
            store.vfs.close(descriptor)


def make_durable(store: Store, tables: Sequence[Table]) -> None:
    """Make the names of a rank's files durable up to the root, where no coordinator sees them."""
    for table in tables[:1]:  # all are in one directory
        rank, number = int(table.file_rank[0]), int(table.file_number[0])
        name = data_file_name(table.header.save_id, rank, number)
        store.sync_path(name)
        store.sync_above(name)
