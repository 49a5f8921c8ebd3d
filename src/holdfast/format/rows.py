"""The columns of one data file → its table; those of all → a checkpoint's.

Knows no file system and no torch.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import xxh3_128
from ..boxes import I64, U64, Boxes, chunk_steps, flatten
from ..errors import CorruptError
from ..layout import ITEM_BYTES
from . import spec
from .header import Header
from .table import Table

Integers = npt.NDArray[np.integer[Any]]


def file_table(
    header: Header,
    rank: int,
    number: int,
    *,
    tensor: I64,
    boxes: Boxes,
    digests: U64,
    counts: Integers,
    checksums: U64,
    size_modes: Integers,
    offsets: Integers,
) -> Table:
    """Return the table of one data file; size and checksum of the file are 0 still.

    Args:
        header: that of the checkpoint; tensors without a shard here, and objects, are left out.
        tensor: index of each shard's tensor in that header.
        counts: chunks of each shard.
        offsets: of each payload in the file, in bytes.
    """
    kept, own = np.unique(tensor, return_inverse=True)
    part = header.part(kept.tolist())
    ndim = np.array([len(t.shape) for t in part.tensors] or [0], np.int64)[own]
    count = counts.astype(np.uint32)
    return Table(
        header=part,
        file_bytes=np.zeros(1, np.uint64),
        file_footer_checksum=np.zeros(1, np.uint64),
        file_rank=np.array([rank], np.uint32),
        file_number=np.array([number], np.uint32),
        file_chunks=np.array([len(offsets)], np.uint32),
        shard_digest=digests,
        shard_box=flatten(boxes, ndim),
        shard_tensor=own.astype(np.uint32),
        shard_file=np.zeros(len(tensor), np.uint32),
        shard_first_chunk=np.cumsum(count, dtype=np.uint32) - count,
        shard_chunks=count,
        chunk_checksum=checksums,
        chunk_size_mode=size_modes.astype(np.uint32),
        chunk_offset=(offsets // spec.SMALL_ALIGN_BYTES).astype(np.uint32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """What all ranks were to write, as columns: the boxes of each behind those of the one before.

    Attributes:
        tensor: index of each box's tensor.
        first: where the boxes of each rank begin, and the end of the last.
    """

    tensor: I64
    boxes: Boxes
    first: I64


# What a rank tells of its data files: (field, dtype, which count). Names and boxes are known.
_TOLD = (
    *(("file_bytes", "<u8", "F"), ("file_footer_checksum", "<u8", "F")),
    *(("shard_digest", "<u8", "S"), ("chunk_checksum", "<u8", "C")),
    *(("file_number", "<u4", "F"), ("file_chunks", "<u4", "F"), ("file_shards", "<u4", "F")),
    *(("chunk_size_mode", "<u4", "C"), ("chunk_offset", "<u4", "C")),
)
_COUNTS = struct.Struct("<QQQ16s")  # files, shards, chunks, digest of the boxes


def encode_written(tables: Sequence[Table]) -> bytes:
    """Write what the coordinator does not know yet of one rank's data files."""
    columns = {}
    for name in (*map(itemgetter(0), _TOLD), "shard_box"):
        if name != "file_shards":
            columns[name] = np.concatenate([*map(attrgetter(name), tables)] or [np.zeros(0)])
    columns["file_shards"] = np.array([*map(len, map(attrgetter("shard_tensor"), tables))])
    return encode_columns(columns, columns.pop("shard_box"))


def encode_columns(columns: Mapping[str, npt.NDArray[Any]], boxes: npt.NDArray[Any]) -> bytes:
    """Write columns as `join_written` reads them.

    Args:
        boxes: offset and shape of each shard, as they stand in the footers.
    """
    counts = map(len, map(columns.__getitem__, ("file_bytes", "shard_digest", "chunk_offset")))
    digest = xxh3_128(boxes.astype("<i8").tobytes())
    parts = [columns[name].astype(dtype).tobytes() for name, dtype, _ in _TOLD]
    return b"".join([_COUNTS.pack(*counts, digest), *parts])


def join_written(header: Header, planned: Planned, written: Sequence[bytes]) -> Table:
    """Make the table of a checkpoint, ordered as docs/format.md §5.

    Args:
        written: the `encode_written` of every rank.

    Raises:
        CorruptError: a rank wrote other boxes than were planned.
    """
    ndim = np.array([len(tensor.shape) for tensor in header.tensors], np.int64)[planned.tensor]
    ends = np.concatenate([[0], np.cumsum(2 * ndim)])[planned.first]
    numbers = flatten(planned.boxes, ndim)
    told = [_decode_written(data) for data in written]
    for rank, (boxes, columns) in enumerate(told):
        expected = xxh3_128(numbers[ends[rank] : ends[rank + 1]].astype("<i8").tobytes())
        if boxes != expected or columns["file_shards"].sum() != np.diff(planned.first)[rank]:
            raise CorruptError(f"rank {rank} wrote other boxes than were planned")
    column, of_rank = {}, [columns for _, columns in told]
    for name, dtype, _ in _TOLD:
        column[name] = np.concatenate([*map(itemgetter(name), of_rank)] or [np.zeros(0, dtype)])
    item_bytes = np.array([ITEM_BYTES[t.dtype] for t in header.tensors], np.int64)
    step = chunk_steps(item_bytes, header.chunk_elements)[planned.tensor]
    chunks = -(-planned.boxes.elements // step)
    files = np.repeat(np.arange(len(column["file_shards"])), column["file_shards"])
    file_first = np.cumsum(column["file_chunks"], dtype=np.int64) - column["file_chunks"]
    counts = [*map(len, map(itemgetter("file_bytes"), of_rank))]
    return Table(
        header=header,
        file_bytes=column["file_bytes"],
        file_footer_checksum=column["file_footer_checksum"],
        file_rank=np.repeat(np.arange(len(told), dtype="<u4"), counts),
        file_number=column["file_number"],
        file_chunks=column["file_chunks"],
        shard_digest=column["shard_digest"].reshape(-1, 2),
        shard_box=numbers,
        shard_tensor=planned.tensor.astype("<u4"),
        shard_file=files.astype("<u4"),
        shard_first_chunk=(np.cumsum(chunks) - chunks - file_first[files]).astype("<u4"),
        shard_chunks=chunks.astype("<u4"),
        chunk_checksum=column["chunk_checksum"],
        chunk_size_mode=column["chunk_size_mode"],
        chunk_offset=column["chunk_offset"],
    )


def _decode_written(data: bytes) -> tuple[bytes, dict[str, np.ndarray]]:
    files, shards, chunks, boxes = _COUNTS.unpack_from(data)
    rows = {"F": files, "S": 2 * shards, "C": chunks}  # a digest is two numbers
    at, columns = _COUNTS.size, {}
    for name, dtype, count in _TOLD:
        columns[name] = np.frombuffer(data, dtype, rows[count], at)
        at += columns[name].nbytes
    return boxes, columns
