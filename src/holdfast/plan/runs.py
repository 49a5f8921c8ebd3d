"""Chunks that are read → runs of bytes to read at once. Pure; knows no torch, opens no files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..format.manifest import Manifest
from ..format.references import NONE
from ..format.spec import LARGE_ALIGN_BYTES
from ..layout import Chunk, Extent, Path, Shard, elements_per_chunk

GAP_BYTES_MAX = 64 << 10  # read over a gap rather than seek: 64 KiB cost less than a request
GAP_SHARE_MAX = 64  # but of a run no more than one part in so many: 1.6 %
RUN_BYTES_MIN = 4 << 20  # a run grows past a large payload only up to here, so that reads overlap


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk to read: its row in the manifest, and who wants some of it.

    Attributes:
        targets: (path, which of the boxes wanted there); none: another chunk refers to it.
    """

    row: int
    chunk: Chunk
    targets: tuple[tuple[Path, int], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive 4 KiB-aligned bytes of one file: whole chunks and the gaps before them.

    What a chunk refers to stands before it.
    """

    extent: Extent
    chunks: tuple[ChunkRead, ...]


def coalesce(
    manifest: Manifest, chunks: Sequence[ChunkRead], run_bytes_max: int
) -> tuple[Run, ...]:
    """Join neighbours, given in file order, into runs of at most ``run_bytes_max``.

    What a chunk refers to is in its run, added where it is not wanted for itself.
    """
    runs: list[Run] = []
    group: list[ChunkRead] = []
    file = start = end = 0
    for its_file, unit in _units(manifest, chunks):
        first = min(int(manifest.chunk_gap_start[read.row]) for read in unit)
        last = max(int(manifest.chunk_start[r.row] + manifest.chunk_bytes[r.row]) for r in unit)
        first = first // LARGE_ALIGN_BYTES * LARGE_ALIGN_BYTES
        last = -(-last // LARGE_ALIGN_BYTES) * LARGE_ALIGN_BYTES
        gap_bytes_max = min(GAP_BYTES_MAX, (end - start) // GAP_SHARE_MAX)
        near = group and its_file == file and first - end <= gap_bytes_max
        if near and end - start < RUN_BYTES_MIN and last - start <= run_bytes_max:
            group += unit
            end = last
            continue
        if group:
            runs.append(Run(Extent(file, start, end - start), tuple(group)))
        group, file, start, end = [*unit], its_file, first, last
    if group:
        runs.append(Run(Extent(file, start, end - start), tuple(group)))
    return tuple(runs)


def chunk_at(manifest: Manifest, row: int, index: int, shard: Shard) -> Chunk:
    """Return the chunk of a row, which is of shard ``index``."""
    step = elements_per_chunk(shard.tensor.dtype, manifest.table.header.chunk_elements)
    first = (row - int(manifest.shard_first_row[index])) * step
    return Chunk(shard, first, min(step, shard.box.elements - first))


def _units(
    manifest: Manifest, chunks: Sequence[ChunkRead]
) -> Iterator[tuple[int, tuple[ChunkRead, ...]]]:
    """Yield (file, chunks that are decoded together), in file order."""
    chunks = _with_references(manifest, chunks)
    rows = np.array([read.row for read in chunks], np.int64)
    files = (manifest.file_first_chunk.searchsorted(rows, "right") - 1).tolist()
    if not chunks or not len(manifest.references):
        yield from zip(files, ((read,) for read in chunks), strict=True)
        return
    place = {read.row: number for number, read in enumerate(chunks)}
    begins = [True] * len(chunks)
    for number, row in enumerate(rows.tolist()):
        other = place.get(int(manifest.references[row]), number)
        low, high = sorted((number, other))
        begins[low + 1 : high + 1] = [False] * (high - low)
    starts = [number for number, begin in enumerate(begins) if begin]
    for start, end in zip(starts, [*starts[1:], len(chunks)], strict=True):
        unit = chunks[start:end]
        yield files[start], tuple(sorted(unit, key=lambda read: _depth(manifest, read.row)))


def _depth(manifest: Manifest, row: int) -> int:
    """Count the chunks that have to be decoded before one, each because of the one after it."""
    depth, row = 0, int(manifest.references[row])
    while row != NONE:
        depth, row = depth + 1, int(manifest.references[row])
    return depth


def _with_references(manifest: Manifest, chunks: Sequence[ChunkRead]) -> Sequence[ChunkRead]:
    """Add, in file order, the chunks that decoding these takes and that are not among them."""
    if not len(manifest.references):
        return chunks
    wanted = {read.row: read for read in chunks}
    for start in list(wanted):
        row = int(manifest.references[start])
        while row != NONE:
            if row not in wanted:
                index = int(manifest.shard_first_row.searchsorted(row, "right")) - 1
                chunk = chunk_at(manifest, row, index, manifest.shard(index))
                wanted[row] = ChunkRead(row, chunk, ())
            row = int(manifest.references[row])
    rows = np.array(list(wanted), np.int64)
    files = manifest.file_first_chunk.searchsorted(rows, "right") - 1
    order = np.lexsort((manifest.chunk_start[rows], files))
    return [wanted[row] for row in rows[order].tolist()]
