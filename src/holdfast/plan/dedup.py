"""What several ranks hold in common, once. Pure; knows no torch, no files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..boxes import I64, Bools, Boxes, row_hashes, unflatten
from ..errors import StateError
from ..format.fields import parse_json
from ..format.names import dotted
from ..layout import Path, Tensor
from .local_states import LocalState, decode_object, distinct


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """All boxes that are held, as columns; those of replicas, whose local_states are one, once.

    Attributes:
        tensor: index of each.
        holder: index of the set of ranks that hold it.
        holders: those sets, ascending.
    """

    tensor: I64
    boxes: Boxes
    holder: I64
    holders: tuple[tuple[int, ...], ...]

    def __getitem__(self, kept: Bools) -> "Rows":
        return Rows(self.tensor[kept], self.boxes[kept], self.holder[kept], self.holders)


def merge_tensors(local_states: Sequence[LocalState]) -> tuple[list[Tensor], Rows]:
    """Collect the tensors of all ranks, in the order in which they first appear, and all boxes.

    Raises:
        StateError: two ranks disagree about dtype or global shape; the text lists every such
            tensor.
    """
    tensors: list[Tensor] = []
    index: dict[Path, int] = {}
    first: list[int] = []  # the first rank that holds each
    numbers: dict[int, I64] = {}
    faults = []
    for names, ranks in distinct([local_state.names for local_state in local_states]):
        for mine in names.tensors:
            known = tensors[index[mine.path]] if mine.path in index else mine
            if mine != known:
                faults.append(
                    f"{dotted(mine.path)} is {mine.dtype} {list(mine.shape)} on rank {ranks[0]}, "
                    f"{known.dtype} {list(known.shape)} on rank {first[index[mine.path]]}"
                )
            if mine.path not in index:
                index[mine.path] = len(tensors)
                tensors.append(mine)
                first.append(ranks[0])
        numbers[id(names)] = np.array([index[mine.path] for mine in names.tensors], np.int64)
    if faults:
        raise StateError(
            f"the ranks disagree: {'; '.join(faults)}. Give the same dtype and shape on all ranks"
        )
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, local_state in enumerate(local_states):
        holders.setdefault((id(local_state.names), id(local_state.boxes)), []).append(rank)
    firsts = [local_states[ranks[0]] for ranks in holders.values()]
    counts = [local_state.counts for local_state in firsts]
    owners = [numbers[id(local_state.names)] for local_state in firsts]
    tensor = np.concatenate([np.repeat(*pair) for pair in zip(owners, counts, strict=True)])
    flat = np.concatenate([local_state.numbers for local_state in firsts])
    ndim = np.array([len(t.shape) for t in tensors], np.int64)[tensor]
    boxes = unflatten(flat, np.cumsum(2 * ndim) - 2 * ndim, ndim)
    holder = np.repeat(np.arange(len(firsts)), [int(count.sum()) for count in counts])
    return tensors, Rows(tensor, boxes, holder, tuple(map(tuple, holders.values())))


def merge_ties(
    local_states: Sequence[LocalState], tensors: Sequence[Tensor], rows: Rows
) -> dict[Path, Path]:
    """Keep the ties on which all ranks agree that hold elements of the further name.

    A rank with an empty shard cannot tell; a rank on which the two names differ undoes the tie.
    """
    candidates: dict[Path, Path] = {}
    for names, _ in distinct([local_state.names for local_state in local_states]):
        for path, target in names.ties.items():
            candidates.setdefault(path, target)
    if not candidates:
        return {}
    held = rows.boxes.elements > 0
    for number, tensor in enumerate(tensors):
        if tensor.path not in candidates:
            continue
        for holder in rows.holder[(rows.tensor == number) & held].tolist():
            told = local_states[rows.holders[holder][0]].names.ties.get(tensor.path)
            if told != candidates.get(tensor.path):
                candidates.pop(tensor.path, None)
    # A tie to a name that is itself tied would have no tensor to point at.
    return {path: target for path, target in candidates.items() if target not in candidates}


def same_boxes(rows: Rows) -> tuple[I64, I64]:
    """Find boxes that are equal: which first one each is like.

    Returns:
        (rows of the distinct boxes, in order; for each row, which of these it is).
    """
    columns = np.column_stack([rows.tensor, rows.boxes.offset, rows.boxes.shape])
    hashes = row_hashes(columns)
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    if not np.array_equal(columns[first[group]], columns):  # two hashes met, once in 2^64 pairs
        _, first, group = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[group.reshape(-1)]


def merge_objects(objects_by_rank: Sequence[dict[Path, bytes]]) -> dict[Path, int]:
    """Find the first rank that holds each value.

    Args:
        objects_by_rank: JSON texts of the values.

    Raises:
        StateError: two ranks have different values at one path; the text lists every such path.
    """
    first: dict[Path, int] = {}
    faults = []
    for objects, ranks in distinct(objects_by_rank):
        for path, text in objects.items():
            known = objects_by_rank[first.setdefault(path, ranks[0])][path]
            # Texts, so that NaN equals itself and 1 differs from True and 1.0.
            if known != text and _sorted(known) != _sorted(text):
                faults.append(
                    f"{dotted(path)} is {decode_object(text)!r:.60} on rank {ranks[0]}, "
                    f"{decode_object(known)!r:.60} before"
                )
    if faults:
        raise StateError(
            f"the ranks hold different values: {'; '.join(faults)}. Give each rank's value its own "
            'name, such as state[f"reader.{rank}"]'
        )
    return first


def _sorted(text: bytes) -> str:
    return json.dumps(parse_json(text), sort_keys=True)
