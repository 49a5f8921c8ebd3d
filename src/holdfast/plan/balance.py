"""Equal shares of the bytes. Pure; knows no torch, no files."""

from collections.abc import Iterator, Mapping, Sequence

from ..layout import Box, Path, Shard


def assign(
    shards_by_rank: Sequence[Sequence[Shard]], writers: Mapping[Path, int]
) -> tuple[tuple[Shard, ...], ...]:
    """Give every distinct box to one rank that holds it: the largest first, to the least loaded.

    That is longest-processing-time scheduling (Graham 1969), within 4/3 of the best when all may
    write all.

    Args:
        shards_by_rank: what each rank holds; empty boxes are dropped.
        writers: tensors that a certain rank has to write.

    Returns:
        For each rank, the shards it writes, in the order in which it holds them.
    """
    holders: dict[Shard, list[int]] = {}
    for rank, shards in enumerate(shards_by_rank):
        for shard in shards:
            if shard.box.elements:
                holders.setdefault(shard, []).append(rank)
    load_bytes = [0] * len(shards_by_rank)
    writer: dict[Shard, int] = {}
    # sorted() is stable, so equal sizes keep the order of the state: the same on every rank.
    for shard in sorted(holders, key=lambda shard: -shard.size_bytes):
        forced = writers.get(shard.tensor.path)
        ranks = holders[shard] if forced is None else [forced]
        chosen = min(ranks, key=load_bytes.__getitem__)
        writer[shard] = chosen
        load_bytes[chosen] += shard.size_bytes
    return tuple(
        tuple(dict.fromkeys(shard for shard in shards if writer.get(shard) == rank))
        for rank, shards in enumerate(shards_by_rank)
    )


def cut_shard(shard: Shard, bytes_max: int) -> Iterator[Shard]:
    """Cut a shard into boxes of at most ``bytes_max`` bytes, along its outermost long dimension."""
    if shard.size_bytes <= bytes_max:
        yield shard
        return
    offset, shape = shard.box.offset, shard.box.shape
    d = next(i for i, n in enumerate(shape) if n > 1)
    row_bytes = shard.size_bytes // shape[d]
    step = max(1, bytes_max // row_bytes)
    for first in range(0, shape[d], step):
        count = min(step, shape[d] - first)
        start = (*offset[:d], offset[d] + first, *offset[d + 1 :])
        box = Box(start, (*shape[:d], count, *shape[d + 1 :]))
        yield from cut_shard(Shard(shard.tensor, box), bytes_max)
