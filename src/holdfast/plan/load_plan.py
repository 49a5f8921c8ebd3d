"""Which bytes a load reads, in which order. Pure; knows no torch, opens no files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..boxes import I64, Boxes, reach_into, strides_of, unflatten
from ..format.manifest import Manifest
from ..format.spec import LARGE_ALIGN_BYTES
from ..layout import Box, Chunk, Extent, Path, Shard, elements_per_chunk

GAP_BYTES_MAX = 64 << 10  # read over a gap rather than seek: 64 KiB cost less than a request
GAP_SHARE_MAX = 64  # but of a run no more than one part in so many: 1.6 %
RUN_BYTES_MIN = 4 << 20  # a run grows past a large payload only up to here, so that reads overlap

Wanted = Mapping[Path, tuple[int, Sequence[Box]]]


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk to read: its row in the manifest, and who wants some of it.

    Attributes:
        targets: (path, which of the boxes wanted there).
    """

    row: int
    chunk: Chunk
    targets: tuple[tuple[Path, int], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive 4 KiB-aligned bytes of one file: whole chunks and the gaps before them."""

    extent: Extent
    chunks: tuple[ChunkRead, ...]


def plan_load(manifest: Manifest, wanted: Wanted, run_bytes_max: int) -> tuple[Run, ...]:
    """Plan to read what is wanted: every chunk needed, once, in file order.

    Args:
        wanted: for each target, the index of its tensor and the boxes of it that are wanted.
        run_bytes_max: longest run (a pool slot).

    Returns:
        Runs ordered by file and offset; no chunk is in two.
    """
    return coalesce(manifest, find_chunks(manifest, wanted), run_bytes_max)


def find_chunks(manifest: Manifest, wanted: Wanted) -> tuple[ChunkRead, ...]:
    """Intersect what is wanted with what is stored: every chunk needed, once, in file order."""
    boxes = [(index, box) for index, boxes in wanted.values() for box in boxes]
    places = [(path, n) for path, (_, boxes) in wanted.items() for n in range(len(boxes))]
    targets, rows = _rows_within(manifest, boxes)
    starts = manifest.chunk_start[rows]
    files = manifest.file_first_chunk.searchsorted(rows, "right") - 1
    order = np.lexsort((targets, starts, files))
    chunks: list[ChunkRead] = []
    shards = (manifest.shard_first_row.searchsorted(rows, "right") - 1)[order].tolist()
    known: dict[int, Shard] = {}
    for row, index, target in zip(
        rows[order].tolist(), shards, targets[order].tolist(), strict=True
    ):
        if chunks and chunks[-1].row == row:
            read = chunks[-1]
            chunks[-1] = ChunkRead(row, read.chunk, (*read.targets, places[target]))
            continue
        shard = known.get(index) or known.setdefault(index, manifest.shard(index))
        step = elements_per_chunk(shard.tensor.dtype, manifest.table.header.chunk_elements)
        first = (row - int(manifest.shard_first_row[index])) * step
        chunk = Chunk(shard, first, min(step, shard.box.elements - first))
        chunks.append(ChunkRead(row, chunk, (places[target],)))
    return tuple(chunks)


def _rows_within(manifest: Manifest, wanted: Sequence[tuple[int, Box]]) -> tuple[I64, I64]:
    """Find the chunks that hold elements of what is wanted.

    Args:
        wanted: (index of the tensor, box of it).

    Returns:
        (number of what is wanted, row of the chunk) of every pair.
    """
    header = manifest.table.header
    boxes = [box for _, box in wanted]
    tensor = np.array([index for index, _ in wanted], np.int64)
    ndim = np.array([len(box.shape) for box in boxes], np.int64)
    flat = np.array([n for box in boxes for n in (*box.offset, *box.shape)], np.int64)
    parts = unflatten(flat, np.cumsum(2 * ndim) - 2 * ndim, ndim)
    # Every shard of a wanted tensor beside the box that is wanted of it.
    first, end = manifest.tensor_first[tensor], manifest.tensor_first[tensor + 1]
    target, number = _spread(first, end)
    shard = manifest.tensor_order[number]
    held, part = manifest.boxes(shard, parts.shape.shape[1]), parts[target]
    low = np.maximum(held.offset, part.offset)
    high = np.minimum(held.offset + held.shape, part.offset + part.shape)
    common = np.asarray((high > low).all(axis=1))
    target, shard, held = target[common], shard[common], held[common]
    inside = Boxes(low[common] - held.offset, high[common] - low[common])
    # Chunks from the one with the first common element to the one with the last.
    dtypes = [tensor.dtype for tensor in header.tensors]
    lengths = np.array([elements_per_chunk(d, header.chunk_elements) for d in dtypes], np.int64)
    step = lengths[manifest.table.shard_tensor[shard]]
    strides = strides_of(held.shape)
    begin = (inside.offset * strides).sum(axis=1)
    last = ((inside.offset + inside.shape - 1) * strides).sum(axis=1)
    pair, chunk = _spread(begin // step, last // step + 1)
    whole = np.asarray((inside.shape == held.shape).all(axis=1))
    start = chunk * step[pair]
    stop = np.minimum(start + step[pair], held.elements[pair])
    kept = whole[pair]
    some = np.flatnonzero(~kept)
    kept[some] = reach_into(inside[pair[some]], held.shape[pair[some]], start[some], stop[some])
    return target[pair[kept]], (manifest.shard_first_row[shard[pair]] + chunk)[kept]


def _spread(first: I64, end: I64) -> tuple[I64, I64]:
    """Write ranges out: (which range, number in it) of every number of every range."""
    counts = end - first
    which = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return which, np.arange(len(which)) - before[which] + first[which]


def coalesce(
    manifest: Manifest, chunks: Sequence[ChunkRead], run_bytes_max: int
) -> tuple[Run, ...]:
    """Join neighbours, given in file order, into runs of at most ``run_bytes_max``."""
    file_of = manifest.file_first_chunk.searchsorted([c.row for c in chunks], "right") - 1
    files = dict(zip((c.row for c in chunks), file_of.tolist(), strict=True))
    runs: list[Run] = []
    group: list[ChunkRead] = []
    file = start = end = 0
    for read in chunks:
        first = int(manifest.chunk_gap_start[read.row]) // LARGE_ALIGN_BYTES * LARGE_ALIGN_BYTES
        last = int(manifest.chunk_start[read.row] + manifest.chunk_bytes[read.row])
        last = -(-last // LARGE_ALIGN_BYTES) * LARGE_ALIGN_BYTES
        gap_bytes_max = min(GAP_BYTES_MAX, (end - start) // GAP_SHARE_MAX)
        near = group and files[read.row] == file and first - end <= gap_bytes_max
        if near and end - start < RUN_BYTES_MIN and last - start <= run_bytes_max:
            group.append(read)
            end = last
            continue
        if group:
            runs.append(Run(Extent(file, start, end - start), tuple(group)))
        group, file, start, end = [read], files[read.row], first, last
    if group:
        runs.append(Run(Extent(file, start, end - start), tuple(group)))
    return tuple(runs)
