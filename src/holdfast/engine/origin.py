"""Where the elements of shards are when they are written. Knows tensors and memory; no files."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from ..boxes import U64
from ..layout import Box, Path, Shard, chunk_of
from ..plan.shard_table import ChunkColumns, ShardTable
from ..state.tensors import LocalTensor
from .stage import Part, copy_chunk, elements_of, is_row_major, part_with
from .workspace import bytes_at


class Origin(Protocol):
    """What a save takes the elements of its shards from. For one thread."""

    def part(self, shard: int) -> Part | list[int]:
        """Return what is held of a shard's tensor, or the address of each of its chunks."""

    def addresses(self, first: int, end: int) -> U64:
        """Return where chunks stand in host memory, row-major; 0: they have to be gathered.

        The addresses hold until the next call.
        """

    def gather(self, chunk: int, address: int) -> None:
        """Copy a chunk's elements, row-major, to memory."""


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


class LiveTensors:
    """Tensors of the program, which it may change."""

    def __init__(
        self, shards: ShardTable, tensors: Mapping[Path, LocalTensor], chunk_elements: int
    ) -> None:
        """Look where the elements of every shard are.

        Args:
            tensors: what this rank holds of each.
        """
        self._shards, self._tensors, self._chunk_elements = shards, tensors, chunk_elements
        self._chunks = shards.chunks(chunk_elements)
        self._of, self._start = self._chunks.shard, self._chunks.start_bytes
        self._addresses = self._find()

    def part(self, shard: int) -> Part:
        """Return what is held of a shard's tensor."""
        return self._part(self._shard(shard))

    def addresses(self, first: int, end: int) -> U64:
        """Return where chunks are, 0 where their elements do not follow each other there."""
        found = self._addresses[self._of[first:end]]
        return np.where(found, found + self._start[first:end], found)

    def gather(self, chunk: int, address: int) -> None:
        """Copy a chunk's elements to memory."""
        number = int(self._of[chunk])
        shard = self._shard(number)
        place = chunk - int(np.searchsorted(self._of, number))
        mine = chunk_of(shard, place, self._chunk_elements)
        elements = elements_of(shard, *self._part(shard))
        copy_chunk(elements, mine, bytes_at(address, mine.size_bytes))

    def _part(self, shard: Shard) -> Part:
        path = shard.tensor.path
        return part_with({path: self._tensors[path].parts}, shard)

    def _shard(self, number: int) -> Shard:
        return self._shards[number : number + 1].shards()[0]

    def _find(self) -> U64:
        tensors, held = self._shards.tensors, self._tensors
        found, others = [], []
        of, counts = self._shards.tensor.tolist(), self._shards.boxes.elements.tolist()
        for number, (index, elements) in enumerate(zip(of, counts, strict=True)):
            leaf = held[tensors[index].path]
            data = leaf.data
            if (
                len(leaf.boxed) > 1
                or data.numel() != elements
                or not data.is_cpu
                or not data.is_contiguous()
                or data.is_conj()
                or data.is_neg()
            ):
                others.append(number)
                found.append(0)
            else:
                found.append(data.data_ptr())
        for number in others:
            shard = self._shard(number)
            data = elements_of(shard, *self._part(shard))
            found[number] = data.data_ptr() if data.is_cpu and is_row_major(data) else 0
        return np.array(found, np.uint64)


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
        self._shards, self._ask, self._chunk_elements = shards.shards(), ask, chunk_elements
        chunks = shards.chunks(chunk_elements)
        self._of, self._start = chunks.shard, chunks.start_bytes
        self._held: dict[int, torch.Tensor] = {}

    def part(self, shard: int) -> Part:
        """Return what is held of a shard's tensor."""
        return self._ask(self._shards[shard])

    def addresses(self, first: int, end: int) -> U64:
        """Ask for the shards that chunks are of; return where these are, as `LiveTensors` does."""
        numbers = self._of[first:end].tolist()
        held = {number: self._held[number] for number in numbers if number in self._held}
        self._held = held
        for number in numbers:
            if number not in held:
                shard = self._shards[number]
                held[number] = elements_of(shard, *self._ask(shard))
        at = {
            number: elements.data_ptr() if elements.is_cpu and is_row_major(elements) else 0
            for number, elements in held.items()
        }
        found = np.array([at[number] for number in numbers], np.uint64)
        return np.where(found, found + self._start[first:end], found)

    def gather(self, chunk: int, address: int) -> None:
        """Copy a chunk's elements to memory."""
        number = int(self._of[chunk])
        place = chunk - int(np.searchsorted(self._of, number))
        mine = chunk_of(self._shards[number], place, self._chunk_elements)
        copy_chunk(self._held[number], mine, bytes_at(address, mine.size_bytes))
