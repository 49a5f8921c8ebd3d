"""Where chunks stand in data files, and in the pool before. Pure columns: no tensors, no files.

Payloads that are the elements themselves have their places before one of them is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, starmap

import numpy as np
import numpy.typing as npt

from .._core import place_chunks
from ..boxes import I64, U64
from ..format import spec
from ..format.header import Header
from ..layout import ROLES, Group
from ..options import SLOT_BYTES
from ..plan.shard_table import ChunkColumns, ShardTable, cut

Window = tuple[int, int]  # bytes [start, end) of the pool, whole pages

ENCODED_SLOTS = 2  # of the window that small segments pass through
FOOTER_ROOM_BYTES = 64 << 10  # allocated beside the payloads; a longer footer extends the file
CHUNK_ROW_BYTES = 16
TENSOR_ROW_BYTES = 256  # of a footer's header, besides the path
LAYOUTS_MAX = 8  # as many as plans are kept, whose shards they are of


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


@dataclass(frozen=True, slots=True)
class RawFile:
    """One data file.

    Attributes:
        shards, chunks: which of all it holds.
        numbers: which of those of the shards.
        end: of its payloads.
    """

    shards: slice
    chunks: slice
    numbers: slice
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class RawLayout:
    """Where every chunk stands.

    Attributes:
        offsets: of each in its file.
        turns: whether each is the first behind a turn to the beginning of the window.
    """

    chunks: ChunkColumns
    offsets: U64
    turns: npt.NDArray[np.uint8]
    files: tuple[RawFile, ...]

    def batches(self, file: RawFile, bytes_max: int) -> Iterator[tuple[int, int]]:
        """Cut a file's chunks into ranges that stand in one piece of memory, small ones joined."""
        first, last = file.chunks.start, file.chunks.stop
        ends = self.offsets[file.chunks] + self.chunks.sizes[file.chunks]
        turns = [*(np.flatnonzero(self.turns[first + 1 : last]) + first + 1).tolist(), last]
        for turn in turns:
            while first < turn:
                limit = int(self.offsets[first]) + bytes_max
                end = file.chunks.start + int(np.searchsorted(ends, limit, "right"))
                end = min(max(end, first + 1), turn)
                yield first, end
                first = end


def footer_bytes(shards: ShardTable, chunks: ChunkColumns) -> npt.NDArray[np.int64]:
    """Return what each shard takes of a footer at most: its rows, and its tensor's name."""
    rows = chunks.counts.astype(np.int64) + 2 + shards.ndim
    return CHUNK_ROW_BYTES * rows + 4 * shards.name_bytes + TENSOR_ROW_BYTES


def lay_out_raw(plan: WriterPlan, shards: ShardTable, window_bytes: int) -> RawLayout:
    """Find where every chunk will stand.

    Args:
        window_bytes: of the memory that a file passes through; 0: it stands there in one piece.
    """
    return _lay_out_raw(shards, plan.header.chunk_elements, plan.file_bytes, window_bytes)


@lru_cache(maxsize=LAYOUTS_MAX)  # the same shards are saved again and again
def _lay_out_raw(
    shards: ShardTable, chunk_elements: int, file_bytes: int, window_bytes: int
) -> RawLayout:
    chunks = cut(shards, chunk_elements)
    row_bytes = footer_bytes(shards, chunks)
    offsets = np.empty(len(chunks.sizes), np.uint64)
    turns = np.empty(len(chunks.sizes), np.uint8)
    files = np.empty(len(shards), np.uint32)
    ends = place_chunks(
        chunks.sizes,
        chunks.counts,
        row_bytes.astype(np.uint64),
        spec.DATA_HEADER_BYTES,
        file_bytes,
        FOOTER_ROOM_BYTES,
        window_bytes,
        offsets,
        turns,
        files,
    )
    first = np.searchsorted(files, np.arange(len(ends) + 1))
    bounds = (first, chunks.first[first], shards.first_number[first])
    cuts = ([*starmap(slice, pairwise(bound.tolist()))] for bound in bounds)
    made = tuple(starmap(RawFile, zip(*cuts, ends, strict=True)))
    return RawLayout(chunks, offsets, turns, made)


@dataclass(frozen=True, slots=True, eq=False)
class Hashes:
    """Hashes of chunks in the pool, taken when they were copied there.

    Attributes:
        rows: which chunks were copied, in order.
        checksums: of these, seeded with the place of the chunk in its file.
        digests: of two words each.
        known: whether each was hashed.
    """

    rows: I64
    checksums: U64
    digests: U64
    known: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Data files as they will be, each in one piece of the pool, for chunks staged in advance.

    Attributes:
        chunks: all of them.
        offsets: of every chunk in the pool.
        windows: of every file; none: payloads are still to be made, and go through ``footers`` too.
        footers: window that the footers pass through.
        files: which chunks each file holds; none: as for ``windows``.
        hashes: of chunks, where some are known already.
    """

    chunks: ChunkColumns
    offsets: U64
    windows: tuple[Window, ...]
    footers: Window
    files: tuple[slice, ...] = ()
    hashes: Hashes | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool that it takes."""
        return self.footers[1]


def lay_out(plan: WriterPlan, shards: ShardTable) -> Images:
    """Find where every chunk is to be staged: under raw, where it will stand in its file."""
    if plan.header.is_raw:
        return _raw_images(shards, plan.header.chunk_elements, plan.file_bytes)
    chunks = cut(shards, plan.header.chunk_elements)
    align = np.uint64(spec.SMALL_ALIGN_BYTES)
    room = -(-chunks.sizes.astype(np.int64) // spec.SMALL_ALIGN_BYTES).astype(np.uint64) * align
    offsets = np.cumsum(room) - room
    end = page_up(int(room.sum()))
    return Images(chunks, offsets, (), (end, end + ENCODED_SLOTS * SLOT_BYTES))


@lru_cache(maxsize=LAYOUTS_MAX)
def _raw_images(shards: ShardTable, chunk_elements: int, file_bytes: int) -> Images:
    layout = _lay_out_raw(shards, chunk_elements, file_bytes, 0)
    offsets, windows, start = layout.offsets.copy(), list[Window](), 0
    for file in layout.files:
        offsets[file.chunks] += np.uint64(start)
        windows.append((start, start + page_up(file.end)))
        start = windows[-1][1]
    files = tuple(file.chunks for file in layout.files)
    return Images(layout.chunks, offsets, tuple(windows), (start, start + SLOT_BYTES), files)


def page_up(position: int) -> int:
    """Return the first page that begins at or after a position."""
    return -(-position // spec.LARGE_ALIGN_BYTES) * spec.LARGE_ALIGN_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Chunks in the order of coding: those of the same elements of a parameter's tensors together.

    A unit is the same box of a parameter's tensors, a piece is its chunks of one number. Units
    follow each other as their shards do, of which those of a unit are in the order of `ROLES`.

    Attributes:
        chunks: in the order of shards.
        role: of each shard, its place in `ROLES`; that of a weight where it has no parameter.
        unit: the first shard of each unit, and the end of the last.
        rows: the chunks, in the order of coding.
        first: where each piece begins in ``rows``, and the end of the last.
        unit_first: the first piece of each unit, and the end of the last.
        room_bytes: that each piece takes of a data file at most.
    """

    chunks: ChunkColumns
    role: I64
    unit: I64
    rows: I64
    first: I64
    unit_first: I64
    room_bytes: I64


def pieces_of(shards: ShardTable, groups: Sequence[Group], chunk_elements: int) -> Pieces:
    """Join the shards that are the same box of a group's tensors, which follow each other."""
    chunks = cut(shards, chunk_elements)
    group = np.full(len(shards.tensors), -1, np.int64)
    role = np.full(len(shards.tensors), ROLES.index("weight"), np.int64)
    for number, members in enumerate(groups):
        for name, index in members.items():
            group[index], role[index] = number, ROLES.index(name)
    of, box = group[shards.tensor], np.hstack([shards.boxes.offset, shards.boxes.shape])
    begins = np.ones(len(shards.tensor), np.bool_)
    begins[1:] = (of[1:] != of[:-1]) | (of[1:] < 0) | (box[1:] != box[:-1]).any(axis=1)
    unit = np.cumsum(begins) - 1
    shard, first = chunks.shard, chunks.first
    place = np.arange(len(shard)) - first[shard]
    rows = np.lexsort((shard, place, unit[shard]))
    starts = np.flatnonzero(begins)
    is_first = begins[shard[rows]]  # of each piece the chunk of the unit's first shard
    counts = chunks.counts[starts].astype(np.int64)
    begin = np.append(np.flatnonzero(is_first), len(rows))
    room_bytes = chunks.sizes.astype(np.int64)[rows] + spec.LARGE_ALIGN_BYTES
    return Pieces(
        chunks,
        role[shards.tensor],
        np.append(starts, len(shards.tensor)),
        rows,
        begin,
        np.concatenate([[0], np.cumsum(counts)]),
        np.diff(np.concatenate([[0], np.cumsum(room_bytes)])[begin]),
    )
