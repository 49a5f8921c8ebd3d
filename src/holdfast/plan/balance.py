"""Equal shares of the bytes. Pure; knows no torch, no files.

Every rank writes as many bytes as every other, as far as what it holds allows. Nobody sends data:
a box is written by ranks that hold it, and large boxes that several hold are cut into smaller ones.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm

import numpy as np

from ..boxes import I64, Boxes, unflatten
from ..layout import ITEM_BYTES, Box, Shard, Tensor, boxes_of_range, elements_per_chunk, size_of
from .dedup import Rows, same_boxes

CUT_SHARE = 200  # of the mean load: how far a cut may lie from where the shares would be equal
CUT_BYTES_MIN = 256  # about what a further piece takes in the footer and in MANIFEST
ROUNDS_MAX = 16  # random sets that cross, of six ranks, lay still after ten at most

Ranks = tuple[int, ...]  # ascending
Numbered = tuple[int, Shard]  # place among the distinct boxes, shard


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Who writes what, as columns: the boxes of each rank behind each other, in the state's order.

    Attributes:
        tensor: index of each box's tensor.
    """

    writer: I64
    tensor: I64
    boxes: Boxes


def assign(
    tensors: Sequence[Tensor],
    rows: Rows,
    world_size: int,
    forced: Mapping[int, int],
    chosen: Container[int],
    chunk_elements: int,
) -> Assignment:
    """Assignment out all distinct boxes, so that every rank writes the same number of bytes.

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
        rows: what the ranks hold, each tensor once; without empty boxes.
        forced: {tensor: rank} of those that a certain rank has to write, whole.
        chosen: ranks that write what several hold; a box that none of them holds is written by
            those that do.
        chunk_elements: of the save.
    """
    first, group = same_boxes(rows)
    tensor, boxes = rows.tensor[first], rows.boxes[first]
    item_bytes = np.array([ITEM_BYTES[t.dtype] for t in tensors], np.int64)
    box_bytes = boxes.elements * item_bytes[tensor]
    writer = _only_writers(rows, first, group, forced)
    alone = np.flatnonzero(writer >= 0)
    load = np.zeros(world_size, np.int64)
    np.add.at(load, writer[alone], box_bytes[alone])

    def numbered(number: int) -> Numbered:
        held = tensors[tensor[number]]
        sides = (side[number, : len(held.shape)].tolist() for side in (boxes.offset, boxes.shape))
        offset, shape = map(tuple, sides)
        return number, Shard(held, Box(offset, shape))

    groups = {
        ranks: [numbered(number) for number in numbers]
        for ranks, numbers in _by_writers(rows, group, writer, chosen).items()
    }
    pieces = _share_out(groups, load.tolist(), chunk_elements)
    cut = _columns([shard.box for _, _, shard in pieces], boxes.shape.shape[1])
    numbers = np.concatenate([alone, np.array([n for _, n, _ in pieces], np.int64)])
    writers = np.concatenate([writer[alone], np.array([r for r, _, _ in pieces], np.int64)])
    order = np.lexsort((np.arange(len(numbers)), numbers, writers))
    offset = np.concatenate([boxes.offset[alone], cut.offset])[order]
    shape = np.concatenate([boxes.shape[alone], cut.shape])[order]
    return Assignment(writers[order], tensor[numbers[order]], Boxes(offset, shape))


def _share_out(
    groups: Mapping[Ranks, list[Numbered]], load_bytes: list[int], chunk_elements: int
) -> list[tuple[int, int, Shard]]:
    """Assignment out what several ranks may write.

    Args:
        groups: boxes, by the ranks that may write them.
        load_bytes: of each rank, without these.

    Returns:
        (rank, number, shard) of the boxes and of the pieces of those that are cut.
    """
    pieces: list[tuple[int, int, Shard]] = []
    shared: list[tuple[Ranks, list[Numbered]]] = []
    for ranks, boxes in groups.items():
        if len(ranks) > 1:
            shared.append((ranks, boxes))
            continue
        pieces += [(ranks[0], number, shard) for number, shard in boxes]
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
            pieces.append((rank, number, piece))
            load_bytes[rank] += piece.size_bytes
    return pieces


def _columns(boxes: Sequence[Box], dimensions: int) -> Boxes:
    flat = np.array([n for box in boxes for n in (*box.offset, *box.shape)], np.int64)
    ndim = np.array([len(box.shape) for box in boxes], np.int64)
    return unflatten(flat, np.cumsum(2 * ndim) - 2 * ndim, ndim, dimensions)


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


def _only_writers(rows: Rows, first: I64, group: I64, forced: Mapping[int, int]) -> I64:
    """Return, for each distinct box, the only rank that may write it; -1 where several may."""
    held_once = np.bincount(group, minlength=len(first)) == 1
    single = np.array([ranks[0] if len(ranks) == 1 else -1 for ranks in rows.holders], np.int64)
    writer = np.where(held_once, single[rows.holder[first]], -1)
    for tensor, rank in forced.items():
        writer[rows.tensor[first] == tensor] = rank
    return writer


def _by_writers(
    rows: Rows, group: I64, writer: I64, chosen: Container[int]
) -> dict[Ranks, list[int]]:
    """Group the distinct boxes that several may write by the ranks that do."""
    several = np.flatnonzero(writer[group] < 0)
    several = several[np.argsort(group[several], kind="stable")]
    holders: dict[int, list[int]] = {}
    for number, holder in zip(group[several].tolist(), rows.holder[several].tolist(), strict=True):
        holders.setdefault(number, []).append(holder)
    narrowed: dict[tuple[int, ...], Ranks] = {}
    groups: dict[Ranks, list[int]] = {}
    for number, held in holders.items():
        key = tuple(held)
        if key not in narrowed:
            ranks = tuple(sorted(rank for holder in key for rank in rows.holders[holder]))
            narrowed[key] = tuple(rank for rank in ranks if rank in chosen) or ranks
        groups.setdefault(narrowed[key], []).append(number)
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
    """Assignment out bytes so that those of the ranks that have the least come to one level."""
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


def cut_share(tensors: Sequence[Tensor], share: Assignment, bytes_max: int) -> Assignment:
    """Cut boxes of more than ``bytes_max`` bytes into smaller ones."""
    item_bytes = np.array([ITEM_BYTES[t.dtype] for t in tensors], np.int64)
    large = np.flatnonzero(share.boxes.elements * item_bytes[share.tensor] > bytes_max)
    if not len(large):
        return share
    cut: dict[int, list[Box]] = {}
    for row in large.tolist():
        tensor = tensors[share.tensor[row]]
        sides = (share.boxes.offset, share.boxes.shape)
        offset, shape = (tuple(side[row, : len(tensor.shape)].tolist()) for side in sides)
        cut[row] = [s.box for s in cut_shard(Shard(tensor, Box(offset, shape)), bytes_max)]
    counts = np.ones(len(share.tensor), np.int64)
    counts[large] = [len(cut[row]) for row in large.tolist()]
    rows = np.repeat(np.arange(len(counts)), counts)
    boxes = share.boxes[rows]
    pieces = _columns([box for row in large.tolist() for box in cut[row]], boxes.shape.shape[1])
    replaced = np.isin(rows, large)
    boxes.offset[replaced], boxes.shape[replaced] = pieces.offset, pieces.shape
    return Assignment(share.writer[rows], share.tensor[rows], boxes)


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
