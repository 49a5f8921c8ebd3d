"""Payloads → data files. Knows positions and descriptors; no tensors.

Room is reserved, the payload appended, and the file's stream writes what is full while more is
filled in. A file is durable, with all that its footer says, when `finish` returns.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .._core import copy
from ..errors import NoSpaceError, StoreError
from ..format import spec
from ..format.data_file import align_payload, chunk_seed, encode_footer, encode_header
from ..format.header import Header
from ..format.names import data_file_name
from ..format.rows import FileRows, Place
from ..format.table import Table
from ..layout import Shard, chunk_count, chunks_of
from ..options import SLOT_BYTES
from ..stores.base import Store
from .pool import Lease
from .stream import FileStream, Window, Writes
from .workspace import Segment

ENCODED_SLOTS = 2  # of the window that small segments pass through
COPIED_BYTES = 1 << 20  # below, a segment is copied: pages of its own would be too much of it
FOOTER_ROOM_BYTES = 64 << 10  # allocated beside the payloads; a longer footer extends the file
CHUNK_ROW_BYTES = 16


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

    def has_room(self, size_bytes: int) -> bool:
        """Whether a file may have so many bytes before the rest of its footer."""
        return size_bytes + FOOTER_ROOM_BYTES <= self.file_bytes


@dataclass(frozen=True, slots=True)
class Images:
    """Data files as they will be, each in one piece of the pool, for chunks staged in advance.

    Attributes:
        offsets: of every chunk in the pool, in the order of shards and chunks.
        windows: of every file; none: payloads are still to be made, and go through ``footers`` too.
        footers: window that the footers pass through.
    """

    offsets: tuple[int, ...]
    windows: tuple[Window, ...]
    footers: Window

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool that it takes."""
        return self.footers[1]


def lay_out(plan: WriterPlan, shards: Iterable[Shard]) -> Images:
    """Find where every chunk is to be staged: under raw, where it will stand in its file."""
    offsets: list[int] = []
    if any(codec.name != spec.CODEC_RAW for codec in plan.header.codecs):
        position = 0
        for chunk in (c for shard in shards for c in chunks_of(shard, plan.header.chunk_elements)):
            offsets.append(position)
            position = align_payload(position + chunk.size_bytes, 0)
        position = _page_up(position)
        return Images(tuple(offsets), (), (position, position + ENCODED_SLOTS * SLOT_BYTES))
    windows: list[Window] = []
    start = position = rows_bytes = 0
    for shard in shards:
        more = _bytes_of(shard, chunk_count(shard, plan.header.chunk_elements))
        if not position or not plan.has_room(position + rows_bytes + sum(more)):
            windows += [(start, start + _page_up(position))] if position else []
            start, position, rows_bytes = start + _page_up(position), spec.DATA_HEADER_BYTES, 0
        rows_bytes += more[1]
        for chunk in chunks_of(shard, plan.header.chunk_elements):
            at = align_payload(position, chunk.size_bytes)
            offsets.append(start + at)
            position = at + chunk.size_bytes
    end = start + _page_up(position)
    return Images(tuple(offsets), (*windows, (start, end)), (end, end + SLOT_BYTES))


class DataFileWriter:
    """One rank's data files, one after the other. Use it in one thread.

    Attributes:
        writes: of all files, without fsync; durable when `finish` returns.
        sync_s: how long fsync took.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        plan: WriterPlan,
        images: Images | None = None,
    ) -> None:
        """Prepare; nothing is written yet.

        Args:
            images: where every chunk stands already, in the order in which they will come.
        """
        self._store, self._lease, self._plan = store, lease, plan
        self._images = images
        self._remaining_bytes = plan.payload_bytes
        self.next_number = plan.first_number
        self.writes, self.sync_s = Writes(), 0.0
        self.tables: list[Table] = []
        self._names: list[str] = []
        self._descriptor = -1  # of the file being written, between `begin` and `finish`
        self._stream: FileStream  # its bytes
        self._rows_bytes = 0

    def begin(self, shards: Sequence[Shard], ahead_bytes: int = 0) -> Sequence[Place] | None:
        """Start the rows of shards; goes on in a new file when this one would grow too large.

        Args:
            ahead_bytes: what has rows already, and is still to be added, has so many at most.

        Returns:
            their places; None: what is ahead has to be added before it is known whether they fit.
        """
        chunk_elements = self._plan.header.chunk_elements
        counts = [chunk_count(shard, chunk_elements) for shard in shards]
        more = [_bytes_of(*each) for each in zip(shards, counts, strict=True)]
        end = self._rows_bytes + sum(map(sum, more))
        if self._descriptor < 0:
            self._open_file()
        elif not self._plan.has_room(self._stream.position + ahead_bytes + end):
            if ahead_bytes:
                return None
            self._close_file()
            self._open_file()
        self._rows_bytes += sum(rows for _, rows in more)
        return [self._rows.add_shard(*each) for each in zip(shards, counts, strict=True)]

    def end(self, place: Place, digest: bytes) -> None:
        """Take the digest of a shard, all of whose chunks have been added."""
        self._rows.set_digest(place.shard, digest)

    def seed(self, row: int) -> int:
        """Return the checksum seed of a row's chunk."""
        plan = self._plan
        return chunk_seed(plan.header.save_id, plan.rank, self._rows.number, row)

    def add(self, segment: Segment, rows: Iterable[tuple[int, int, int, int, int]]) -> None:
        """Add what a segment holds, and close it when it has been written.

        Args:
            rows: (row, bytes of its payload, mode, offset in the segment, checksum).
        """
        stream, size = self._stream, segment.size_bytes
        if size < COPIED_BYTES:
            target = self._lease.pool.address(0) + self._claim(size, segment.raw_bytes)
            copy(target, segment.address, size)
            begin = stream.position
            stream.advance(size)
            segment.close()
        else:
            size = segment.fill_page()
            begin = stream.lend(segment.address, size, segment.close)
        self._remaining_bytes -= size
        for row, size, mode, at, payload_checksum in rows:
            self._rows.set_chunk(row, size, mode, begin + at if size else 0, payload_checksum)

    def reserve(self, row: int, size_bytes: int) -> tuple[int, int]:
        """Find room for the elements of a row, which are its payload, and zero the gap before it.

        Returns:
            (where in the pool they are to stand, checksum seed of the chunk).
        """
        return self._claim(size_bytes, size_bytes), self.seed(row)

    def append(self, row: int, size_bytes: int, payload_checksum: int) -> None:
        """Add the elements that now stand where `reserve` said."""
        at = self._stream.position
        self._rows.set_chunk(row, size_bytes, spec.MODE_RAW, at, payload_checksum)
        self._stream.advance(size_bytes)
        self._remaining_bytes -= size_bytes

    def finish(self) -> list[Table]:
        """Make everything durable; return the table of each file.

        Raises:
            StoreError: something could not be written.
            SyncError: fsync failed; `abandon` and write it all again under other numbers.
        """
        self._close_file()
        if self._names:
            self._sync(lambda: self._store.sync_made(self._names[0]))
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

    def _claim(self, size_bytes: int, raw_bytes: int) -> int:
        """Find room for bytes aligned as a payload of mode 0 that has ``raw_bytes``."""
        stream = self._stream
        at = align_payload(stream.position, raw_bytes)
        if not stream.fits(at, size_bytes):
            stream.turn()
            at = align_payload(stream.position, raw_bytes)
        return stream.room(at, size_bytes)

    def _open_file(self) -> None:
        name = data_file_name(self._plan.header.save_id, self._plan.rank, self.next_number)
        self._descriptor = self._store.create(name, direct=self._lease.queue.direct)
        self._names.append(name)
        self._rows = FileRows(self._plan.rank, self.next_number)
        self._rows_bytes = 0
        expected = min(self._remaining_bytes + FOOTER_ROOM_BYTES, self._plan.file_bytes)
        # Writes into allocated space do not wait for the file to grow, and a full disk says so
        # first; what is encoded may fit nevertheless.
        is_raw = all(codec.name == spec.CODEC_RAW for codec in self._plan.header.codecs)
        with contextlib.nullcontext() if is_raw else contextlib.suppress(NoSpaceError):
            self._store.vfs.allocate(self._descriptor, expected)
        where = f"{self._store.location}/{name}"
        window = (0, self._lease.pool.slots * self._lease.pool.slot_bytes)
        if self._images and self._images.windows:
            window = self._images.windows[self.next_number - self._plan.first_number]
        elif self._images:
            window = self._images.footers
        self._stream = FileStream(self._lease, self._descriptor, where, window, self.writes)
        self.next_number += 1
        save_id, rank = self._plan.header.save_id, self._plan.rank
        self._stream.put(encode_header(save_id, rank, self._rows.number))

    def _close_file(self) -> None:
        """Write the footer, wait for every write, cut the padding off, make the file durable."""
        stream = self._stream
        if self._images and self._images.windows:
            stream.move(self._images.footers)
        offset = align_payload(stream.position, 0)
        footer, checksum = encode_footer(self._rows.table(self._plan.header), offset)
        stream.finish(offset, footer)
        size = offset + len(footer)
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

    def _sync(self, call: Callable[[], None]) -> None:
        try:
            started = time.perf_counter()
            call()
            self.sync_s += time.perf_counter() - started
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


def _bytes_of(shard: Shard, chunks: int) -> tuple[int, int]:
    """Return the bytes a shard takes at most: payloads; in the footer, rows and tensor's name."""
    rows = chunks + 2 + len(shard.box.shape)
    rows_bytes = CHUNK_ROW_BYTES * rows + 4 * len(repr(shard.tensor.path)) + 256
    return chunks * spec.LARGE_ALIGN_BYTES + shard.size_bytes, rows_bytes


def _page_up(position: int) -> int:
    return -(-position // spec.LARGE_ALIGN_BYTES) * spec.LARGE_ALIGN_BYTES
