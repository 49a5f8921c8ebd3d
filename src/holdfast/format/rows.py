"""The rows of one data file while it is written → its table. Knows no file system and no torch."""

from dataclasses import dataclass, field, replace

import numpy as np

from ..layout import Path, Shard
from . import spec
from .table import Header, Table


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

    def add_chunk(self, size_bytes: int, mode: int, offset: int, checksum: int) -> None:
        """Append the row of one payload."""
        self.size_modes.append(size_bytes | mode << 24)
        self.offsets.append(offset // spec.SMALL_ALIGN_BYTES)
        self.checksums.append(checksum)

    def add_shard(self, shard: Shard, digest: bytes, first_chunk: int) -> None:
        """Append the row of a shard whose chunks have all been added."""
        self.shards.append(shard)
        self.digests.append(digest)
        self.first_chunks.append(first_chunk)

    def table(self, header: Header) -> Table:
        """Return the table of this file alone; sizes and checksum of the file are 0 still.

        Args:
            header: that of the checkpoint; tensors without a shard here, and objects, are left out.
        """
        present = {shard.tensor.path for shard in self.shards}
        tensors = tuple(t for t in header.tensors if t.path in present)
        index = {tensor.path: i for i, tensor in enumerate(tensors)}
        ties = tuple(
            (path, index[header.tensors[i].path])
            for path, i in header.ties
            if header.tensors[i].path in index
        )
        own = replace(header, tensors=tensors, ties=ties, objects=())
        boxes = [n for shard in self.shards for n in (*shard.box.offset, *shard.box.shape)]
        ends = [*self.first_chunks[1:], len(self.offsets)]
        counts = [end - first for end, first in zip(ends, self.first_chunks, strict=True)]
        return Table(
            header=own,
            file_bytes=np.zeros(1, np.uint64),
            file_footer_checksum=np.zeros(1, np.uint64),
            file_rank=np.array([self.rank], np.uint32),
            file_number=np.array([self.number], np.uint32),
            file_chunks=np.array([len(self.offsets)], np.uint32),
            shard_digest=np.frombuffer(b"".join(self.digests), "<u8").reshape(-1, 2),
            shard_box=np.array(boxes, np.int64),
            shard_tensor=np.array([index[s.tensor.path] for s in self.shards], np.uint32),
            shard_file=np.zeros(len(self.shards), np.uint32),
            shard_first_chunk=np.array(self.first_chunks, np.uint32),
            shard_chunks=np.array(counts, np.uint32),
            chunk_checksum=np.array(self.checksums, np.uint64),
            chunk_size_mode=np.array(self.size_modes, np.uint32),
            chunk_offset=np.array(self.offsets, np.uint32),
        )


def join_tables(header: Header, tables: list[Table]) -> Table:
    """Join the tables of single files into that of a checkpoint, ordered as docs/format.md §5."""
    tables = sorted(tables, key=lambda t: (int(t.file_rank[0]), int(t.file_number[0])))
    index: dict[Path, int] = {tensor.path: i for i, tensor in enumerate(header.tensors)}

    def column(name: str, dtype: str) -> np.ndarray:
        parts = [getattr(table, name) for table in tables]
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

    tensor_parts = [
        np.array([index[t.path] for t in table.header.tensors], np.uint32)[table.shard_tensor]
        for table in tables
    ]
    file_parts = [np.full(len(t.shard_tensor), i, np.uint32) for i, t in enumerate(tables)]
    nothing = np.zeros(0, np.uint32)
    return Table(
        header=header,
        file_bytes=column("file_bytes", "<u8"),
        file_footer_checksum=column("file_footer_checksum", "<u8"),
        file_rank=column("file_rank", "<u4"),
        file_number=column("file_number", "<u4"),
        file_chunks=column("file_chunks", "<u4"),
        shard_digest=column("shard_digest", "<u8").reshape(-1, 2),
        shard_box=column("shard_box", "<i8"),
        shard_tensor=np.concatenate(tensor_parts) if tensor_parts else nothing,
        shard_file=np.concatenate(file_parts) if file_parts else nothing,
        shard_first_chunk=column("shard_first_chunk", "<u4"),
        shard_chunks=column("shard_chunks", "<u4"),
        chunk_checksum=column("chunk_checksum", "<u8"),
        chunk_size_mode=column("chunk_size_mode", "<u4"),
        chunk_offset=column("chunk_offset", "<u4"),
    )
