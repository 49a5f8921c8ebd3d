"""Payloads → data files. Knows slots, offsets and descriptors; no tensors.

Room is reserved in the current slot, the payload appended, and whole slots are handed to the
queue, which writes them while the next one fills. A file is durable, with all that its footer
says, when `finish` returns.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..codecs.base import Payload
from ..errors import NoSpaceError, StoreError
from ..format import spec
from ..format.data_file import align_payload, chunk_seed, encode_footer, encode_header
from ..format.names import data_file_name
from ..format.rows import FileRows
from ..format.table import Header, Table
from ..layout import Shard, chunk_count
from ..options import SLOT_BYTES
from ..stores.base import Store
from .pool import Lease

FOOTER_ROOM_BYTES = 64 << 10  # allocated beside the payloads; a longer footer extends the file
CHUNK_ROW_BYTES = 16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SyncError(StoreError):
    """An fsync failed: what is on the disk is not known, and a second fsync would lie."""


@dataclass(frozen=True, slots=True)
class WriterPlan:
    """Where one rank's data files go.

    Attributes:
        first_number: number of the first data file.
        payload_bytes: bytes to come, for the allocation of the file.
        file_bytes: a file does not grow past this by a further shard.
    """

    header: Header
    rank: int
    first_number: int
    payload_bytes: int
    file_bytes: int

    def starting_at(self, number: int) -> "WriterPlan":
        """Return the same plan under other file numbers."""
        return replace(self, first_number=number)


class DataFileWriter:
    """One rank's data files, one after the other. Use it in one thread."""

    def __init__(self, store: Store, lease: Lease, plan: WriterPlan) -> None:
        self._store, self._lease, self._plan = store, lease, plan
        self._remaining_bytes = plan.payload_bytes
        self._free = list(range(lease.pool.slots))
        self._in_flight: dict[int, tuple[int, int]] = {}  # slot → (offset, bytes)
        self.next_number = plan.first_number
        self.tables: list[Table] = []
        self._names: list[str] = []
        self._descriptor = -1  # of the file being written, between `begin_shard` and `finish`

    def begin_shard(self, shard: Shard) -> None:
        """Start the rows of a shard; goes on in a new file when this one would grow too large."""
        if self._descriptor < 0:
            self._open_file()
        elif self._position + self._room_for(shard) > self._plan.file_bytes:
            self._close_file()
            self._open_file()
        self._rows_bytes += _row_bytes(shard, self._plan.header.chunk_elements)
        self._shard_first_chunk = len(self._rows.offsets)

    def end_shard(self, shard: Shard, digest: bytes) -> None:
        """Add the row of the shard, all of whose chunks have been appended."""
        self._rows.add_shard(shard, digest, self._shard_first_chunk)

    def reserve(self, size_bytes: int) -> tuple[int, int, int]:
        """Find room for the next payload, and zero the gap before it.

        Returns:
            (slot, first byte in it, checksum seed of the chunk).
        """
        at = align_payload(self._position, size_bytes)
        if at + size_bytes > self._slot_offset + SLOT_BYTES:
            self._flush()
            at = align_payload(self._position, size_bytes)
        self._zero_until(at)
        save_id, chunk = self._plan.header.save_id, len(self._rows.offsets)
        seed = chunk_seed(save_id, self._plan.rank, self._rows.number, chunk)
        return self._slot, at - self._slot_offset, seed

    def append(self, payload: Payload, checksum: int) -> None:
        """Add the payload that now stands where `reserve` said."""
        self._rows.add_chunk(payload.size_bytes, payload.mode, self._position, checksum)
        self._position += payload.size_bytes
        self._remaining_bytes -= payload.size_bytes

    def finish(self) -> list[Table]:
        """Make everything durable; return the table of each file.

        Raises:
            StoreError: something could not be written.
            SyncError: fsync failed; `abandon` and write it all again under other numbers.
        """
        self._close_file()
        if self._names:
            self._sync(lambda: self._store.sync_path(self._names[0]))
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

    def _room_for(self, shard: Shard) -> int:
        """Return what a shard adds to the file at most, with its padding and the whole footer."""
        chunk_elements = self._plan.header.chunk_elements
        padding = chunk_count(shard, chunk_elements) * spec.LARGE_ALIGN_BYTES
        footer = self._rows_bytes + _row_bytes(shard, chunk_elements) + FOOTER_ROOM_BYTES
        return shard.size_bytes + padding + footer

    def _open_file(self) -> None:
        name = data_file_name(self._plan.header.save_id, self._plan.rank, self.next_number)
        self._descriptor = self._store.create(name, direct=self._lease.queue.direct)
        self._names.append(name)
        self._rows = FileRows(self._plan.rank, self.next_number)
        self.next_number += 1
        expected = min(self._remaining_bytes + FOOTER_ROOM_BYTES, self._plan.file_bytes)
        # Writes into allocated space do not wait for the file to grow, and a full disk says so
        # first.
        self._store.vfs.allocate(self._descriptor, expected)
        self._slot = self._take_slot()
        self._slot_offset = self._position = self._rows_bytes = 0
        self._shard_first_chunk = 0
        self._put(encode_header(self._plan.header.save_id, self._plan.rank, self._rows.number))

    def _close_file(self) -> None:
        """Write the footer, wait for every write, cut the padding off, make the file durable."""
        offset = align_payload(self._position, 0)
        footer, checksum = encode_footer(self._rows.table(self._plan.header), offset)
        self._zero_until(offset)
        self._put(footer)
        size = self._position
        self._flush()
        self._free.append(self._slot)
        while self._in_flight:
            self._reap()
        self._store.vfs.truncate(self._descriptor, size)
        self._sync(lambda: self._store.vfs.sync(self._descriptor))
        self._close_descriptor()
        self.tables.append(
            replace(
                self._rows.table(self._plan.header),
                file_bytes=np.array([size], np.uint64),
                file_footer_checksum=np.array([checksum], np.uint64),
            )
        )

    def _put(self, data: bytes) -> None:
        """Write bytes that are no payload, through as many slots as they take."""
        while data:
            if self._position == self._slot_offset + SLOT_BYTES:
                self._flush()
            start = self._position - self._slot_offset
            part = data[: SLOT_BYTES - start]
            self._lease.pool.view(self._slot)[start : start + len(part)] = part
            self._position += len(part)
            data = data[len(part) :]

    def _zero_until(self, position: int) -> None:
        start, end = self._position - self._slot_offset, position - self._slot_offset
        if end > start:
            self._lease.pool.view(self._slot)[start:end] = bytes(end - start)
            self._position = position

    def _flush(self) -> None:
        """Hand the slot to the queue, padded to whole pages, and take a free one."""
        align = spec.LARGE_ALIGN_BYTES
        end = -(-self._position // align) * align
        self._zero_until(end)
        size, address = end - self._slot_offset, self._lease.pool.address(self._slot)
        self._in_flight[self._slot] = (self._slot_offset, size)
        queue = self._lease.queue
        queue.submit_write(self._descriptor, address, size, self._slot_offset, self._slot)
        self._slot_offset = end
        self._slot = self._take_slot()

    def _take_slot(self) -> int:
        while not self._free:
            self._reap()
        return self._free.pop(0)

    def _reap(self) -> None:
        """Wait for writes; every completion is checked."""
        failures = []
        for slot, done, code in self._lease.queue.wait():
            offset, size = self._in_flight.pop(slot)
            self._free.append(slot)
            if code or done != size:
                failures.append(self._write_error(offset, size, done, code))
        if failures:
            raise failures[0]

    def _write_error(self, offset: int, size: int, done: int, code: int) -> StoreError:
        where = f"{self._store.location}/{self._names[-1]}"
        why = os.strerror(code) if code else "the disk took no more"
        kind = NoSpaceError if code in _FULL or not code else StoreError
        error = kind(f"write {where}[{offset}:+{size}]: {why} after {done} bytes")
        error.errno = code or errno.ENOSPC
        error.__cause__ = OSError(error.errno, why, where)
        return error

    def _sync(self, call: Callable[[], None]) -> None:
        try:
            call()
        except NoSpaceError:
            raise  # a full disk is as full under another name
        except StoreError as error:
            failure = SyncError(f"{error}; what was written is not known to be on the disk")
            failure.errno = error.errno
            raise failure from error

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._store.close(descriptor)


def _row_bytes(shard: Shard, chunk_elements: int) -> int:
    """Return the bytes a shard takes in the footer at most: its rows, its tensor's name."""
    rows = chunk_count(shard, chunk_elements) + 2 + len(shard.box.shape)
    return CHUNK_ROW_BYTES * rows + 4 * len(repr(shard.tensor.path)) + 256
