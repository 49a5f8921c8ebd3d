"""The stream of a save: stage → encode → write, under one pool.

Knows how these rooms overlap: the queue writes on its own threads while the calling thread stages
and encodes. The rooms know nothing of it. How far a save has come stands in its `Ledger`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import torch

from .._core import xxh3_128
from ..codecs.base import Codec
from ..codecs.groups import units_of
from ..format.header import Header
from ..format.table import Table
from ..layout import Box, Shard, chunk_count, chunks_of
from ..stores.base import Store
from .ahead import encode_ahead
from .basis import Basis
from .ledger import Ledger
from .pool import Lease
from .stage import seal, stage
from .task import Encoded
from .write import DataFileWriter, Images, SyncError, WriterPlan

# What is held of a shard's tensor, and which box of it that is; asked for when its turn comes.
Source = Callable[[Shard], tuple[torch.Tensor, Box]]


def write_shards(
    store: Store,
    lease: Lease,
    plan: WriterPlan,
    shards: Iterable[Shard],
    origin: Source | Images,
    codec: Codec | None,
    basis: Basis | None,
    ledger: Ledger,
) -> list[Table]:
    """Write one rank's shards into durable data files; return the table of each.

    Nothing is left behind when it fails. After a failed fsync the files are dropped and everything
    is written again under other numbers, once.

    Args:
        origin: gives the elements to stage, shard by shard and once for each attempt; or where in
            the pool every chunk stands already.
        codec: of all of them; None: they are stored as they are.
        basis: what is known of the base; it becomes what is known of these.
    """
    shards = list(shards)
    if not shards:
        return []
    images = origin if isinstance(origin, Images) else None
    source = None if isinstance(origin, Images) else origin
    writer = DataFileWriter(store, lease, plan, images)
    for last_attempt in (False, True):
        try:
            if codec is None:
                for shard in shards:
                    _write_shard(writer, lease, shard, source, plan.header, ledger)
            else:
                _write_encoded(writer, lease, shards, origin, codec, basis, plan.header, ledger)
            tables = writer.finish()
            ledger.note_writes(writer)
            return tables
        except SyncError:
            writer.abandon()
            if last_attempt:
                raise
            if basis is not None:
                basis.forget()
            again = plan.starting_at(writer.next_number)
            writer = DataFileWriter(store, lease, again, images)
        except BaseException:
            writer.abandon()
            raise
    raise AssertionError("the loop returns or raises")


def _write_shard(
    writer: DataFileWriter,
    lease: Lease,
    shard: Shard,
    source: Source | None,
    header: Header,
    ledger: Ledger,
) -> None:
    """Stage a shard's chunks where they are written from: raw payloads are the chunks."""
    places = writer.begin([shard])
    assert places is not None  # nothing is ahead of it
    place, row = places[0], places[0].first_chunk
    digests: list[bytes] = []
    base, clock = lease.pool.address(0), time.perf_counter
    held = source(shard) if source else None
    for chunk in chunks_of(shard, header.chunk_elements):
        at, seed = writer.reserve(row + len(digests), chunk.size_bytes)
        started = clock()
        if held is None:
            staged = seal(base + at, chunk.size_bytes, seed)
        else:
            staged = stage(*held, chunk, base + at, seed)
            ledger.staged_bytes += chunk.size_bytes
        ledger.seconds["stage"] += clock() - started
        writer.append(row + len(digests), staged.size_bytes, staged.checksum)
        ledger.note_writes(writer)
        ledger.check()
        digests.append(staged.digest)
    writer.end(place, xxh3_128(b"".join(digests)))


def _write_encoded(
    writer: DataFileWriter,
    lease: Lease,
    shards: Sequence[Shard],
    origin: Source | Images,
    codec: Codec,
    basis: Basis | None,
    header: Header,
    ledger: Ledger,
) -> None:
    """Append, in order, what is staged and encoded in threads."""
    groups = [group for coding in header.codecs for group in coding.groups]
    units = units_of(shards, header.tensors, groups)
    find = _staged_at(lease, shards, origin, header) if isinstance(origin, Images) else origin
    elements = header.chunk_elements
    encoded = encode_ahead(units, writer.begin, writer.seed, find, codec, elements, basis)
    with closing(encoded):
        for segment, chunks in encoded:
            writer.add(segment, (row for made in chunks for row in made.rows))
            for made in chunks:
                _note(made, writer, basis, ledger)
                if not isinstance(origin, Images):
                    ledger.staged_bytes += made.decoded_bytes
            ledger.note_writes(writer)
            ledger.check()


def _note(made: Encoded, writer: DataFileWriter, basis: Basis | None, ledger: Ledger) -> None:
    """Take down what chunks lost, and the digests of shards that end with them."""
    work = made.work
    if basis is not None:
        for (_, shard), loss in zip(work.unit, made.losses, strict=True):
            if loss is not None:
                basis.lose(shard.tensor.path, loss)
    if made.is_last:
        for place, digests in zip(work.places, work.digests, strict=True):
            writer.end(place, xxh3_128(b"".join(digests)))
    ledger.seconds["stage"] += made.stage_s
    ledger.seconds["encode"] += made.encode_s


def _staged_at(
    lease: Lease, shards: Sequence[Shard], images: Images, header: Header
) -> Callable[[Shard], list[int]]:
    """Return where the chunks of a shard stand in the pool."""
    base, offsets = lease.pool.address(0), iter(images.offsets)
    places = {
        shard: [base + next(offsets) for _ in range(chunk_count(shard, header.chunk_elements))]
        for shard in shards
    }
    return places.__getitem__
