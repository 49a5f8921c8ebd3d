"""Where things lie: dtypes, paths, boxes, shards, chunks, extents. Pure geometry: no torch, no I/O.

Offsets and shapes count elements; only names that end in ``_bytes`` count bytes. Ranges are half
open.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeVar

Key = str | int | tuple[Literal["list", "tuple"], int]
Path = tuple[Key, ...]
Shape = tuple[int, ...]

# Names and bytes per element; docs/format.md, "Dtypes".
ITEM_BYTES = {
    **{"bool": 1, "f64": 8, "f32": 4, "f16": 2, "bf16": 2},
    **{"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8},
    **{"c32": 4, "c64": 8, "c128": 16},
    **{"f8_e4m3fn": 1, "f8_e5m2": 1, "f8_e4m3fnuz": 1, "f8_e5m2fnuz": 1, "f8_e8m0fnu": 1},
    "f4_e2m1fn_x2": 1,
}


def spanned_bytes(dtype: str, shape: Shape) -> int:
    """Return how many bytes a tensor takes, if a dimension of 0 counts as 1.

    No shape may span more than a memory could, not even that of an empty tensor.
    """
    return prod([n or 1 for n in shape]) * ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Box:
    """An n-dimensional interval: elements ``offset[d] <= i[d] < offset[d] + shape[d]``."""

    offset: Shape
    shape: Shape

    def __str__(self) -> str:
        """Show it as an index: ``[2:5, 0:12]``."""
        ends = (f"{a}:{a + n}" for a, n in zip(self.offset, self.shape, strict=True))
        return f"[{', '.join(ends)}]"

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-dimensional box."""
        return prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common box in the same coordinates, or None when no element is common."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(n > 0 for n in shape) else None

    def relative_to(self, origin: Shape) -> "Box":
        """Return the same box with offsets counted from ``origin``."""
        return Box(tuple(a - b for a, b in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the index that picks this box out of an array."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named global tensor."""

    path: Path
    dtype: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's box of a global tensor."""

    tensor: Tensor
    box: Box

    @property
    def size_bytes(self) -> int:
        """Bytes of the box's elements."""
        return self.box.elements * ITEM_BYTES[self.tensor.dtype]


def size_of(items: "Iterable[Tensor | Shard]") -> int:
    """Return the bytes of all elements of tensors or shards."""
    return sum(item.size_bytes for item in items)


_Item = TypeVar("_Item")


def batches(
    items: Iterable[_Item], bytes_of: Callable[[_Item], int], bytes_max: int
) -> Iterator[list[_Item]]:
    """Join what follows each other as long as it has few bytes; what has more is alone."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        if batch and size + bytes_of(item) > bytes_max:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += bytes_of(item)
    if batch:
        yield batch


# What a tensor is to its parameter, in the order of coding: each may help to code those behind it.
ROLES = ("exp_avg_sq", "exp_avg", "master", "weight")
Group = Mapping[str, int]  # role → index of the tensor, two of them or more, of one shape

HELD_BOXES_MAX = 255  # of one tensor on one rank: a byte tells how many


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``[first, first + elements)`` of a shard, in the row-major order of its box."""

    shard: Shard
    first: int
    elements: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the decoded elements."""
        return self.elements * ITEM_BYTES[self.shard.tensor.dtype]


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[offset, offset + size_bytes)`` of data file ``file`` (its index in the MANIFEST)."""

    file: int
    offset: int
    size_bytes: int


def elements_per_chunk(dtype: str, chunk_elements: int) -> int:
    """Return the chunk length of a dtype: halved for 16-byte elements, to fit 24-bit payloads."""
    return -(-chunk_elements // 2) if ITEM_BYTES[dtype] == 16 else chunk_elements


def chunk_count(shard: Shard, chunk_elements: int) -> int:
    """Return the number of a shard's chunks."""
    return -(-shard.box.elements // elements_per_chunk(shard.tensor.dtype, chunk_elements))


def chunks_of(shard: Shard, chunk_elements: int) -> Iterator[Chunk]:
    """Cut a shard into its chunks, in order."""
    step = elements_per_chunk(shard.tensor.dtype, chunk_elements)
    total = shard.box.elements
    for first in range(0, total, step):
        yield Chunk(shard, first, min(step, total - first))


def chunk_of(shard: Shard, number: int, chunk_elements: int) -> Chunk:
    """Return one of a shard's chunks, counted from 0."""
    step = elements_per_chunk(shard.tensor.dtype, chunk_elements)
    first = number * step
    return Chunk(shard, first, min(step, shard.box.elements - first))


def boxes_of_range(shape: Shape, first: int, elements: int) -> Iterator[tuple[int, Box]]:
    """Cut a run of elements of a row-major array into boxes.

    A run is at most ``2 * (ndim - 1) + 1`` boxes: the ends of rows it begins and ends in, and whole
    rows between (ByteCheckpoint, arXiv 2407.20143, section 3.2, for ZeRO's flat shards).

    Yields:
        (elements of the run before the box, the box), in row-major order.
    """
    done = 0
    while done < elements:
        at, remaining = first + done, elements - done
        box = _largest_box_at(shape, at, remaining)
        yield done, box
        done += box.elements


def _largest_box_at(shape: Shape, at: int, limit: int) -> Box:
    """Return the largest box of consecutive elements that begins at element ``at``."""
    ndim = len(shape)
    index = [0] * ndim
    rest = at
    for d in reversed(range(ndim)):
        rest, index[d] = divmod(rest, shape[d])
    # Grow from the innermost dimension outwards while the inner dimensions are whole.
    row = 1
    extent = [1] * ndim
    for d in reversed(range(ndim)):
        count = min(shape[d] - index[d], limit // row)
        extent[d] = count
        if count < shape[d] or index[d]:
            break
        row *= shape[d]
        if row > limit:
            break
    return Box(tuple(index), tuple(extent))


def tiling_fault(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Say why the boxes do not tile a tensor, or return None when they do."""
    for box in boxes:
        if any(
            a < 0 or n < 1 or a + n > s
            for a, n, s in zip(box.offset, box.shape, shape, strict=True)
        ):
            return f"the box {box} leaves the tensor"
    if _covers_once(boxes, shape):
        return None
    if overlap := first_overlap(boxes[:COMPARED_BOXES_MAX]):
        return f"the boxes {overlap[0]} and {overlap[1]} overlap"
    covered, total = sum(box.elements for box in boxes), prod(shape)
    if covered != total:
        gap = first_gap(shape, boxes) if len(boxes) <= COMPARED_BOXES_MAX else None
        missing = f", none of those in {gap}" if gap else ""
        return f"its shards cover {covered} of {total} elements{missing}"
    return f"its {len(boxes)} shards overlap, and leave a hole"


COMPARED_BOXES_MAX = 1000  # two of so many are compared with each other in about a second
_PRIME = (1 << 61) - 1
_chance = random.Random()  # seeded by the operating system: nobody can tell its numbers before


def _covers_once(boxes: Sequence[Box], shape: Shape) -> bool:
    """Whether boxes that lie within a tensor cover every element of it exactly once.

    Every coordinate of every dimension gets a random number. Then a box is the product, over its
    dimensions, of (number of its end - number of its start), modulo a prime; and the sum over
    disjoint boxes that make a whole is that of the whole, identically. For any other boxes the two
    differ as polynomials, so they are equal by chance only once in 2^55 (Schwartz-Zippel lemma).
    Linear in the number of boxes, where comparing them with each other is not.
    """
    numbers: list[dict[int, int]] = [{} for _ in shape]

    def measure(box: Box) -> int:
        product = 1
        for known, start, n in zip(numbers, box.offset, box.shape, strict=True):
            for at in (start, start + n):
                if at not in known:
                    known[at] = _chance.randrange(_PRIME)
            product = product * (known[start + n] - known[start]) % _PRIME
        return product

    if len(boxes) == 1:
        return boxes[0] == whole(shape)
    return sum(measure(box) for box in boxes) % _PRIME == measure(whole(shape))


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes with a common element, if there are any; none of them is empty."""
    if len(boxes) < 2:
        return None
    if not boxes[0].shape:
        return boxes[0], boxes[1]
    d = max(range(len(boxes[0].shape)), key=lambda d: len({box.offset[d] for box in boxes}))
    opened: list[Box] = []  # along the dimension that tells most boxes apart
    for box in sorted(boxes, key=lambda box: box.offset[d]):
        opened = [other for other in opened if other.offset[d] + other.shape[d] > box.offset[d]]
        for other in opened:
            if box.intersect(other):
                return other, box
        opened.append(box)
    return None


def first_gap(shape: Shape, boxes: Sequence[Box]) -> Box | None:
    """Return a box of a tensor with no element in any of the boxes, if there is one."""
    waiting = [(whole(shape), boxes)]
    while waiting:
        region, near = waiting.pop()
        near = [box for box in near if box.intersect(region)]
        if not near:
            if region.elements:
                return region
            continue
        # What is left of the region beside the first box: a slab on each side of it.
        offset, extent = list(region.offset), list(region.shape)
        for d, (start, n) in enumerate(zip(near[0].offset, near[0].shape, strict=True)):
            low, high = max(start, offset[d]), min(start + n, offset[d] + extent[d])
            for begin, end in ((offset[d], low), (high, offset[d] + extent[d])):
                if begin < end:
                    slab = Box(
                        (*offset[:d], begin, *offset[d + 1 :]),
                        (*extent[:d], end - begin, *extent[d + 1 :]),
                    )
                    waiting.append((slab, near[1:]))
            offset[d], extent[d] = low, high - low
    return None
