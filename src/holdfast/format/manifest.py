"""The manifest: which extents hold which shards. Its presence is the commit.

Knows bytes and columns; reads no file. `Manifest` adds to a table what its readers ask for again
and again.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..errors import CorruptError, HoldfastError
from ..layout import ITEM_BYTES, Box, Shard, elements_per_chunk, tiling_fault
from . import spec
from .names import data_file_name, dotted
from .table import I64, U64, Table, decode_table, encode_table


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checked table with its derived columns.

    Attributes:
        file_names: path of each data file relative to the checkpoint.
        file_first_chunk: global chunk row at which each file begins; one more for the end.
        shard_first_row: global row of each shard's first chunk.
        chunk_start: byte offset of each payload in its file.
        chunk_bytes: payload bytes.
        chunk_gap_start: where the zero gap before the payload begins.
        tensor_shards: for each tensor, the indices of its shards.
        size_bytes: of the MANIFEST itself.
        payload_end: where the payloads of each file end and the gap before its footer begins.
    """

    table: Table
    file_names: tuple[str, ...]
    file_first_chunk: I64
    shard_first_row: I64
    box_start: I64
    chunk_start: I64
    chunk_bytes: I64
    chunk_gap_start: I64
    payload_end: I64
    tensor_shards: tuple[tuple[int, ...], ...]
    size_bytes: int = 0

    def shard(self, index: int) -> Shard:
        """Return shard ``index`` as geometry."""
        start, end = int(self.box_start[index]), int(self.box_start[index + 1])
        numbers = self.table.shard_box[start:end].tolist()
        half = len(numbers) // 2
        tensor = self.table.header.tensors[int(self.table.shard_tensor[index])]
        return Shard(tensor, Box(tuple(numbers[:half]), tuple(numbers[half:])))


def encode_manifest(table: Table) -> bytes:
    """Write a MANIFEST."""
    return encode_table(spec.MANIFEST_MAGIC, table)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check a MANIFEST; a reader never sees one that failed a check.

    Raises:
        CorruptError: the bytes are not a whole MANIFEST of version 1.
        VersionError: a newer holdfast wrote them.
    """
    try:
        return replace(check_table(decode_table(spec.MANIFEST_MAGIC, data)), size_bytes=len(data))
    except HoldfastError as error:
        raise type(error)(f"{where} cannot be read: {error}") from error


def check_table(table: Table) -> Manifest:
    """Check columns against each other and the header; derive what readers need.

    Raises:
        CorruptError: anything of docs/format.md §7 that is about numbers.
    """
    files, shards, chunks = len(table.file_bytes), len(table.shard_tensor), len(table.chunk_offset)
    file_first_chunk = _starts(table.file_chunks)
    _require(file_first_chunk[-1] == chunks, "its files do not hold as many chunks as it has")
    _require(_below(table.shard_tensor, len(table.header.tensors)), "a shard names no tensor")
    _require(_below(table.shard_file, files), "a shard names no file")
    _require(_below(table.file_rank, table.header.world_size), "a file is of no rank")
    order = table.file_rank.astype(np.int64) << 32 | table.file_number
    _require(bool(np.all(np.diff(order) > 0)), "its files are not in order")
    box_start = table.box_starts()
    _require(box_start[-1] == len(table.shard_box), "its boxes do not fit its shards")
    first_row = file_first_chunk[table.shard_file] + table.shard_first_chunk
    ends = first_row + table.shard_chunks
    # Shards ordered by file follow each other row by row, so no chunk is shared or forgotten.
    expected = np.concatenate([[0], ends[:-1]]) if shards else np.zeros(0, np.int64)
    follows = bool(np.all(first_row == expected)) and (ends[-1] if shards else 0) == chunks
    _require(follows, "its shards do not follow each other in its chunks")
    _require(
        bool(np.all(ends <= file_first_chunk[1:][table.shard_file])), "a shard leaves its file"
    )
    chunk_start = table.chunk_offset.astype(np.int64) * spec.SMALL_ALIGN_BYTES
    chunk_bytes = (table.chunk_size_mode & spec.PAYLOAD_BYTES_MAX).astype(np.int64)
    gap_start, payload_end = _check_extents(table, file_first_chunk, chunk_start, chunk_bytes)
    names = zip(table.file_rank.tolist(), table.file_number.tolist(), strict=True)
    manifest = Manifest(
        table,
        tuple(data_file_name(table.header.save_id, rank, number) for rank, number in names),
        file_first_chunk,
        first_row,
        box_start,
        chunk_start,
        chunk_bytes,
        gap_start,
        payload_end,
        _shards_by_tensor(table),
    )
    _check_payload_sizes(manifest)
    return manifest


def check_tiling(manifest: Manifest) -> None:
    """Check that the shards tile every tensor: no gap, no overlap.

    Raises:
        CorruptError: they do not; the text names the tensor.
    """
    for tensor, indices in zip(manifest.table.header.tensors, manifest.tensor_shards, strict=True):
        if fault := tiling_fault(tensor.shape, [manifest.shard(i).box for i in indices]):
            raise CorruptError(f"tensor {dotted(tensor.path)}: {fault}")


def _check_extents(table: Table, file_first_chunk: I64, start: I64, size: I64) -> tuple[I64, I64]:
    """Check that payloads are aligned, lie in their files and do not overlap; find the gaps."""
    files = len(table.file_bytes)
    _require(bool(np.all(table.file_bytes <= spec.DATA_FILE_BYTES_MAX)), "a file passes 256 GiB")
    large = size >= spec.LARGE_PAYLOAD_BYTES
    _require(not np.any(start[large] % spec.LARGE_ALIGN_BYTES), "a large payload is not aligned")
    file_of = np.repeat(np.arange(files), np.diff(file_first_chunk))
    order = np.lexsort((size, start, file_of))
    ends = start + size
    gap_start = np.full(len(start), spec.DATA_HEADER_BYTES, np.int64)
    same_file = file_of[order][1:] == file_of[order][:-1]
    gap_start[order[1:]] = np.where(same_file, ends[order][:-1], spec.DATA_HEADER_BYTES)
    _require(bool(np.all(start >= gap_start)), "payloads overlap")
    _require(bool(np.all(start - gap_start < spec.GAP_BYTES_LIMIT)), "a gap is too long")
    payload_end = np.full(files, spec.DATA_HEADER_BYTES, np.int64)
    np.maximum.at(payload_end, file_of, ends)
    room = table.file_bytes.astype(np.int64) - spec.TRAILER_BYTES
    _require(bool(np.all(payload_end <= room)), "a payload leaves its file")
    return gap_start, payload_end


def _check_payload_sizes(manifest: Manifest) -> None:
    """Check each shard's chunk count and, under raw, each payload's mode and size."""
    table, chunk_elements = manifest.table, manifest.table.header.chunk_elements
    for index, rows in enumerate(table.shard_chunks.tolist()):
        shard = manifest.shard(index)
        what = f"a shard of {dotted(shard.tensor.path)}"
        step = elements_per_chunk(shard.tensor.dtype, chunk_elements)
        box, shape = shard.box, shard.tensor.shape
        inside = all(
            a >= 0 and n >= 1 and a + n <= s
            for a, n, s in zip(box.offset, box.shape, shape, strict=True)
        )
        _require(inside, f"{what} leaves the tensor")
        elements = box.elements
        _require(rows == -(-elements // step), f"{what} has {rows} chunks")
        first = int(manifest.shard_first_row[index])
        item_bytes = ITEM_BYTES[shard.tensor.dtype]
        expected = np.full(rows, step * item_bytes)
        expected[-1] = (elements - (rows - 1) * step) * item_bytes
        # Under raw the mode is 0, so size and mode together are the size.
        found = table.chunk_size_mode[first : first + rows]
        _require(bool(np.all(found == expected)), f"{what} has a payload of another size or mode")


def _shards_by_tensor(table: Table) -> tuple[tuple[int, ...], ...]:
    result: list[list[int]] = [[] for _ in table.header.tensors]
    for index, tensor in enumerate(table.shard_tensor.tolist()):
        result[tensor].append(index)
    return tuple(map(tuple, result))


def _starts(counts: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> I64:
    return np.concatenate([[0], np.cumsum(counts.astype(np.int64))])


def _below(indices: np.ndarray[tuple[int], np.dtype[np.uint32]], limit: int) -> bool:
    return bool(np.all(indices < limit))


def _require(holds: bool | np.bool_, fault: str) -> None:
    if not holds:
        raise CorruptError(fault)


def digest_column(digests: list[bytes]) -> U64:
    """Return 16-byte digests as the (S, 2) column of a table."""
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
