"""The manifest: which extents hold which shards. Its presence is the commit.

Knows bytes and columns; reads no file. `Manifest` adds to a table what its readers ask for again
and again.
"""

from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from operator import attrgetter

import numpy as np

from .._core import derive_plain, xxh3_128
from ..boxes import Bools, Boxes, chunk_steps, unflatten
from ..errors import HoldfastError
from ..layout import ITEM_BYTES, Box, Shard
from . import spec
from .names import data_file_name
from .rules import Derived, derive_by_columns, whole_boxes
from .signature import Statement
from .table import I64, Table, decode_table, encode_table, unpacked_bytes

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
_CHECKED = attrgetter(
    *("file_bytes", "file_rank", "file_number", "file_chunks"),
    *("shard_tensor", "shard_file", "shard_first_chunk", "shard_chunks", "shard_box"),
    *("chunk_size_mode", "chunk_offset"),
)
_NO_REFERENCES, _NO_BASED = np.zeros(0, np.int64), np.zeros(0, np.bool_)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checked table with its derived columns.

    Attributes:
        file_names: path of each data file relative to the checkpoint.
        chunk_elements, item_bytes: of each tensor.
        file_first_chunk: global chunk row at which each file begins; one more for the end.
        shard_first_row: global row of each shard's first chunk.
        chunk_start: byte offset of each payload in its file.
        chunk_bytes: payload bytes.
        chunk_gap_start: where the zero gap before the payload begins.
        payload_end: where the payloads of each file end and the gap before its footer begins.
        references: row of the chunk that each chunk's payload refers to, or -1; empty: none refers.
        based: whether each chunk refers to the base; empty: none does.
        tensor_order, tensor_first: shards ordered by tensor, and where those of each begin.
        is_cut: whether each tensor is in several shards, as far as that has to be looked at.
        size_bytes: of the MANIFEST itself, when it is unpacked.
        digest: of the bytes of the MANIFEST itself: 32 hexadecimal digits.
        signed: what a trusted key has signed of it, where that was asked for.
    """

    table: Table
    file_names: tuple[str, ...]
    chunk_elements: I64
    item_bytes: I64
    file_first_chunk: I64
    shard_first_row: I64
    box_start: I64
    chunk_start: I64
    chunk_bytes: I64
    chunk_gap_start: I64
    payload_end: I64
    references: I64
    based: Bools
    tensor_order: I64
    tensor_first: I64
    is_cut: Bools
    size_bytes: int = 0
    digest: str = ""
    signed: Statement | None = None

    def shards_of(self, tensor: int) -> I64:
        """Return the indices of a tensor's shards, ascending."""
        return self.tensor_order[self.tensor_first[tensor] : self.tensor_first[tensor + 1]]

    def codec_at(self, row: int) -> str:
        """Return the codec of the tensor that a chunk is of."""
        shard = int(self.shard_first_row.searchsorted(row, "right")) - 1
        return self.table.header.codec(int(self.table.shard_tensor[shard])).name

    def boxes(self, rows: I64, dimensions: int = 0) -> Boxes:
        """Return the boxes of shards, filled up to so many dimensions."""
        ndim = (self.box_start[rows + 1] - self.box_start[rows]) // 2
        return unflatten(self.table.shard_box, self.box_start[rows], ndim, dimensions)

    def whole_boxes(self, tensors: I64) -> tuple[Boxes, I64]:
        """Return the boxes of whole tensors, and their dimensions."""
        return whole_boxes(self.table, tensors)

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
        table = decode_table(spec.MANIFEST_MAGIC, data)
        return check_table(table, unpacked_bytes(data), xxh3_128(data).hex())
    except HoldfastError as error:
        raise type(error)(f"{where} cannot be read: {error}") from error


def check_table(table: Table, size_bytes: int = 0, digest: str = "") -> Manifest:
    """Check columns against each other and the header; derive what readers need.

    One call of the core takes a plain table. Any other, and one in which it finds a fault, is
    checked column by column, which also says what the fault is.

    Args:
        size_bytes, digest: as `Manifest` has them.

    Raises:
        CorruptError: anything of docs/format.md §7 that is about numbers.
    """
    header = table.header
    types = map(ITEM_BYTES.__getitem__, map(_DTYPE, header.tensors))
    item_bytes = np.fromiter(types, np.int64, len(header.tensors))
    chunk_elements = chunk_steps(item_bytes, header.chunk_elements)
    derived = derive_at_once(table, chunk_elements, item_bytes) if header.is_raw else None
    if derived is None:
        derived = derive_by_columns(table, chunk_elements, item_bytes)
    save_ids, numbers = repeat(header.save_id), table.file_number.tolist()
    names = tuple(map(data_file_name, save_ids, table.file_rank.tolist(), numbers))
    return Manifest(table, names, chunk_elements, item_bytes, *derived, size_bytes, digest)


def derive_at_once(table: Table, chunk_elements: I64, item_bytes: I64) -> Derived | None:
    """Check a plain table in one pass; None where it is not plain, or not right.

    Args:
        chunk_elements, item_bytes: of each tensor.
    """
    files, shards, chunks = len(table.file_bytes), len(table.shard_tensor), len(table.chunk_offset)
    shapes = [*map(_SHAPE, table.header.tensors)]
    ndim = np.array([*map(len, shapes)], np.int64)
    shape = np.array([*chain.from_iterable(shapes)], np.int64)
    sizes = (files + 1, files, shards, shards + 1, shards, len(shapes) + 1, chunks, chunks, chunks)
    out, is_cut = np.empty(sum(sizes), np.int64), np.empty(len(shapes), np.bool_)
    tensors, world_size = (item_bytes, chunk_elements, ndim, shape), table.header.world_size
    if not derive_plain(_CHECKED(table), tensors, world_size, out, is_cut):
        return None
    first_chunk, end, first_row, box_start, order, first, start, size, gap_start = [
        out[stop - count : stop] for stop, count in zip(accumulate(sizes), sizes, strict=True)
    ]
    places = first_chunk, first_row, box_start, start, size, gap_start, end
    return Derived(*places, _NO_REFERENCES, _NO_BASED, order, first, is_cut)
