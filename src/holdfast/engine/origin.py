"""Where the elements of shards are when they are written. Knows tensors and memory; no files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from ..boxes import U64
from ..layout import Box, Chunk, Path, Shard, chunk_of, chunks_of
from ..plan.shard_table import ChunkColumns, ShardTable, cut
from ..state.tensors import LocalTensor
from .place import is_row_major
from .stage import Part, copy_chunk, elements_of
from .workspace import bytes_at, settle


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """Where the chunks of some shards are, as long as this is kept; for any thread.

    Attributes:
        first_chunk: of the first shard, among all.
        addresses: of the chunks, in host memory, row-major; 0: they have to be gathered.
        is_staged: whether nobody changes them.
        gather: copies a chunk's elements (its number, an address), row-major, to memory.
    """

    first_chunk: int
    addresses: U64
    is_staged: bool
    gather: Callable[[int, int], None]


class Origin(Protocol):
    """What a save takes the elements of its shards from. For one thread."""

    def part(self, shard: int) -> Part | list[int]:
        """Return what is held of a shard's tensor, or the address of each of its chunks.

        As of `hold`, for any thread.
        """

    def addresses(self, first: int, end: int) -> U64:
        """Return where chunks stand in host memory, row-major; 0: they have to be gathered.

        The addresses hold until the next call.
        """

    def gather(self, chunk: int, address: int) -> None:
        """Copy a chunk's elements, row-major, to memory."""

    def hold(self, first: int, end: int) -> Standing:
        """Return where the chunks of shards are; no shard before these is asked for any more.

        What the computation has asked of devices is done: threads have streams of their own.
        """


class InPool:
    """Chunks that stand in the pool, where nobody changes them."""

    def __init__(self, chunks: ChunkColumns, addresses: U64) -> None:
        self._first, self._addresses = chunks.first, addresses

    def part(self, shard: int) -> list[int]:
        """Return the addresses of a shard's chunks."""
        rows = slice(int(self._first[shard]), int(self._first[shard + 1]))
        found: list[int] = self._addresses[rows].tolist()
        return found

    def addresses(self, first: int, end: int) -> U64:
        """Return where chunks stand."""
        return self._addresses[first:end]

    def gather(self, chunk: int, address: int) -> None:
        """Never called: every chunk has an address."""
        raise AssertionError("a staged chunk has an address")

    def hold(self, first: int, end: int) -> Standing:
        """Return where the chunks of shards stand."""
        start, stop = self._first[[first, end]].tolist()
        return Standing(start, self._addresses[start:stop], True, self.gather)


class LiveTensors:
    """Tensors of the program, which it may change.

    Attributes:
        chunks: of all shards.
        elements: of each shard, in any strides, on any device.
        address: of these; 0 where they do not lie row-major in host memory.
    """

    def __init__(
        self, shards: ShardTable, held: Mapping[Path, LocalTensor], chunk_elements: int
    ) -> None:
        """Look where the elements of every shard are.

        Args:
            held: what this rank holds of each tensor.
        """
        self.shards, self._held, self._chunk_elements = shards, held, chunk_elements
        self.chunks = cut(shards, chunk_elements)
        self._of, self._start = self.chunks.shard, self.chunks.start_bytes
        self._first, self._on_cuda = self.chunks.first, False
        self.elements, self.address = self._find()

    def part(self, shard: int) -> Part:
        """Return what is held of a shard's tensor."""
        if self._on_cuda:
            settle([self.elements[shard]])
        return self._part(self._shard(shard))

    def addresses(self, first: int, end: int) -> U64:
        """Return where chunks are, 0 where their elements do not follow each other there."""
        found = self.address[self._of[first:end]]
        return np.where(found, found + self._start[first:end], found)

    def gather(self, chunk: int, address: int) -> None:
        """Copy a chunk's elements to memory."""
        number = int(self._of[chunk])
        place = chunk - int(np.searchsorted(self._of, number))
        mine = chunk_of(self._shard(number), place, self._chunk_elements)
        copy_chunk(self.elements[number], mine, bytes_at(address, mine.size_bytes))

    def chunks_in(self, shard: int) -> list[Chunk]:
        """Return the chunks of one shard."""
        return list(chunks_of(self._shard(shard), self._chunk_elements))

    def look_again(self) -> None:
        """Look where the elements are now: a storage that grows moves."""
        found = np.array([data.data_ptr() for data in self.elements], np.uint64)
        # At 1 there is no memory either; 0 would say that these have to be gathered.
        self.address = np.where(self.address, np.maximum(found, 1), self.address)

    def hold(self, first: int, end: int) -> Standing:
        """Return where the chunks of shards are, as `addresses` does."""
        if self._on_cuda:
            settle(self.elements[first:end])
        start, stop = self._first[[first, end]].tolist()
        return Standing(start, self.addresses(start, stop), False, self.gather)

    def _shard(self, number: int) -> Shard:
        return self.shards[number : number + 1].shards[0]

    def _part(self, shard: Shard) -> Part:
        parts = self._held[shard.tensor.path].parts
        if len(parts) == 1:
            return parts[0]
        return next(part for part in parts if part[1].intersect(shard.box))

    def _find(self) -> tuple[list[torch.Tensor], U64]:
        tensors, held = self.shards.tensors, self._held
        elements, found, others = list[torch.Tensor](), list[int](), list[int]()
        of, counts = self.shards.tensor.tolist(), self.shards.elements.tolist()
        for number, (index, count) in enumerate(zip(of, counts, strict=True)):
            leaf = held[tensors[index].path]
            data, address = leaf.data, leaf.address
            elements.append(data)
            found.append(address)
            if not address:  # else it is in host memory
                self._on_cuda |= (on_cuda := data.is_cuda)
            if not (address or on_cuda) or data.numel() != count:
                others.append(number)
        for number in others:
            shard = self._shard(number)
            data = elements[number] = elements_of(shard, *self._part(shard))
            found[number] = data.data_ptr() if data.is_cpu and is_row_major(data) else 0
        return elements, np.array(found, np.uint64)


class OnDemand:
    """Elements that somebody gives, shard by shard, when their turn comes."""

    def __init__(
        self,
        shards: ShardTable,
        ask: Callable[[Shard], tuple[torch.Tensor, Box]],
        chunk_elements: int,
    ) -> None:
        """Ask for nothing yet.

        Args:
            ask: returns what is held of a shard's tensor, and which box of it that is. Each shard
                is asked for once in every attempt to write it.
        """
        self._shards, self._ask, self._chunk_elements = shards.shards, ask, chunk_elements
        chunks = cut(shards, chunk_elements)
        self._of, self._start, self._first = chunks.shard, chunks.start_bytes, chunks.first
        self._held: dict[int, torch.Tensor] = {}

    def part(self, shard: int) -> Part:
        """Return what is held of a shard's tensor."""
        data, box = self._ask(self._shards[shard])
        if data.is_cuda:
            settle([data])
        return data, box

    def addresses(self, first: int, end: int) -> U64:
        """Ask for the shards that chunks are of; return where these are, as `LiveTensors` does."""
        standing = self.hold(int(self._of[first]), int(self._of[end - 1]) + 1)
        return standing.addresses[first - standing.first_chunk : end - standing.first_chunk]

    def gather(self, chunk: int, address: int) -> None:
        """Copy a chunk's elements to memory."""
        self._gather(self._held, chunk, address)

    def hold(self, first: int, end: int) -> Standing:
        """Ask for shards, but for those that the last call has asked for; return where these are.

        Elements stay in memory as long as what is returned.
        """
        held = {number: self._held[number] for number in range(first, end) if number in self._held}
        self._held = held
        for number in range(first, end):
            if number not in held:
                shard = self._shards[number]
                held[number] = elements_of(shard, *self._ask(shard))
                if held[number].is_cuda:
                    settle([held[number]])
        at = [
            e.data_ptr() if e.is_cpu and is_row_major(e) else 0
            for e in map(held.__getitem__, range(first, end))
        ]
        start, stop = self._first[[first, end]].tolist()
        found = np.array(at, np.uint64)[self._of[start:stop] - first]
        found = np.where(found, found + self._start[start:stop], found)
        return Standing(start, found, False, partial(self._gather, held))

    def _gather(self, held: Mapping[int, torch.Tensor], chunk: int, address: int) -> None:
        number = int(self._of[chunk])
        place = chunk - int(self._first[number])
        mine = chunk_of(self._shards[number], place, self._chunk_elements)
        copy_chunk(held[number], mine, bytes_at(address, mine.size_bytes))
