"""The shards that one rank writes, as columns. Pure; knows no torch, no files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

import numpy as np

from ..boxes import I64, U64, Bools, Boxes, flatten, unflatten
from ..cached import cached_property
from ..format.manifest import chunk_steps
from ..layout import ITEM_BYTES, Box, Shard, Tensor

CUT_MAX = 8  # tables whose chunks are kept


@dataclass(frozen=True, eq=False)
class ShardTable:
    """Shards in the order in which they are written.

    Attributes:
        tensors: those that a checkpoint's header lists.
        tensor: index of each shard's tensor.
        boxes: of each shard.
    """

    tensors: tuple[Tensor, ...]
    tensor: I64
    boxes: Boxes

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.shards)

    def __getitem__(self, rows: slice | Bools) -> "ShardTable":
        return ShardTable(self.tensors, self.tensor[rows], self.boxes[rows])

    @cached_property
    def item_bytes(self) -> I64:
        """Bytes of an element of each."""
        items = [*map(ITEM_BYTES.__getitem__, map(attrgetter("dtype"), self.tensors))]
        return np.array(items, np.int64)[self.tensor]

    @cached_property
    def ndim(self) -> I64:
        """Dimensions of each."""
        return np.array([*map(len, map(attrgetter("shape"), self.tensors))], np.int64)[self.tensor]

    @cached_property
    def name_bytes(self) -> I64:
        """Bytes of each tensor's path, as Python shows it."""
        names = [*map(len, map(repr, map(attrgetter("path"), self.tensors)))]
        return np.array(names, np.int64)[self.tensor]

    @cached_property
    def elements(self) -> I64:
        """Elements of each."""
        return self.boxes.elements

    @cached_property
    def numbers(self) -> I64:
        """Offset and shape of each, flat."""
        return flatten(self.boxes, self.ndim)

    @cached_property
    def first_number(self) -> I64:
        """Where the numbers of each begin, and the end of the last."""
        return np.concatenate([[0], np.cumsum(2 * self.ndim)])

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all."""
        return int((self.elements * self.item_bytes).sum())

    @cached_property
    def shards(self) -> list[Shard]:
        """Each by itself."""
        columns = self.tensor.tolist(), self.boxes.offset.tolist(), self.boxes.shape.tolist()
        result = []
        for index, offset, shape in zip(*columns, strict=True):
            tensor = self.tensors[index]
            ndim = len(tensor.shape)
            result.append(Shard(tensor, Box(tuple(offset[:ndim]), tuple(shape[:ndim]))))
        return result


@dataclass(frozen=True, eq=False)
class ChunkColumns:
    """The chunks of shards.

    Attributes:
        counts: chunks of each shard.
        sizes: bytes of each chunk, decoded.
    """

    counts: U64
    sizes: U64

    @cached_property
    def shard(self) -> I64:
        """Which shard each chunk is of."""
        return np.repeat(np.arange(len(self.counts)), self.counts.astype(np.int64))

    @cached_property
    def first(self) -> I64:
        """The first chunk of each shard, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.counts.astype(np.int64))])

    @cached_property
    def start_bytes(self) -> U64:
        """Bytes of the chunks of the same shard before each."""
        before = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.uint64)
        first = np.repeat(self.first[:-1], self.counts.astype(np.int64))
        return before[:-1] - before[first]


@lru_cache(maxsize=CUT_MAX)  # the same shards are saved again and again
def cut(shards: ShardTable, chunk_elements: int) -> ChunkColumns:
    """Cut all into chunks (`layout.chunks_of`)."""
    item_bytes, elements = shards.item_bytes, shards.elements
    step = chunk_steps(item_bytes, chunk_elements)
    counts = -(-elements // step)
    sizes = np.repeat(step * item_bytes, counts)
    some = np.flatnonzero(counts)
    rest = (elements - (counts - 1) * step) * item_bytes
    sizes[np.cumsum(counts)[some] - 1] = rest[some]
    return ChunkColumns(counts.astype(np.uint64), sizes.astype(np.uint64))


def table_of(shards: Sequence[Shard], tensors: Sequence[Tensor]) -> ShardTable:
    """Return shards as columns.

    Args:
        tensors: those that the header lists.
    """
    index = {tensor.path: number for number, tensor in enumerate(tensors)}
    tensor = np.array([index[shard.tensor.path] for shard in shards], np.int64)
    flat = np.array([n for s in shards for n in (*s.box.offset, *s.box.shape)], np.int64)
    ndim = np.array([len(shard.box.shape) for shard in shards], np.int64)
    return ShardTable(tuple(tensors), tensor, unflatten(flat, np.cumsum(2 * ndim) - 2 * ndim, ndim))
