"""Which bytes a load reads, in which order. Pure; knows no torch, opens no files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..format.manifest import Manifest
from ..format.spec import LARGE_ALIGN_BYTES
from ..layout import Box, Chunk, Extent, Path, boxes_of_range, elements_per_chunk

GAP_BYTES_MAX = 64 << 10  # read over a gap rather than seek: 64 KiB cost less than a request
RUN_BYTES_MIN = 4 << 20  # a run grows past a large payload only up to here, so that reads overlap


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk to read: its row in the manifest, and the targets (paths) that want some of it."""

    row: int
    chunk: Chunk
    targets: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive 4 KiB-aligned bytes of one file: whole chunks and the gaps before them."""

    extent: Extent
    chunks: tuple[ChunkRead, ...]


def plan_load(
    manifest: Manifest, wanted: Mapping[Path, tuple[int, Box]], run_bytes_max: int
) -> tuple[Run, ...]:
    """Intersect what is wanted with what is stored: every chunk needed, once, in file order.

    Args:
        wanted: for each target, the index of its tensor and the box of it that is wanted.
        run_bytes_max: longest run (a pool slot).

    Returns:
        Runs ordered by file and offset; no chunk is in two.
    """
    reads: dict[int, tuple[Chunk, list[Path]]] = {}
    for path, (tensor, box) in wanted.items():
        for index in manifest.tensor_shards[tensor]:
            for row, chunk in _chunks_within(manifest, index, box):
                reads.setdefault(row, (chunk, []))[1].append(path)
    chunks = [ChunkRead(row, chunk, tuple(paths)) for row, (chunk, paths) in reads.items()]
    return _coalesce(manifest, chunks, run_bytes_max)


def _chunks_within(manifest: Manifest, index: int, box: Box) -> Iterable[tuple[int, Chunk]]:
    """Find the chunks of a shard that hold elements of a box (in global coordinates)."""
    shard = manifest.shard(index)
    common = shard.box.intersect(box) if box.elements else None
    if common is None:
        return
    inside = common.relative_to(shard.box.offset)
    step = elements_per_chunk(shard.tensor.dtype, manifest.table.header.chunk_elements)
    corner = tuple(a + n - 1 for a, n in zip(inside.offset, inside.shape, strict=True))
    numbers = range(
        _linear(inside.offset, shard.box.shape) // step,
        _linear(corner, shard.box.shape) // step + 1,
    )
    for number in numbers:
        first = number * step
        chunk = Chunk(shard, first, min(step, shard.box.elements - first))
        parts = boxes_of_range(shard.box.shape, first, chunk.elements)
        if common == shard.box or any(part.intersect(inside) for _, part in parts):
            yield int(manifest.shard_first_row[index]) + number, chunk


def _linear(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    position = 0
    for i, n in zip(index, shape, strict=True):
        position = position * n + i
    return position


def _coalesce(manifest: Manifest, chunks: list[ChunkRead], run_bytes_max: int) -> tuple[Run, ...]:
    """Join neighbours into runs of at most ``run_bytes_max``."""
    file_of = manifest.file_first_chunk.searchsorted([c.row for c in chunks], "right") - 1
    files = dict(zip((c.row for c in chunks), file_of.tolist(), strict=True))
    chunks.sort(key=lambda c: (files[c.row], int(manifest.chunk_start[c.row])))
    runs: list[Run] = []
    group: list[ChunkRead] = []
    file = start = end = 0
    for read in chunks:
        first = int(manifest.chunk_gap_start[read.row]) // LARGE_ALIGN_BYTES * LARGE_ALIGN_BYTES
        last = int(manifest.chunk_start[read.row] + manifest.chunk_bytes[read.row])
        last = -(-last // LARGE_ALIGN_BYTES) * LARGE_ALIGN_BYTES
        near = group and files[read.row] == file and first - end <= GAP_BYTES_MAX
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
