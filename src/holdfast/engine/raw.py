"""Payloads that are the elements themselves: staged, hashed and handed to the disk many at a time.

Knows columns and addresses; no tensors.
"""

import time

import numpy as np

from .._core import digest_shards, stage_chunks
from ..boxes import U64
from ..format.data_file import seed_head
from ..format.rows import file_table
from ..plan.shard_table import ShardTable
from .file_plan import Images, RawFile, RawLayout, lay_out_raw
from .ledger import Ledger
from .origin import Origin
from .write import DataFileWriter


def write_raw(
    writer: DataFileWriter,
    shards: ShardTable,
    origin: Origin,
    images: Images | None,
    ledger: Ledger,
) -> None:
    """Write all shards.

    Args:
        images: where the elements stand, and are written from; None: they pass through the pool.
    """
    layout = lay_out_raw(writer.plan, shards, 0 if images else writer.window_bytes)
    for file in layout.files:
        _write_file(writer, shards, layout, file, origin, images, ledger)


def _write_file(
    writer: DataFileWriter,
    shards: ShardTable,
    layout: RawLayout,
    file: RawFile,
    origin: Origin,
    images: Images | None,
    ledger: Ledger,
) -> None:
    chunks, plan, start = layout.chunks, writer.plan, file.chunks.start
    stream = writer.open(file.end, is_exact=True)
    count = file.chunks.stop - start
    checksums, digests = np.empty(count, np.uint64), np.empty((count, 2), np.uint64)
    head = seed_head(plan.header.save_id, plan.rank, writer.number)
    hashes, known = images.hashes if images else None, np.zeros(count, np.bool_)
    if hashes:
        mine = slice(*np.searchsorted(hashes.rows, [start, file.chunks.stop]))
        rows = hashes.rows[mine] - start
        checksums[rows], digests[rows] = hashes.checksums[mine], hashes.digests[mine]
        known[rows] = hashes.known[mine]
    for first, end in layout.batches(file, stream.part_bytes):
        if layout.turns[first]:
            stream.turn()
        at, sizes = int(layout.offsets[first]), chunks.sizes[first:end]
        size = int(layout.offsets[end - 1] + sizes[-1]) - at
        room = stream.room(at, size)
        started = time.perf_counter()
        targets = layout.offsets[first:end] - np.uint64(at) + np.uint64(writer.base + room)
        sources = _gathered(origin, first, end, targets)
        batch = slice(first - start, end - start)
        if hashes:
            sources = np.where(known[batch], np.uint64(0), sources)
        stage_chunks(targets, sources, sizes, head, batch.start, checksums[batch], digests[batch])
        ledger.seconds["stage"] += time.perf_counter() - started
        if not images:
            ledger.staged_bytes += int(sizes.sum())
        stream.advance(size)
        ledger.note_writes(writer.writes)
        ledger.check()
    counts = chunks.counts[file.shards]
    shard_digests = np.empty((len(counts), 2), np.uint64)
    digest_shards(digests, counts, shard_digests)
    writer.close(
        file_table(
            plan.header,
            plan.rank,
            writer.number,
            tensor=shards.tensor[file.shards],
            numbers=shards.numbers[file.numbers],
            digests=shard_digests,
            counts=counts,
            checksums=checksums,
            size_modes=chunks.sizes[file.chunks],
            offsets=layout.offsets[file.chunks],
        )
    )


def _gathered(origin: Origin, first: int, end: int, targets: U64) -> U64:
    """Return where chunks stand; those whose elements lie otherwise are put in their targets."""
    sources = origin.addresses(first, end)
    if sources.all():
        return sources
    sources = sources.copy()
    for missing in np.flatnonzero(sources == 0).tolist():
        origin.gather(first + missing, int(targets[missing]))
        sources[missing] = targets[missing]
    return sources
