"""Chunks that are read → runs of bytes to read at once. Pure; knows no torch, opens no files.

Chunks are rows of columns: what is done for each of them is done for all at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._core import join_runs
from ..boxes import I64, Bools
from ..format.manifest import CHUNKS, Manifest
from ..format.references import NONE
from ..layout import Chunk, Extent, Shard, elements_per_chunk

RUN_BYTES_MIN = 4 << 20  # a run grows past a large payload only up to here, so that reads overlap


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk to read: its row in the manifest, and who wants some of it.

    Attributes:
        wants: numbers of what is wanted; none: another chunk refers to it.
    """

    row: int
    chunk: Chunk
    wants: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Chunks to read, as columns.

    Attributes:
        rows: in the manifest.
        first, count: which of ``wants`` are those of each chunk.
        wants: numbers of what is wanted.
        exact: whether each of these is the very box that its chunk is a part of.
    """

    manifest: Manifest
    rows: I64
    first: I64
    count: I64
    wants: I64
    exact: Bools

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: "I64 | Bools | slice") -> "Reads":
        rows, first, count = self.rows[which], self.first[which], self.count[which]
        return Reads(self.manifest, rows, first, count, self.wants, self.exact)

    def chunks(self) -> list[ChunkRead]:
        """Return the chunks one by one."""
        manifest, known, found = self.manifest, dict[int, Shard](), []
        shards = manifest.shard_first_row.searchsorted(self.rows, "right") - 1
        columns = (self.rows, shards, self.first, self.first + self.count)
        for row, index, first, end in zip(*(c.tolist() for c in columns), strict=True):
            shard = known.get(index) or known.setdefault(index, manifest.shard(index))
            chunk = chunk_at(manifest, row, index, shard)
            found.append(ChunkRead(row, chunk, tuple(self.wants[first:end].tolist())))
        return found

    def pairs(self) -> tuple[I64, I64]:
        """Return (place of the chunk in these, place in ``wants``) of every pair."""
        return spread_out(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True, eq=False)
class ReadRun:
    """Consecutive 4 KiB-aligned bytes of one file: whole chunks and the gaps before them.

    What a chunk refers to stands before it.
    """

    extent: Extent
    reads: Reads

    @property
    def chunks(self) -> list[ChunkRead]:
        """The chunks one by one."""
        return self.reads.chunks()


def coalesce(
    manifest: Manifest, reads: Reads, run_bytes_max: int, run_bytes_min: int = RUN_BYTES_MIN
) -> tuple[ReadRun, ...]:
    """Join neighbours, given in file order, into runs of at most ``run_bytes_max``.

    What a chunk refers to is in its run, added where it is not wanted for itself.

    Args:
        run_bytes_min: nothing is added to a run of so many.
    """
    reads, begins = _units(manifest, reads)
    if not len(reads.rows):
        return ()
    joined = join_runs(CHUNKS(manifest), reads.rows, begins, run_bytes_max, run_bytes_min)
    return tuple(
        ReadRun(Extent(file, offset, size), reads[begin:end])
        for file, offset, size, begin, end in joined
    )


def chunk_at(manifest: Manifest, row: int, index: int, shard: Shard) -> Chunk:
    """Return the chunk of a row, which is of shard ``index``."""
    step = elements_per_chunk(shard.tensor.dtype, manifest.table.header.chunk_elements)
    first = (row - int(manifest.shard_first_row[index])) * step
    return Chunk(shard, first, min(step, shard.box.elements - first))


def spread_out(first: I64, end: I64) -> tuple[I64, I64]:
    """Write ranges out: (which range, number in it) of every number of every range."""
    counts = end - first
    if (counts == 1).all():
        return np.arange(len(counts)), first
    which = np.arange(len(counts)).repeat(counts)
    before = counts.cumsum() - counts
    return which, np.arange(len(which)) - before[which] + first[which]


def _units(manifest: Manifest, reads: Reads) -> tuple[Reads, I64]:
    """Return chunks in file order, and where each unit begins: what is decoded together."""
    if not len(manifest.references):
        return reads, np.arange(len(reads.rows))
    reads = _with_references(manifest, reads)
    numbers = np.arange(len(reads))
    others = manifest.references[reads.rows]
    refers = np.flatnonzero(others != NONE)
    order = np.argsort(reads.rows)
    found = order[np.searchsorted(reads.rows[order], others[refers])]
    # Between a chunk and what it refers to no unit begins.
    steps = np.zeros(len(reads) + 1, np.int64)
    np.add.at(steps, np.minimum(refers, found) + 1, 1)
    np.add.at(steps, np.maximum(refers, found) + 1, -1)
    is_first = np.cumsum(steps)[:-1] == 0
    order = np.lexsort((numbers, _depths(manifest, reads.rows), np.cumsum(is_first)))
    return reads[order], np.flatnonzero(is_first)


def _depths(manifest: Manifest, rows: I64) -> I64:
    """Count the chunks that have to be decoded before each, one because of the one after it."""
    depth, other = np.zeros(len(rows), np.int64), manifest.references[rows]
    while np.any(other != NONE):
        depth += other != NONE
        other = np.where(other != NONE, manifest.references[other], NONE)
    return depth


def _with_references(manifest: Manifest, reads: Reads) -> Reads:
    """Add, in file order, the chunks that decoding these takes and that are not among them."""
    needed: Sequence[I64] = [reads.rows]
    while len(needed[-1]):
        other = manifest.references[needed[-1]]
        needed = [*needed, other[other != NONE]]
    added = np.setdiff1d(np.concatenate(needed), reads.rows)
    rows = np.concatenate([reads.rows, added])
    none = np.zeros_like(added)
    first, count = np.concatenate([reads.first, none]), np.concatenate([reads.count, none])
    files = manifest.file_first_chunk.searchsorted(rows, "right") - 1
    order = np.lexsort((manifest.chunk_start[rows], files))
    return Reads(manifest, rows[order], first[order], count[order], reads.wants, reads.exact)
