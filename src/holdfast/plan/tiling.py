"""Do the boxes of all ranks make whole tensors? Asked before a byte is written. Pure; no files."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..boxes import LANES, PRIME, Bools, Boxes, measure, random_keys
from ..errors import StateError
from ..format.names import dotted
from ..layout import COMPARED_BOXES_MAX, Box, Tensor, first_gap, first_overlap
from .balance import Assignment
from .dedup import Rows

SHOWN_MAX = 5  # faults, and ranks, that an error names


def check_tiling(tensors: Sequence[Tensor], rows: Rows, share: Assignment, tied: Bools) -> None:
    """Check that every element of every tensor is in one box, and in one only.

    Args:
        rows: what the ranks hold.
        share: who writes what of it.
        tied: tensors that are other names of one that is written.

    Raises:
        StateError: the text names the tensors, the boxes and their ranks.
    """
    ndim = np.array([len(tensor.shape) for tensor in tensors], np.int64)
    shape = np.ones((len(tensors), int(ndim.max(initial=0))), np.int64)
    for d in range(shape.shape[1]):
        shape[ndim > d, d] = [tensor.shape[d] for tensor in tensors if len(tensor.shape) > d]
    keys = random_keys(shape.shape[1])
    found = np.zeros((len(tensors), LANES), np.uint64)
    for lane, numbers in enumerate(measure(share.boxes, ndim[share.tensor], keys).T):
        np.add.at(found[:, lane], share.tensor, numbers)
    expected = measure(Boxes(np.zeros_like(shape), shape), ndim, keys)
    differing = (found % np.uint64(PRIME) != expected).any(axis=1) & ~tied
    faults = [_fault(tensors[index], rows, index) for index in np.flatnonzero(differing).tolist()]
    if faults:
        more = f"; and {len(faults) - SHOWN_MAX} more" * (len(faults) > SHOWN_MAX)
        raise StateError(
            f"the shards of all ranks do not make whole tensors: "
            f"{'; '.join(faults[:SHOWN_MAX])}{more}. Give each rank its part as a DTensor or a "
            "holdfast.Shard, or the same whole tensor on every rank"
        )


def _fault(tensor: Tensor, rows: Rows, index: int) -> str:
    """Say which boxes overlap, or what no box has."""
    held: dict[Box, list[int]] = {}
    mine = rows[rows.tensor == index]
    sides = (mine.boxes.offset.tolist(), mine.boxes.shape.tolist(), mine.holder.tolist())
    for offset, shape, holder in zip(*sides, strict=True):
        box = Box(*(tuple(side[: len(tensor.shape)]) for side in (offset, shape)))
        held.setdefault(box, []).extend(rows.holders[holder])
    boxes, what = list(held), f"{dotted(tensor.path)} {tensor.dtype} {list(tensor.shape)}"
    if overlap := first_overlap(boxes[:COMPARED_BOXES_MAX]):
        both = " and ".join(f"{box} of {_ranks(held[box])}" for box in overlap)
        return f"{what}: {both} overlap"
    covered, total = sum(box.elements for box in boxes), Box((), tensor.shape).elements
    if not held:
        return f"{what}: no rank holds any of its {total} elements"
    holders = _ranks(rank for ranks in held.values() for rank in ranks)
    gap = first_gap(tensor.shape, boxes) if len(boxes) <= COMPARED_BOXES_MAX else None
    missing = f", no rank holds {gap}" if gap else ""
    return f"{what}: the boxes of {holders} cover {covered} of {total} elements{missing}"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(set(ranks))
    shown = ", ".join(map(str, numbers[:SHOWN_MAX])) + " …" * (len(numbers) > SHOWN_MAX)
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
