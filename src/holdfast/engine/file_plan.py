"""Where chunks stand in data files, and in the pool before. Pure columns: no tensors, no files.

Payloads that are the elements themselves have their places before one of them is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .._core import place_chunks
from ..boxes import U64
from ..format import spec
from ..format.header import Header
from ..options import SLOT_BYTES
from ..plan.shard_table import ChunkColumns, ShardTable

Window = tuple[int, int]  # bytes [start, end) of the pool, whole pages

ENCODED_SLOTS = 2  # of the window that small segments pass through
FOOTER_ROOM_BYTES = 64 << 10  # allocated beside the payloads; a longer footer extends the file
CHUNK_ROW_BYTES = 16
TENSOR_ROW_BYTES = 256  # of a footer's header, besides the path


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
class RawFile:
    """One data file.

    Attributes:
        shards, chunks: which of all it holds.
        end: of its payloads.
    """

    shards: slice
    chunks: slice
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
    chunks = shards.chunks(plan.header.chunk_elements)
    row_bytes = footer_bytes(shards, chunks)
    offsets = np.empty(len(chunks.sizes), np.uint64)
    turns = np.empty(len(chunks.sizes), np.uint8)
    files = np.empty(len(shards), np.uint32)
    ends = place_chunks(
        chunks.sizes,
        chunks.counts,
        row_bytes.astype(np.uint64),
        spec.DATA_HEADER_BYTES,
        plan.file_bytes,
        FOOTER_ROOM_BYTES,
        window_bytes,
        offsets,
        turns,
        files,
    )
    first = np.searchsorted(files, np.arange(len(ends) + 1))
    first_chunk = chunks.first[first].tolist()
    bounds = first.tolist()
    made = tuple(
        [
            RawFile(slice(bounds[n], bounds[n + 1]), slice(first_chunk[n], first_chunk[n + 1]), end)
            for n, end in enumerate(ends)
        ]
    )
    return RawLayout(chunks, offsets, turns, made)


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Data files as they will be, each in one piece of the pool, for chunks staged in advance.

    Attributes:
        chunks: all of them.
        offsets: of every chunk in the pool.
        windows: of every file; none: payloads are still to be made, and go through ``footers`` too.
        footers: window that the footers pass through.
    """

    chunks: ChunkColumns
    offsets: U64
    windows: tuple[Window, ...]
    footers: Window

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool that it takes."""
        return self.footers[1]


def lay_out(plan: WriterPlan, shards: ShardTable) -> Images:
    """Find where every chunk is to be staged: under raw, where it will stand in its file."""
    chunks = shards.chunks(plan.header.chunk_elements)
    if any(codec.name != spec.CODEC_RAW for codec in plan.header.codecs):
        align = np.uint64(spec.SMALL_ALIGN_BYTES)
        room = -(-chunks.sizes.astype(np.int64) // spec.SMALL_ALIGN_BYTES).astype(np.uint64) * align
        offsets = np.cumsum(room) - room
        end = page_up(int(room.sum()))
        return Images(chunks, offsets, (), (end, end + ENCODED_SLOTS * SLOT_BYTES))
    layout = lay_out_raw(plan, shards, 0)
    offsets, windows, start = layout.offsets.copy(), list[Window](), 0
    for file in layout.files:
        offsets[file.chunks] += np.uint64(start)
        windows.append((start, start + page_up(file.end)))
        start = windows[-1][1]
    return Images(chunks, offsets, tuple(windows), (start, start + SLOT_BYTES))


def page_up(position: int) -> int:
    """Return the first page that begins at or after a position."""
    return -(-position // spec.LARGE_ALIGN_BYTES) * spec.LARGE_ALIGN_BYTES
