"""Which bytes a load reads, in which order. Pure; knows no torch, opens no files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, index
from typing import cast

import numpy as np

from .._core import reads_in_order, rows_of_whole
from ..boxes import I64, Bools, Boxes, reach_into, strides_of, unflatten
from ..errors import MismatchError, OptionError, shown
from ..format.manifest import CHUNKS, Manifest
from ..layout import Box, Path, Shape, whole
from .reads import RUN_BYTES_MIN, ReadRun, Reads, coalesce, spread_out

Targets = Mapping[Path, tuple[int, Sequence[Box]]]

_OF_WHOLE = attrgetter(
    *("tensor_order", "tensor_first", "shard_first_row", "table.shard_chunks", "is_cut")
)
_NUMBERS = cast(Callable[[bytes], I64], partial(np.frombuffer, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Wants:
    """Boxes that are wanted, as columns.

    Attributes:
        tensor: the index of the tensor that each is a box of.
        boxes: None: each is all of its tensor.
    """

    tensor: I64
    boxes: Boxes | None = None


def wants_of(wanted: Targets) -> Wants:
    """Return what is wanted as columns.

    Args:
        wanted: for each target, the index of its tensor and the boxes of it that are wanted.
    """
    pairs = [(index, box) for index, boxes in wanted.values() for box in boxes]
    ndim = np.array([len(box.shape) for _, box in pairs], np.int64)
    flat = np.array([n for _, box in pairs for n in (*box.offset, *box.shape)], np.int64)
    boxes = unflatten(flat, np.cumsum(2 * ndim) - 2 * ndim, ndim)
    return Wants(np.array([index for index, _ in pairs], np.int64), boxes)


def plan_load(
    manifest: Manifest, wanted: Targets, run_bytes_max: int, run_bytes_min: int = RUN_BYTES_MIN
) -> tuple[ReadRun, ...]:
    """Plan to read what is wanted: every chunk needed, once, in file order.

    Args:
        run_bytes_max: longest run (a pool slot).
        run_bytes_min: nothing is added to a run of so many.

    Returns:
        Runs ordered by file and offset; no chunk is in two.
    """
    chunks = find_chunks(manifest, wants_of(wanted))
    return coalesce(manifest, chunks, run_bytes_max, run_bytes_min)


def find_chunks(manifest: Manifest, wants: Wants) -> Reads:
    """Intersect what is wanted with what is stored: every chunk needed, once, in file order."""
    at_once = rows_of_whole(_OF_WHOLE(manifest), wants.tensor) if wants.boxes is None else None
    pairs = at_once or _rows_within(manifest, wants)
    *columns, exact = reads_in_order(CHUNKS(manifest), *pairs)
    rows, first, count, wanted = map(_NUMBERS, columns)
    return Reads(manifest, rows, first, count, wanted, np.frombuffer(exact, np.bool_))


def _rows_within(manifest: Manifest, wants: Wants) -> tuple[I64, I64, Bools]:
    """Find the chunks that hold elements of what is wanted.

    Returns:
        (number of what is wanted, row of the chunk, whether what is wanted is the box of its
        shard) of every pair.
    """
    part = manifest.whole_boxes(wants.tensor)[0] if wants.boxes is None else wants.boxes
    # Every shard of a wanted tensor beside the box that is wanted of it.
    first, end = manifest.tensor_first[wants.tensor], manifest.tensor_first[wants.tensor + 1]
    number, place = spread_out(first, end)
    shard = manifest.tensor_order[place]
    held = manifest.boxes(shard, part.shape.shape[1])
    if len(number) != len(wants.tensor) or not np.all(end - first == 1):
        part = part[number]
    low = np.maximum(held.offset, part.offset)
    high = np.minimum(held.offset + held.shape, part.offset + part.shape)
    exact = ((part.offset == held.offset) & (part.shape == held.shape)).all(axis=1)
    common = np.asarray((high > low).all(axis=1))
    if not common.all():
        number, shard, held = number[common], shard[common], held[common]
        low, high, exact = low[common], high[common], exact[common]
    inside = Boxes(low - held.offset, high - low)
    # Chunks from the one with the first common element to the one with the last.
    step = manifest.chunk_elements[manifest.table.shard_tensor[shard]]
    strides = strides_of(held.shape)
    begin = (inside.offset * strides).sum(axis=1)
    last = ((inside.offset + inside.shape - 1) * strides).sum(axis=1)
    pair, chunk = spread_out(begin // step, last // step + 1)
    kept = np.asarray((inside.shape == held.shape).all(axis=1))[pair]
    if not kept.all():
        start = chunk * step[pair]
        stop = np.minimum(start + step[pair], held.elements[pair])
        some = np.flatnonzero(~kept)
        kept[some] = reach_into(inside[pair[some]], held.shape[pair[some]], start[some], stop[some])
        pair, chunk = pair[kept], chunk[kept]
    return number[pair], manifest.shard_first_row[shard[pair]] + chunk, exact[pair]


def box_of(name: str, shape: Shape, box: tuple[Shape, Shape] | None) -> Box:
    """Return the box that a user asks of a tensor: (offset, shape); None: all of it.

    Raises:
        MismatchError: it exceeds the tensor.
        OptionError: it is no box.
    """
    if box is None:
        return whole(shape)
    try:
        offset, extent = (tuple(index(number) for number in part) for part in box)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"box is {shown(box)}; expected (offset, shape), each with an integer per dimension"
        ) from error
    inside = len(offset) == len(extent) == len(shape) and all(
        a >= 0 and n >= 0 and a + n <= s for a, n, s in zip(offset, extent, shape, strict=True)
    )
    if not inside:
        raise MismatchError(
            f"the box at {list(offset)} of shape {list(extent)} exceeds {name}, "
            f"which has shape {list(shape)}"
        )
    return Box(offset, extent)
