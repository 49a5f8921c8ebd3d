"""Equal shares of the bytes. Pure; knows no torch, no files.

Every rank writes as many bytes as every other, as far as what it holds allows. Nobody sends data:
a box is written by ranks that hold it, and large boxes that several hold are cut into smaller ones.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import lcm
from operator import itemgetter

from ..layout import ITEM_BYTES, Box, Path, Shard, boxes_of_range, elements_per_chunk, size_of

CUT_SHARE = 200  # of the mean load: how far a cut may lie from where the shares would be equal
CUT_BYTES_MIN = 256  # about what a further piece takes in the footer and in MANIFEST
ROUNDS_MAX = 16  # random sets that cross, of six ranks, lay still after ten at most

Ranks = tuple[int, ...]  # ascending
Numbered = tuple[int, Shard]  # place in the order of the state, shard


def assign(
    shards_by_rank: Sequence[Sequence[Shard]],
    forced: Mapping[Path, int],
    chosen: Container[int],
    chunk_elements: int,
) -> tuple[tuple[Shard, ...], ...]:
    """Share out all distinct boxes, so that every rank writes the same number of bytes.

    What only one rank can write is its load to begin with. The rest is grouped by the set of ranks
    that can write it, and poured like water on the ranks of its set: smallest set first, always on
    those that have the least. Where sets are nested (a tensor on all ranks, another on the replicas
    of a shard), no other way makes the fullest rank less full: the bytes of a small set can go
    nowhere else, and whatever a larger one adds ends no higher on even ground than on uneven ground
    of the same volume. Sets that cross (rows and columns of a mesh) are taken up and poured again
    until they lie still: each time the sum of the squared loads falls, which only ends at its
    minimum, where the fullest rank is least full too.

    A set's boxes go out in the state's order, consecutive ones to the same rank. Cuts are at whole
    rows, and whole chunks where these are short enough; a share is within 1 % of the mean of what
    it should be (2 x 1/200), but for very small states. At most one cut a rank and set.

    Args:
        shards_by_rank: what each rank holds, each tensor once; empty boxes are dropped.
        forced: tensors that a certain rank has to write, whole.
        chosen: ranks that write what several hold; a box that none of them holds is written by
            those that do.
        chunk_elements: of the save.

    Returns:
        For each rank, the shards it writes, in the state's order.
    """
    written: list[list[Numbered]] = [[] for _ in shards_by_rank]
    load_bytes = [0] * len(shards_by_rank)
    shared: list[tuple[Ranks, list[Numbered]]] = []
    for ranks, boxes in _by_writers(shards_by_rank, forced, chosen).items():
        if len(ranks) > 1:
            shared.append((ranks, boxes))
            continue
        written[ranks[0]] += boxes
        load_bytes[ranks[0]] += size_of(shard for _, shard in boxes)
    shared.sort(key=lambda group: len(group[0]))
    sizes = [size_of(shard for _, shard in boxes) for _, boxes in shared]
    mean_bytes = (sum(load_bytes) + sum(sizes)) // max(1, len(load_bytes))
    reach_bytes = max(CUT_BYTES_MIN, mean_bytes // CUT_SHARE)
    shares = _pour([ranks for ranks, _ in shared], sizes, load_bytes, reach_bytes)
    for (ranks, boxes), size, share in zip(shared, sizes, shares, strict=True):
        # Once more, on what smaller sets have really become: their cuts are evened out.
        _add(load_bytes, ranks, share, -1)
        share = _level(load_bytes, ranks, size)
        for rank, number, piece in _hand_out(boxes, ranks, share, reach_bytes, chunk_elements):
            written[rank].append((number, piece))
            load_bytes[rank] += piece.size_bytes
    return tuple(tuple(shard for _, shard in sorted(w, key=itemgetter(0))) for w in written)


def chosen_writers(writers: str | int, nodes: Sequence[str]) -> Container[int]:
    """Return the ranks that write what several hold.

    Args:
        writers: "rank": all; "node": the lowest of each node; a number: so many, evenly spread.
        nodes: the name of each rank's node.
    """
    if writers == "node":
        lowest = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
        return set(lowest.values())
    if isinstance(writers, int) and writers < len(nodes):
        return {i * len(nodes) // writers for i in range(writers)}
    return range(len(nodes))


def _by_writers(
    shards_by_rank: Sequence[Sequence[Shard]], forced: Mapping[Path, int], chosen: Container[int]
) -> dict[Ranks, list[Numbered]]:
    """Group the distinct boxes by the ranks that may write them."""
    holders: dict[Shard, list[int]] = {}
    for rank, shards in enumerate(shards_by_rank):
        for shard in shards:
            if shard.box.elements:
                holders.setdefault(shard, []).append(rank)
    narrowed: dict[Ranks, Ranks] = {}
    groups: dict[Ranks, list[Numbered]] = {}
    for number, (shard, held) in enumerate(holders.items()):
        writer = forced.get(shard.tensor.path)
        ranks = tuple(held) if writer is None else (writer,)
        if ranks not in narrowed:
            narrowed[ranks] = tuple(rank for rank in ranks if rank in chosen) or ranks
        groups.setdefault(narrowed[ranks], []).append((number, shard))
    return groups


def _pour(
    sets: Sequence[Ranks], sizes: Sequence[int], load_bytes: list[int], still_bytes: int
) -> list[list[int]]:
    """Pour the bytes of each set on its ranks, until the load of no rank moves any more.

    Args:
        load_bytes: of each rank; what is poured is added.
        still_bytes: what moves no further than this lies still.

    Returns:
        For each set, the bytes that each of its ranks gets.
    """
    shares = [[0] * len(ranks) for ranks in sets]
    for _ in range(ROUNDS_MAX):
        before = list(load_bytes)
        for i, ranks in enumerate(sets):
            _add(load_bytes, ranks, shares[i], -1)
            shares[i] = _level(load_bytes, ranks, sizes[i])
            _add(load_bytes, ranks, shares[i], 1)
        moved = (abs(a - b) for a, b in zip(before, load_bytes, strict=True))
        if max(moved, default=0) <= still_bytes:
            break
    return shares


def _add(load_bytes: list[int], ranks: Ranks, share: Sequence[int], sign: int) -> None:
    for rank, size in zip(ranks, share, strict=True):
        load_bytes[rank] += sign * size


def _level(load_bytes: Sequence[int], ranks: Ranks, size_bytes: int) -> list[int]:
    """Share out bytes so that those of the ranks that have the least come to one level."""
    lowest = sorted(ranks, key=load_bytes.__getitem__)
    volume, count = size_bytes, 0
    for rank in lowest:
        # The next one stays dry when the level over those before does not reach it.
        if count and volume <= count * load_bytes[rank]:
            break
        volume += load_bytes[rank]
        count += 1
    level, rest = divmod(volume, count)
    raised = {rank: level + (i < rest) - load_bytes[rank] for i, rank in enumerate(lowest[:count])}
    return [raised.get(rank, 0) for rank in ranks]


def _hand_out(
    boxes: Iterable[Numbered],
    ranks: Ranks,
    share: Sequence[int],
    reach_bytes: int,
    chunk_elements: int,
) -> Iterator[tuple[int, int, Shard]]:
    """Give each rank the next of the boxes, cut where its share ends.

    Yields:
        (rank, number, shard): the pieces of all boxes, in order.
    """
    ends = list(accumulate(share))
    turn = position = 0  # whose it is; bytes of the boxes before
    for number, shard in boxes:
        first, elements, size = 0, shard.box.elements, shard.size_bytes
        while turn + 1 < len(ranks) and ends[turn] <= position + size:
            step = _step(shard, reach_bytes, chunk_elements)
            wanted = (ends[turn] - position) // ITEM_BYTES[shard.tensor.dtype]
            end = _nearest_cut(elements, step, wanted)
            for piece in _pieces(shard, first, end):
                yield ranks[turn], number, piece
            first = end
            turn += 1
        for piece in _pieces(shard, first, elements):
            yield ranks[turn], number, piece
        position += size


def _step(shard: Shard, reach_bytes: int, chunk_elements: int) -> int:
    """Return the elements between the places where a box may be cut; about ``reach_bytes``.

    Rows are those of the outermost dimension, or of the next one where they are too long; single
    elements in the end.
    """
    reach = max(1, reach_bytes // ITEM_BYTES[shard.tensor.dtype])
    row = shard.box.elements
    for length in shard.box.shape:
        if row <= reach:
            break
        row //= length
    chunks = lcm(row, elements_per_chunk(shard.tensor.dtype, chunk_elements))
    unit = chunks if chunks <= reach else row
    return reach // unit * unit


def _nearest_cut(elements: int, step: int, wanted: int) -> int:
    """Return the multiple of ``step`` nearest to an element, or an end of the box.

    No piece is shorter than a step, so a box of less than two is not cut. The place moves by less
    than a step.
    """
    last = max(0, elements // step - 1) * step
    nearest = (wanted + step // 2) // step * step
    if nearest <= last:
        return nearest
    return last if wanted - last < elements - wanted else elements


def _pieces(shard: Shard, first: int, end: int) -> Iterator[Shard]:
    """Cut elements ``[first, end)`` out of a shard: one box where they are whole rows."""
    if end - first == shard.box.elements:
        yield shard
        return
    for _, part in boxes_of_range(shard.box.shape, first, end - first):
        yield Shard(shard.tensor, part.relative_to(tuple(-a for a in shard.box.offset)))


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
