"""Which boxes of the global tensor the local part of a DTensor has. Knows no names but the path."""

import functools
from itertools import product

import torch
from torch.distributed.tensor import DTensor, Partial, placement_types

from ..errors import StateError
from ..format.names import dotted
from ..layout import HELD_BOXES_MAX, Box, Path, whole
from .memory import own_memory

_Step = tuple[int | None, int, int]  # split factor of a strided one, ranks, which of them


def local_part(value: DTensor, path: Path) -> tuple[torch.Tensor, tuple[Box, ...], tuple[Box, ...]]:
    """Return the local part, the boxes of the global tensor in it, and where it has each.

    Raises:
        StateError: its elements are not final or in no memory, or nothing tells where they belong.
    """
    if any(isinstance(placement, Partial) for placement in value.placements):
        raise StateError(
            f"{dotted(path)} is a DTensor with a pending reduction ({value.placements}); "
            "redistribute it to Shard or Replicate first"
        )
    data = own_memory(value.to_local(), path)
    here = whole(data.shape)
    if value.numel() and not data.numel():
        return data, (here,), (here,)
    if any(isinstance(placement, placement_types._StridedShard) for placement in value.placements):
        boxes, places = _strided(value)
    else:
        # The one place where DTensor tells where its shard lies; of strided ones where it begins.
        parts = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
        boxes = [Box(tuple(part.offsets), tuple(part.sizes)) for part in parts]
        places = [here]
    held, sizes = sum(box.elements for box in boxes), [box.shape for box in boxes]
    if held != data.numel() or sizes != [place.shape for place in places]:
        raise StateError(
            f"{dotted(path)} is a DTensor whose local part of shape {list(data.shape)} does not "
            f"match its placements ({value.placements}); redistribute it first"
        )
    if len(boxes) > HELD_BOXES_MAX:
        raise StateError(
            f"{dotted(path)} is a DTensor with {len(boxes)} boxes on this rank "
            f"({value.placements}); expected at most {HELD_BOXES_MAX}. Redistribute it to Shard "
            "first"
        )
    return data, tuple(boxes), tuple(places)


def _strided(value: DTensor) -> tuple[list[Box], list[Box]]:
    """Cut each dimension as its placements do, one after the other, and see what is left here."""
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return [], []
    steps: list[list[_Step]] = [[] for _ in value.shape]
    for ranks, rank, placement in zip(
        value.device_mesh.shape, coordinate, value.placements, strict=True
    ):
        if isinstance(placement, (placement_types.Shard, placement_types._StridedShard)):
            factor = getattr(placement, "split_factor", None)
            steps[placement.dim].append((factor, ranks, rank))
    runs = [_runs(length, tuple(step)) for length, step in zip(value.shape, steps, strict=True)]
    boxes, places = [], []
    for sides in product(*runs):
        first, at, count = (tuple(side[i] for side in sides) for i in range(3))
        boxes.append(Box(first, count))
        places.append(Box(at, count))
    return boxes, places


@functools.lru_cache(maxsize=1 << 12)
def _runs(length: int, steps: tuple[_Step, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return the rows of a dimension that a rank has: (first, where it has it, count) of each run.

    They are cut here as FSDP2 cuts them, since `_StridedShard` of torch 2.9 cuts uneven ones
    otherwise: into as many parts as the split factor says, and then each of them over the ranks.
    """
    rows = [range(length)] if length else []
    for factor, ranks, rank in steps:
        parts = [_part(rows, factor or 1, number) for number in range(factor or 1)]
        rows = [run for part in parts for run in _part(part, ranks, rank)]
    found: list[tuple[int, int, int]] = []
    for run in rows:
        first, at, count = found[-1] if found else (run.start, 0, 0)
        if first + count == run.start:
            found[-1:] = [(first, at, count + len(run))]
        else:
            found.append((run.start, at + count, len(run)))
    return tuple(found)


def _part(rows: list[range], parts: int, number: int) -> list[range]:
    """Return a part as `torch.chunk` cuts them: equal ones, then a shorter one, then none."""
    size = -(-sum(map(len, rows)) // parts)
    begin, end, found = number * size, (number + 1) * size, []
    for run in rows:
        if part := run[max(begin, 0) : max(end, 0)]:
            found.append(part)
        begin, end = begin - len(run), end - len(run)
    return found
