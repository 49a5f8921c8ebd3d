"""The tensors of a parameter are written by one rank, in equal boxes: so they are coded together.

For the sharing out, a group whose tensors lie alike on all ranks is one tensor. Pure; knows no
torch.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from ..boxes import row_hashes
from ..layout import ITEM_BYTES, ROLES, Group, Tensor
from .balance import Assignment
from .dedup import Rows

# A dtype of about as many bytes as the tensors of a group have together.
_SUM_DTYPES = ((4, "f32"), (8, "f64"), (64, "c128"))


def join_groups(
    tensors: Sequence[Tensor], rows: Rows, groups: Sequence[Group], apart: AbstractSet[int]
) -> tuple[list[Tensor], Rows, dict[int, list[int]]]:
    """Let the first tensor of each group stand for all of it, where all lie alike on all ranks.

    Args:
        rows: what the ranks hold.
        apart: tensors that are shared out by themselves.

    Returns:
        (tensors, rows, the tensors that each of those that stand for a group stands for).
    """
    if not groups:
        return list(tensors), rows, {}
    columns = np.column_stack([rows.holder, rows.boxes.offset, rows.boxes.shape])
    marks = np.zeros(len(tensors), np.uint64)
    np.add.at(marks, rows.tensor, row_hashes(columns))
    joined, members = list(tensors), dict[int, list[int]]()
    dropped = np.zeros(len(tensors), np.bool_)
    for group in groups:
        numbers = sorted(group.values())
        if len({int(marks[n]) for n in numbers}) > 1 or not apart.isdisjoint(numbers):
            continue
        first, *rest = numbers
        size = sum(ITEM_BYTES[tensors[n].dtype] for n in numbers)
        dtype = next(dtype for most, dtype in _SUM_DTYPES if size <= most)
        joined[first], members[first] = replace(tensors[first], dtype=dtype), numbers
        dropped[rest] = True
    kept = ~dropped[rows.tensor]
    return joined, rows[kept], members


def part_groups(
    tensors: int, share: Assignment, members: Mapping[int, Sequence[int]]
) -> Assignment:
    """Put every tensor of a group where the one is that stood for it.

    Args:
        tensors: how many there are.
    """
    stands_for = [members.get(number, (number,)) for number in range(tensors)]
    sizes = np.array([len(numbers) for numbers in stands_for], np.int64)
    flat = np.array([n for numbers in stands_for for n in numbers], np.int64)
    counts = sizes[share.tensor]
    rows = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    tensor = flat[(np.cumsum(sizes) - sizes)[share.tensor[rows]] + within]
    return Assignment(share.writer[rows], tensor, share.boxes[rows])


def by_groups(tensors: int, share: Assignment, groups: Sequence[Group]) -> Assignment:
    """Order what each rank writes so that equal boxes of a group's tensors follow each other."""
    first, role = np.arange(tensors), np.zeros(tensors, np.int64)
    for group in groups:
        members = list(group.values())
        first[members], role[members] = min(members), [ROLES.index(name) for name in group]
    sides = (share.boxes.shape, share.boxes.offset)
    boxes = [side[:, d] for side in sides for d in reversed(range(side.shape[1]))]
    order = np.lexsort((role[share.tensor], *boxes, first[share.tensor], share.writer))
    return Assignment(share.writer[order], share.tensor[order], share.boxes[order])
