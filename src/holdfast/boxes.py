"""Many boxes at once, as numpy columns. Pure geometry: no torch, no I/O, no names.

All boxes of a set have as many dimensions as the largest: those of fewer are filled up behind with
dimensions of length 1, which change neither their elements nor the order of these. Offsets and
shapes count elements; numbers of elements fit into 63 bits.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

PRIME = (1 << 31) - 1  # a product of two numbers below it fits into 64 bits
LANES = 2  # so that chance is one in 2^60
_chance = random.Random()  # seeded by the operating system: nobody can tell its numbers before


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """n boxes of D dimensions.

    Attributes:
        offset, shape: (n, D).
    """

    offset: I64
    shape: I64

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, rows: "I64 | Bools | slice") -> "Boxes":
        return Boxes(self.offset[rows], self.shape[rows])

    def and_also(self, others: "Boxes") -> "Boxes":
        """Return these and, behind them, others."""
        dimensions = max(self.shape.shape[1], others.shape.shape[1])
        both = [boxes.filled_up(dimensions) for boxes in (self, others)]
        return Boxes(
            np.concatenate([boxes.offset for boxes in both]),
            np.concatenate([boxes.shape for boxes in both]),
        )

    def filled_up(self, dimensions: int) -> "Boxes":
        """Return the same with so many dimensions."""
        count, missing = len(self), dimensions - self.shape.shape[1]
        return Boxes(
            np.concatenate([self.offset, np.zeros((count, missing), np.int64)], axis=1),
            np.concatenate([self.shape, np.ones((count, missing), np.int64)], axis=1),
        )

    @property
    def elements(self) -> I64:
        """Number of elements of each."""
        return np.asarray(self.shape.prod(axis=1, dtype=np.int64))


def unflatten(flat: I64, start: I64, ndim: I64, dimensions: int = 0) -> Boxes:
    """Read boxes that are written as all offsets of one and then its shape.

    Args:
        start: where in ``flat`` each begins.
        ndim: of each.
        dimensions: to fill them up to, if they have no more.
    """
    return Boxes(
        spread(flat, start, ndim, dimensions, filler=0),
        spread(flat, start + ndim, ndim, dimensions, filler=1),
    )


def spread(flat: I64, start: I64, ndim: I64, dimensions: int = 0, *, filler: int) -> I64:
    """Read numbers of several dimensions each: (n, D), the numbers of a dimension side by side.

    Args:
        start: where in ``flat`` those of each begin.
        ndim: of each.
        dimensions: to fill them up to, if they have no more.
        filler: what to fill them up with.
    """
    dimensions = int(ndim.max(initial=dimensions))
    everywhere = int(ndim.min(initial=dimensions))
    numbers = np.full((len(ndim), dimensions), filler, np.int64, order="F")
    for d in range(dimensions):
        rows = slice(None) if d < everywhere else np.flatnonzero(ndim > d)
        numbers[rows, d] = flat[start[rows] + d]
    return numbers


def flatten(boxes: Boxes, ndim: I64) -> I64:
    """Undo `unflatten`, for boxes that follow each other.

    Args:
        ndim: of each.
    """
    start = np.cumsum(2 * ndim) - 2 * ndim
    flat = np.empty(2 * int(ndim.sum()), np.int64)
    for d in range(int(ndim.max(initial=0))):
        rows = np.flatnonzero(ndim > d)
        flat[start[rows] + d] = boxes.offset[rows, d]
        flat[start[rows] + ndim[rows] + d] = boxes.shape[rows, d]
    return flat


def strides_of(shape: I64) -> I64:
    """Return how many elements apart neighbours are, along each dimension, row-major."""
    strides = np.ones_like(shape)
    for d in reversed(range(shape.shape[1] - 1)):
        strides[:, d] = strides[:, d + 1] * shape[:, d + 1]
    return strides


def are_inside(boxes: Boxes, shape: I64) -> Bools:
    """Tell which boxes have elements, all of them within an array of the shape beside it."""
    offset, extent = boxes.offset, boxes.shape
    inside = (offset >= 0) & (extent >= 1) & (offset <= shape) & (extent <= shape - offset)
    return np.asarray(inside.all(axis=1))


def random_keys(dimensions: int) -> list[tuple[int, int]]:
    """Return new keys for `measure`."""
    keys = [_chance.randrange(1, 1 << 64, 2) for _ in range(2 * dimensions)]
    return list(zip(keys[::2], keys[1::2], strict=True))


def measure(boxes: Boxes, ndim: I64, keys: Sequence[tuple[int, int]]) -> U64:
    """Return the random measure of each box, a number for each lane: (n, lanes).

    Boxes are disjoint and make a whole if and only if the sum of their measures, modulo `PRIME`, is
    that of the whole; but for a chance of about one in 2^60. Every coordinate of every dimension
    has a random number, and the measure of a box is the product, over its dimensions, of (number of
    its end - number of its start). For disjoint boxes that make a whole the sums are equal
    identically; for any others they differ as polynomials, and polynomials that differ are seldom
    equal at random places (Schwartz-Zippel lemma). Linear in the number of boxes, where comparing
    them with each other is not.

    Args:
        ndim: of each box; what it was filled up with does not count.
        keys: of each dimension; the same for all that is compared.
    """
    prime = np.uint64(PRIME)
    product = np.ones((len(boxes), LANES), np.uint64)
    for d in range(boxes.shape.shape[1]):
        start, extent = boxes.offset[:, d], boxes.shape[:, d]
        low, high = (_random_numbers(at, *keys[d]) for at in (start, start + extent))
        counts = (ndim > d)[:, None]
        product = np.where(counts, product * ((high + prime - low) % prime) % prime, product)
    return product


def _random_numbers(coordinate: I64, factor: int, summand: int) -> U64:
    """Give each coordinate its numbers, one a lane: (n, lanes)."""
    z = mix(coordinate.astype(np.uint64) * np.uint64(factor) + np.uint64(summand))
    prime = np.uint64(PRIME)
    return np.stack([z >> np.uint64(33), z & prime], axis=1) % prime


def mix(z: U64) -> U64:
    """Spread the bits of numbers, one to one.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014).
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def reach_into(boxes: Boxes, shape: I64, start: I64, end: I64) -> Bools:
    """Tell which runs of elements ``[start, end)`` of arrays hold an element of the box beside it.

    Args:
        boxes: within arrays of ``shape``; neither they nor the runs are empty.
        start, end: in the row-major order of the array.
    """
    strides = strides_of(shape)
    lowest = boxes.offset * strides
    # Of the box, in the dimensions behind d: where its first element lies.
    behind = np.flip(np.cumsum(np.flip(lowest, axis=1), axis=1), axis=1) - lowest
    count = len(start)
    found = np.full(count, -1, np.int64)  # the first element of the box from `start` on
    later = np.full(count, np.iinfo(np.int64).max, np.int64)  # if it has to step on further ahead
    prefix = np.zeros(count, np.int64)
    undecided = np.ones(count, np.bool_)
    for d in range(shape.shape[1]):
        at = start // strides[:, d] % shape[:, d]
        low, high = boxes.offset[:, d], boxes.offset[:, d] + boxes.shape[:, d]
        before, past = undecided & (at < low), undecided & (at >= high)
        found = np.where(before, prefix + lowest[:, d] + behind[:, d], found)
        found = np.where(past, later, found)
        undecided &= ~before & ~past
        steps_on = undecided & (at + 1 < high)
        later = np.where(steps_on, prefix + (at + 1) * strides[:, d] + behind[:, d], later)
        prefix += at * strides[:, d]
    found = np.where(undecided, start, found)
    return np.asarray(found < end)


def row_hashes(columns: I64) -> U64:
    """Return a hash of each row, the same wherever it is computed; equal rows have equal ones."""
    mixed = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        mixed = mix(mixed + column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return mixed
