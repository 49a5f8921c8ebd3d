"""Encoded payloads, made some ahead in threads: segment by segment into data files.

How long a payload is, and with it which file it goes into, is known when it has been made. Knows
columns and segments; no tensors.
"""

from collections.abc import Iterator
from contextlib import closing

import numpy as np

from .._core import copy, digest_shards
from ..boxes import I64, U64
from ..codecs.base import Codec
from ..format import spec
from ..format.data_file import align_payload, seed_head
from ..format.rows import file_table
from ..format.table import U32
from ..plan.shard_table import ShardTable
from .ahead import SEGMENT_BYTES, Tasks
from .basis import Basis
from .columns import ByColumns
from .file_plan import FOOTER_ROOM_BYTES, Pieces, footer_bytes, pieces_of
from .ledger import Ledger
from .origin import Origin
from .registry import LOSSLESS
from .stream import FileStream
from .task import ByPiece, EncodedSegment, Route, Task
from .write import DataFileWriter

COPIED_BYTES = 1 << 20  # below, a segment is copied: pages of its own would be too much of it
TASK_BYTES = 8 << 20  # pieces make a task together up to so many: threads are not woken for less


def write_encoded(
    writer: DataFileWriter,
    shards: ShardTable,
    origin: Origin,
    codec: Codec,
    basis: Basis | None,
    ledger: Ledger,
    *,
    is_staged: bool,
) -> None:
    """Append, in order, what is staged and encoded in threads.

    Args:
        basis: what is known of the base; it becomes what is known of these.
        is_staged: the elements have been counted as staged already.
    """
    header = writer.plan.header
    groups = [group for coding in header.codecs for group in coding.groups]
    pieces = pieces_of(shards, groups, header.chunk_elements)
    files = _Files(writer, shards, pieces)
    is_link = basis is not None and basis.is_base
    if codec.is_lossy and not is_link:
        codec = LOSSLESS  # what stands by itself
    with closing(Tasks()) as tasks:
        route: Route
        if codec.by_segment:
            route = ByColumns(shards, pieces, origin, basis)
        else:
            threads, chunk = tasks.threads, header.chunk_elements
            route = ByPiece(shards, pieces, origin, chunk, codec, basis, threads.submit)
        for made in _made(files, pieces, route, tasks):
            files.add(made)
            for path, loss in made.losses:
                assert basis is not None  # a link has one
                basis.lose(path, loss)
            ledger.seconds["stage"] += made.stage_s
            ledger.seconds["encode"] += made.encode_s
            if not is_staged:
                ledger.staged_bytes += int(pieces.chunks.sizes[made.rows].sum())
            ledger.note_writes(writer.writes)
            ledger.check()
    files.close()


def _made(files: "_Files", pieces: Pieces, route: Route, tasks: Tasks) -> Iterator[EncodedSegment]:
    """Yield what comes of all pieces, in order; each is added before the next is asked for."""
    room = files.room
    unit, last = 0, len(pieces.unit) - 1
    while unit < last:
        end = files.fitting(unit, tasks.pending_bytes)
        if end == unit and tasks.pending_bytes:
            yield from tasks.take(all_of_them=True)
            continue
        if end == unit:
            end = files.begin(unit)
        first, stop = pieces.unit_first[[unit, end]].tolist()
        while first < stop:
            most = int(np.searchsorted(room, room[first] + TASK_BYTES, "right")) - 1
            task_end = min(stop, max(first + 1, most))
            task = Task(first, task_end, files.head, files.chunk, route.prepare(first, task_end))
            tasks.submit(route, task, int(room[task_end] - room[first]))
            first = task_end
            if len(tasks.made) > tasks.most:
                yield from tasks.take()
        unit = end
    yield from tasks.take(all_of_them=True)


class _Files:
    """The data files, one after the other, and the rows of all their chunks.

    Attributes:
        head: what the seeds of the file that is written begin with.
        chunk: its first, among all.
        room: bytes of all pieces before each at most, and of all.
    """

    def __init__(self, writer: DataFileWriter, shards: ShardTable, pieces: Pieces) -> None:
        self._writer, self._shards, self._pieces = writer, shards, pieces
        self._remaining_bytes = writer.plan.payload_bytes
        self.head, self.chunk = b"", 0
        self._unit = self._end = 0  # the first of the file, and the end of the last
        self._stream: FileStream | None = None  # of the file that is written
        count = len(pieces.rows)
        self._size_modes: U32 = np.zeros(count, np.uint32)
        self._offsets, self._checksums = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        self._digests: U64 = np.zeros((count, 2), np.uint64)
        self.room = _ends(pieces.room_bytes, slice(None))
        self._payload_ends = self.room[pieces.unit_first]
        self._footer_ends = _ends(footer_bytes(shards, pieces.chunks), pieces.unit)

    def fitting(self, unit: int, ahead_bytes: int) -> int:
        """Return the end of the units from this one on that certainly go into the file.

        Args:
            ahead_bytes: what is still to be added has so many at most.
        """
        if self._stream is None:
            return unit
        footer = self._footer_ends[unit + 1 :] - self._footer_ends[self._unit]
        payload = self._payload_ends[unit + 1 :] - self._payload_ends[unit]
        before = self._pieces.unit_first[unit:-1] - self._pieces.unit_first[unit]
        needed = footer + payload + before * SEGMENT_BYTES + self._stream.position + ahead_bytes
        limit = self._writer.plan.file_bytes - FOOTER_ROOM_BYTES
        self._end = unit + int(np.searchsorted(needed, limit, "right"))
        return self._end

    def begin(self, unit: int) -> int:
        """Go on in a new file; return the end of the units that certainly go into it, one more."""
        self.close()
        writer = self._writer
        self._stream = writer.open(self._remaining_bytes, is_exact=False)
        self.head = seed_head(writer.plan.header.save_id, writer.plan.rank, writer.number)
        self._unit = unit
        self.chunk = int(self._pieces.chunks.first[self._pieces.unit[unit]])
        self._end = max(unit + 1, self.fitting(unit, 0))
        return self._end

    def add(self, made: EncodedSegment) -> None:
        """Add what a segment holds, and close it when it has been written."""
        segment, stream = made.segment, self._stream
        assert stream is not None  # `begin` has made it
        size = segment.size_bytes
        if size < COPIED_BYTES:
            target = self._writer.base + _claim(stream, size, segment.raw_bytes)
            copy(target, segment.address, size)
            begin = stream.position
            stream.advance(size)
            segment.close()
        else:
            size = segment.fill_page()
            begin = stream.lend(segment.address, size, segment.close)
        self._remaining_bytes -= size
        rows, is_somewhere = made.rows, made.size_modes & spec.PAYLOAD_BYTES_MAX > 0
        self._size_modes[rows], self._checksums[rows] = made.size_modes, made.checksums
        self._offsets[rows] = np.where(is_somewhere, made.offsets + np.uint64(begin), 0)
        self._digests[rows] = made.digests

    def close(self) -> None:
        """Write what the footer says, if a file is being written."""
        writer, chunks = self._writer, self._pieces.chunks
        if self._stream is None:
            return
        self._stream = None
        first, end = self._pieces.unit[[self._unit, self._end]].tolist()
        rows, shards = slice(*chunks.first[[first, end]].tolist()), self._shards
        numbers = slice(*shards.first_number[[first, end]].tolist())
        digests = np.empty((end - first, 2), np.uint64)
        digest_shards(self._digests[rows], chunks.counts[first:end], digests)
        writer.close(
            file_table(
                writer.plan.header,
                writer.plan.rank,
                writer.number,
                tensor=shards.tensor[first:end],
                numbers=shards.numbers[numbers],
                digests=digests,
                counts=chunks.counts[first:end],
                checksums=self._checksums[rows],
                size_modes=self._size_modes[rows],
                offsets=self._offsets[rows],
            )
        )


def _claim(stream: FileStream, size_bytes: int, raw_bytes: int) -> int:
    """Find room for bytes aligned as a payload of mode 0 that has ``raw_bytes``."""
    at = align_payload(stream.position, raw_bytes)
    if not stream.fits(at, size_bytes):
        stream.turn()
        at = align_payload(stream.position, raw_bytes)
    return stream.room(at, size_bytes)


def _ends(sizes: I64, first: I64 | slice) -> I64:
    """Return what is taken up to the beginning of each group of sizes, and the end of the last."""
    return np.concatenate([[0], np.cumsum(sizes)])[first]
