"""Elements → the digests that were taken of them when they were saved. Knows chains; no names.

What checksums cannot tell: whether a codec, or a layout, gives back what it was given.
"""

from collections.abc import Callable, Collection, Iterator

import torch

from .._core import xxh3_128
from ..engine.chain import Chain
from ..engine.pool import Lease
from ..engine.read_pipeline import read_parts
from ..errors import CorruptError
from ..format.names import dotted
from ..layout import Path, Shard, batches, chunks_of, size_of

BATCH_BYTES = 256 << 20  # of shards in memory at once, if no single one is larger


def check_digests(
    chain: Chain, lease: Lease, report: Callable[[int], None], skipped: Collection[Path] = ()
) -> Iterator[tuple[Shard, CorruptError]]:
    """Decode every shard of a checkpoint, and yield each that is not what was saved.

    Args:
        report: called with the bytes of elements checked since the last call.
        skipped: tensors of which it is known that they cannot be read.
    """
    manifest = chain[-1].manifest
    every = ((index, manifest.shard(index)) for index in range(len(manifest.table.shard_tensor)))
    shards = [(index, shard) for index, shard in every if shard.tensor.path not in skipped]
    for batch in batches(shards, lambda known: known[1].size_bytes, BATCH_BYTES):
        yield from _check(chain, lease, dict(batch))
        report(size_of(shard for _, shard in batch))


def _check(
    chain: Chain, lease: Lease, batch: dict[int, Shard]
) -> Iterator[tuple[Shard, CorruptError]]:
    table = chain[-1].manifest.table
    parts = {s: torch.empty(s.size_bytes, dtype=torch.uint8, device="cpu") for s in batch.values()}
    try:
        read_parts(chain, lease, parts)
    except CorruptError as error:
        if len(batch) == 1:
            # Not what it says of the targets that a load would have filled.
            cause = error.__cause__
            yield next(iter(batch.values())), cause if isinstance(cause, CorruptError) else error
            return
        for index, shard in batch.items():  # one by one: the others may be good
            yield from _check(chain, lease, {index: shard})
        return
    for index, shard in batch.items():
        digests, at = [], 0
        for chunk in chunks_of(shard, table.header.chunk_elements):
            digests.append(xxh3_128(parts[shard][at : at + chunk.size_bytes].numpy()))
            at += chunk.size_bytes
        if xxh3_128(b"".join(digests)) != table.shard_digest[index].tobytes():
            fault = (
                f"{chain[-1].store.location}: the box {shard.box} of "
                f"{dotted(shard.tensor.path)} does not decode to the saved elements, though its "
                "checksums may be right. Use another checkpoint, and report this"
            )
            yield shard, CorruptError(fault)
