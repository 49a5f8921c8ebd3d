"""`Shard`: a rank's part of a global tensor, as the user describes it. Knows no other ranks."""

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import torch
from torch.distributed.tensor import DTensor

from ..brief import brief
from ..errors import StateError
from ..format.names import dotted
from ..format.spec import DIMENSIONS_MAX
from ..layout import Box, Path, boxes_of_range

ELEMENTS_LIMIT = 1 << 59  # of 16 bytes each: docs/format.md has tensors below 2^63 bytes


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """This rank's part of a global tensor: a leaf of a state, in place of the tensor.

    The part is a box (``offset``), or a range of consecutive elements in row-major order
    (``start``), as ZeRO and FSDP1 cut flattened parameters. With ``within``, the range lies in a
    box of the tensor. The shards of all ranks must tile the tensor. Several ranks may hold the same
    box or range; their elements must then be equal. `load` fills ``data`` in place.

    Attributes:
        data: the elements, in any strides, on any device. Its shape is that of the box, or
            1-dimensional for a range. It may be empty.
        shape: shape of the global tensor, in elements.
        offset: start of the box in each dimension, in elements.
        start: number of elements of the tensor before the range, or of the box ``within``.
        within: (offset, shape) of the box that holds the range, as in Megatron's distributed
            optimizer: tensor parallelism under ZeRO. Default: the whole tensor.

    Raises:
        StateError: an invalid shard, raised on every rank by the call that is given the state.

    Example::

        rows, part = torch.zeros(4, 6), torch.zeros(20)
        holdfast.Shard(rows, (8, 6), offset=(4, 0))  # of an 8 x 6 tensor, the rows 4 to 7
        holdfast.Shard(part, (8, 6), start=13)  # the elements 13 to 32
        holdfast.Shard(part, (8, 6), start=2, within=((0, 3), (8, 3)))  # 2 to 21 of the right half
    """

    data: torch.Tensor
    shape: Sequence[int]
    offset: Sequence[int] | None = field(default=None, kw_only=True)
    start: int | None = field(default=None, kw_only=True)
    within: tuple[Sequence[int], Sequence[int]] | None = field(default=None, kw_only=True)

    __repr__ = brief


@dataclass(frozen=True, slots=True, eq=False)
class Shards(Shard):
    """Several boxes of one tensor on one rank, for integrations: itself, and those in ``more``."""

    more: tuple[Shard, ...] = field(default=(), kw_only=True)


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
            "start=; give offset= for a box, or start= for a range of elements"
        )
    if shard.within is not None and (shard.start is None or len(shard.within) != 2):
        raise StateError(
            f"{where} is a Shard with within={shard.within}; expected (offset, shape) of a box, "
            "and start= for a range of its elements"
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
            f"which does not fit its tensor of shape {list(shape)}; expected {ndim}-dimensional "
            "data within it"
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
