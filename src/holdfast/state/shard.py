"""`Shard`: what a rank holds of a global tensor, told by whoever knows it. Knows no other ranks."""

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import torch
from torch.distributed.tensor import DTensor

from ..errors import StateError
from ..format.names import dotted
from ..format.spec import DIMENSIONS_MAX
from ..layout import Box, Path, boxes_of_range

ELEMENTS_LIMIT = 1 << 59  # of 16 bytes each: docs/format.md has tensors below 2^63 bytes


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What this rank holds of a global tensor: a leaf of a state, in place of the tensor.

    Either one box of it, or a run of its elements in row-major order, as ZeRO and FSDP1 cut
    parameters that they have flattened; or a run of the elements of a box, where what was flattened
    was a part already. A run is cut into boxes, each a view of ``data``, by this rank alone. The
    shards of all ranks have to tile the tensor; the same box, or the same run, may be held by
    several of them, and is then taken to be equal. `load` fills ``data`` in place.

    Attributes:
        data: the elements, in any strides, on any device: of the shape of the box, or
            1-dimensional. It may be empty.
        shape: that of the global tensor, in elements.
        offset: where the box begins in each dimension, in elements.
        start: where the run begins: how many elements of the tensor come before it, or of the box
            that ``within`` gives.
        within: (offset, shape) of the box of which this is a run: tensor parallel under ZeRO, as
            Megatron's distributed optimizer. Default: the whole tensor.

    Example:
        Of a tensor of 8 x 6, the rows from 4 on, and the elements from 13 to 33::

            holdfast.Shard(rows, (8, 6), offset=(4, 0))  # rows.shape == (4, 6)
            holdfast.Shard(run, (8, 6), start=13)  # run.shape == (20,)
            holdfast.Shard(run, (8, 6), start=2, within=((0, 3), (8, 3)))  # of the right half

        What cannot be is a StateError of the verb that is given it, on every rank.
    """

    data: torch.Tensor
    shape: Sequence[int]
    offset: Sequence[int] | None = field(default=None, kw_only=True)
    start: int | None = field(default=None, kw_only=True)
    within: tuple[Sequence[int], Sequence[int]] | None = field(default=None, kw_only=True)


TENSORS: Final = (torch.Tensor, Shard)  # the leaves that have elements


def check_shard(shard: Shard, path: Path) -> None:
    """Check that a shard lies within its tensor.

    Raises:
        StateError: it does not, or it is not told where it lies; the text says what would fit.
    """
    where = dotted(path)
    if not isinstance(shard.data, torch.Tensor) or isinstance(shard.data, DTensor):
        kind = type(shard.data).__name__
        raise StateError(f"{where} is a Shard whose data is a {kind}; expected a torch.Tensor")
    if (shard.offset is None) == (shard.start is None):
        raise StateError(
            f"{where} is a Shard with {'neither' if shard.start is None else 'both'} offset= and "
            "start=; give offset= for a box, or start= for a run of elements"
        )
    if shard.within is not None and (shard.start is None or len(shard.within) != 2):
        raise StateError(
            f"{where} is a Shard with within={shard.within}; expected (offset, shape) of a box, "
            "and start= for a run of its elements"
        )
    inner = shard.within or ((), ())
    numbers = [*shard.shape, *(shard.offset or ()), shard.start or 0, *inner[0], *inner[1]]
    if not all(isinstance(n, int) or hasattr(n, "__index__") for n in numbers):
        raise StateError(
            f"{where} is a Shard at {_place(shard)} of a tensor of shape {list(shard.shape)}; "
            "expected integers, in elements"
        )
    shape = tuple(map(operator.index, shard.shape))
    if len(shape) > DIMENSIONS_MAX or min(shape, default=0) < 0 or prod(shape) >= ELEMENTS_LIMIT:
        raise StateError(
            f"{where} is a Shard of a tensor of shape {list(shape)!s:.200}; expected at most "
            f"{DIMENSIONS_MAX} dimensions, none negative, and fewer than 2^59 elements"
        )
    if shard.data.numel() and not _is_inside(shard):
        ndim = len(shape) if shard.start is None else 1
        raise StateError(
            f"{where} is a Shard with data of shape {list(shard.data.shape)} at {_place(shard)}, "
            f"which leaves its tensor of shape {list(shape)}; expected {ndim}-dimensional data "
            "within it"
        )


def parts_of(shard: Shard, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, Box]]:
    """Cut what a checked shard holds into boxes, and views of its data, which is detached."""
    if not data.numel():
        return
    if shard.offset is not None:
        yield data, Box(tuple(map(operator.index, shard.offset)), tuple(data.shape))
    elif shard.start is not None:
        box = _run_box(shard)
        for before, part in _boxes(box, operator.index(shard.start), data.numel()):
            yield data[before : before + part.elements].view(part.shape), part


@functools.lru_cache(maxsize=1 << 16)  # most are those of the save before
def _boxes(within: Box, first: int, elements: int) -> tuple[tuple[int, Box], ...]:
    return tuple(
        (before, Box(tuple(map(operator.add, part.offset, within.offset)), part.shape))
        for before, part in boxes_of_range(within.shape, first, elements)
    )


def _run_box(shard: Shard) -> Box:
    """Return the box of which a shard is a run."""
    offset, shape = shard.within or ((0,) * len(shard.shape), shard.shape)
    return Box(tuple(map(operator.index, offset)), tuple(map(operator.index, shape)))


def _is_inside(shard: Shard) -> bool:
    data = shard.data
    if shard.start is None:
        return _holds(shard.shape, Box(tuple(shard.offset or ()), tuple(data.shape)))
    box = _run_box(shard)
    fits = data.ndim == 1 and 0 <= shard.start <= box.elements - data.numel()
    return fits and _holds(shard.shape, box)


def _holds(shape: Sequence[int], box: Box) -> bool:
    return len(box.offset) == len(shape) == len(box.shape) and all(
        at >= 0 and n >= 0 and at + n <= whole
        for at, n, whole in zip(box.offset, box.shape, shape, strict=True)
    )


def _place(shard: Shard) -> str:
    if shard.start is None:
        return f"offset {shard.offset}"
    return f"start {shard.start}" + (f" within {shard.within}" if shard.within else "")
