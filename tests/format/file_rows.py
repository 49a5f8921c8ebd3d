"""The rows of one data file, put together one by one, for tests that write files by hand."""

from dataclasses import dataclass, field

import numpy as np

from holdfast.format.header import Header
from holdfast.format.rows import file_table
from holdfast.format.table import Table
from holdfast.layout import Shard


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of a shard stand in the table of its file."""

    shard: int
    first_chunk: int


@dataclass(slots=True)
class FileRows:
    """Shards and chunks of one data file, in file order."""

    rank: int
    number: int
    shards: list[Shard] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    first_chunks: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    size_modes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add_shard(self, shard: Shard, chunks: int) -> Place:
        """Append the row of a shard, and those of its chunks."""
        first = len(self.offsets)
        self.shards.append(shard)
        self.digests.append(bytes(16))
        self.first_chunks.append(first)
        for column in (self.checksums, self.size_modes, self.offsets):
            column += [0] * chunks
        return Place(len(self.shards) - 1, first)

    def set_chunk(self, row: int, size_bytes: int, mode: int, offset: int, checksum: int) -> None:
        """Fill the row of a payload in."""
        self.size_modes[row] = size_bytes | mode << 24
        self.offsets[row] = offset
        self.checksums[row] = checksum

    def set_digest(self, number: int, digest: bytes) -> None:
        """Fill the digest of a shard in."""
        self.digests[number] = digest

    def table(self, header: Header) -> Table:
        """Return the table of this file alone (`file_table`)."""
        index = {tensor.path: number for number, tensor in enumerate(header.tensors)}
        numbers = [n for shard in self.shards for n in (*shard.box.offset, *shard.box.shape)]
        ends = [*self.first_chunks[1:], len(self.offsets)]
        return file_table(
            header,
            self.rank,
            self.number,
            tensor=np.array([index[shard.tensor.path] for shard in self.shards], np.int64),
            numbers=np.array(numbers, np.int64),
            digests=np.frombuffer(b"".join(self.digests), "<u8").reshape(-1, 2),
            counts=np.diff([*self.first_chunks[:1], *ends]),
            checksums=np.array(self.checksums, np.uint64),
            size_modes=np.array(self.size_modes, np.uint32),
            offsets=np.array(self.offsets, np.int64),
        )
