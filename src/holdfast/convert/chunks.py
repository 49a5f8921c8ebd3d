"""A source's tensors as the chunks of a save: read some ahead, in the order in which they go.

Knows sources and memory; no files. An `Origin` (`engine/origin.py`) for payloads that are elements.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from .. import worker
from ..boxes import U64
from ..engine.origin import Standing
from ..layout import ITEM_BYTES, boxes_of_range, elements_per_chunk
from ..options import SLOT_BYTES
from ..plan.shard_table import ShardTable, cut
from .source import Part, Source

BLOCK_BYTES = SLOT_BYTES  # read at once: the largest chunk fits, and so does what is staged at once
BLOCKS = 5  # in memory: what is staged lies in three at most, while two are read


class FromSource:
    """Elements of whole tensors, read from a source. For one thread; close it in the end."""

    def __init__(
        self,
        source: Source,
        shards: ShardTable,
        chunk_elements: int,
        report: Callable[[int], None],
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            shards: of these each is a whole tensor of the source, under any path.
            report: called with the bytes read since the last call.
        """
        self._source, self._shards, self._report = source, shards.shards, report
        self._chunk_elements = chunk_elements
        columns = cut(shards, chunk_elements)
        self._of, self._sizes = columns.shard.tolist(), columns.sizes.tolist()
        self._first = columns.first.tolist()
        self._blocks = _blocks(self._sizes)
        self._memory = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(BLOCKS)]
        self._reading: dict[int, Future[None]] = {}  # by the number of the block
        self._thread = ThreadPoolExecutor(1, "holdfast-import")
        self._reported = 0  # blocks

    def addresses(self, first: int, end: int) -> U64:
        """Return where chunks are; the next call may take that memory again."""
        worker.check()
        starts = self._blocks
        begin = int(np.searchsorted(starts, first, "right")) - 1
        until = int(np.searchsorted(starts, end, "left"))
        for number in [n for n in self._reading if n < begin or n >= begin + BLOCKS]:
            self._reading.pop(number).result()  # of what is written again, too
        for number in range(begin, min(begin + BLOCKS, len(starts) - 1)):
            if number not in self._reading:
                self._reading[number] = self._thread.submit(self._read, number)
        for number in range(begin, until):
            self._reading[number].result()
            if number >= self._reported:
                self._report(sum(self._sizes[starts[number] : starts[number + 1]]))
                self._reported = number + 1
        found = np.empty(end - first, np.uint64)
        for number in range(begin, until):
            at = self._memory[number % BLOCKS].ctypes.data
            for chunk in range(starts[number], starts[number + 1]):
                if first <= chunk < end:
                    found[chunk - first] = at
                at += self._sizes[chunk]
        return found

    def part(self, shard: int) -> list[int]:
        """Never called: what is encoded is asked for otherwise."""
        raise AssertionError("imported tensors are written as they are")

    def gather(self, chunk: int, address: int) -> None:
        """Never called: every chunk has an address."""
        raise AssertionError("a chunk that was read has an address")

    def hold(self, first: int, end: int) -> Standing:
        """Never called, as `part`."""
        raise AssertionError("imported tensors are written as they are")

    def close(self) -> None:
        """Wait for what is being read."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, number: int) -> None:
        memory, at = memoryview(self._memory[number % BLOCKS].data).cast("B"), 0
        parts = list[Part]()
        for chunk in range(self._blocks[number], self._blocks[number + 1]):
            shard = self._shards[self._of[chunk]]
            tensor, item = shard.tensor, ITEM_BYTES[shard.tensor.dtype]
            step = elements_per_chunk(tensor.dtype, self._chunk_elements)
            first = (chunk - self._first[self._of[chunk]]) * step
            for before, box in boxes_of_range(tensor.shape, first, self._sizes[chunk] // item):
                begin = at + before * item
                parts.append(Part(tensor, box, memory[begin : begin + box.elements * item]))
            at += self._sizes[chunk]
        self._source.read_all(parts)


def _blocks(sizes: list[int]) -> list[int]:
    """Return the first chunk of each block, and how many chunks there are."""
    starts, size = [0], 0
    for number, here in enumerate(sizes):
        if size + here > BLOCK_BYTES:
            starts.append(number)
            size = 0
        size += here
    return [*starts, len(sizes)]
