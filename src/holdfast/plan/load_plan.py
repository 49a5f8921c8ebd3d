"""Which bytes a load reads, in which order. Pure; knows no torch, opens no files."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..boxes import I64, Boxes, reach_into, strides_of, unflatten
from ..format.manifest import Manifest
from ..layout import Box, Path, Shard, elements_per_chunk
from .runs import ChunkRead, Run, chunk_at, coalesce

Wanted = Mapping[Path, tuple[int, Sequence[Box]]]


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
        chunks.append(ChunkRead(row, chunk_at(manifest, row, index, shard), (places[target],)))
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
