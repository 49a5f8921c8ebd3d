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
from ..boxes import I64, U64, Boxes, flatten
from ..errors import CorruptError
from ..layout import ITEM_BYTES, Tensor
from . import spec
from .header import Header
from .manifest import chunk_steps
from .table import Integers, Table, renumbered_tensors


def file_table(
    header: Header,
    rank: int,
    number: int,
    *,
    tensor: I64,
    numbers: I64,
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
        numbers: offset and shape of each shard, flat, as `Table.shard_box` has them.
        counts: chunks of each shard.
        offsets: of each payload in the file, in bytes.
    """
    kept, own = renumbered_tensors(tensor, len(header.tensors))
    part = header.part(kept)
    count = counts.astype(np.uint32)
    return Table(
        header=part,
        file_bytes=np.zeros(1, np.uint64),
        file_footer_checksum=np.zeros(1, np.uint64),
        file_rank=np.array([rank], np.uint32),
        file_number=np.array([number], np.uint32),
        file_chunks=np.array([len(offsets)], np.uint32),
        shard_digest=digests,
        shard_box=numbers,
        shard_tensor=own.astype(np.uint32),
        shard_file=np.zeros(len(tensor), np.uint32),
        shard_first_chunk=count.cumsum(dtype=np.uint32) - count,
        shard_chunks=count,
        chunk_checksum=checksums,
        chunk_size_mode=size_modes.astype(np.uint32),
        chunk_offset=(offsets // spec.SMALL_ALIGN_BYTES).astype(np.uint32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """The shards that all ranks were to write: those of each rank behind those of the one before.

    Attributes:
        tensor: index of each shard's tensor.
        numbers: all offsets and shapes, flat, as `Table.shard_box` has them.
        chunks: of each shard.
        first, first_number: where shards and numbers of each rank begin, and the end of the last.
    """

    tensor: I64
    numbers: I64
    chunks: I64
    first: I64
    first_number: I64


def planned_of(
    tensors: Sequence[Tensor], chunk_elements: int, tensor: I64, boxes: Boxes, first: I64
) -> Planned:
    """Return the shards that all ranks are to write, as columns of a table.

    Args:
        tensors: those of the header.
        tensor: index of each shard's tensor.
        first: where the shards of each rank begin, and the end of the last.
    """
    shapes, dtypes = map(attrgetter("shape"), tensors), map(attrgetter("dtype"), tensors)
    ndim = np.fromiter(map(len, shapes), np.int64, len(tensors))[tensor]
    item_bytes = np.fromiter(map(ITEM_BYTES.__getitem__, dtypes), np.int64, len(tensors))
    step = chunk_steps(item_bytes, chunk_elements)[tensor]
    ends = np.concatenate([[0], np.cumsum(2 * ndim)])
    return Planned(tensor, flatten(boxes, ndim), -(-boxes.elements // step), first, ends[first])


# What a rank tells of its data files: (field, dtype, which count). Names and boxes are known.
_TOLD = (
    *(("file_bytes", "<u8", "F"), ("file_footer_checksum", "<u8", "F")),
    *(("shard_digest", "<u8", "S"), ("chunk_checksum", "<u8", "C")),
    *(("file_number", "<u4", "F"), ("file_chunks", "<u4", "F"), ("file_shards", "<u4", "F")),
    *(("chunk_size_mode", "<u4", "C"), ("chunk_offset", "<u4", "C")),
)
_COUNTS = struct.Struct("<QQQ16s")  # files, shards, chunks, digest of the boxes


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What the coordinator does not know yet of one rank's data files.

    Attributes:
        boxes: digest of offset and shape of each shard, as they stand in the footers.
        columns: by name; files, shards and chunks of all files, one behind the other.
    """

    boxes: bytes
    columns: Mapping[str, npt.NDArray[Any]]


def written_in(tables: Sequence[Table]) -> Written:
    """Take what the coordinator needs from the tables of one rank's data files."""
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, dtype, _ in _TOLD:
        if name == "file_shards":
            column = np.array([*map(len, map(attrgetter("shard_tensor"), tables))])
        elif len(tables) == 1:
            column = getattr(tables[0], name)
        else:
            column = np.concatenate([*map(attrgetter(name), tables)] or [np.zeros(0)])
        columns[name] = column.astype(dtype, copy=False)
    columns["shard_digest"] = columns["shard_digest"].reshape(-1, 2)
    return Written(digest_boxes([*map(attrgetter("shard_box"), tables)]), columns)


def digest_boxes(boxes: Sequence[npt.NDArray[Any]]) -> bytes:
    """Return the digest of offsets and shapes, one behind the other."""
    return xxh3_128(np.concatenate([*boxes, np.zeros(0, np.int64)]).astype("<i8").tobytes())


def encode_written(written: Written) -> bytes:
    """Write it as bytes for the coordinator."""
    columns = written.columns
    counts = map(len, map(columns.__getitem__, ("file_bytes", "shard_digest", "chunk_offset")))
    parts = [columns[name].tobytes() for name, _, _ in _TOLD]
    return b"".join([_COUNTS.pack(*counts, written.boxes), *parts])


def decode_written(data: bytes) -> Written:
    """Read what `encode_written` has written."""
    files, shards, chunks, boxes = _COUNTS.unpack_from(data)
    rows = {"F": files, "S": 2 * shards, "C": chunks}  # a digest is two numbers
    at, columns = _COUNTS.size, {}
    for name, dtype, count in _TOLD:
        columns[name] = np.frombuffer(data, dtype, rows[count], at)
        at += columns[name].nbytes
    columns["shard_digest"] = columns["shard_digest"].reshape(-1, 2)
    return Written(boxes, columns)


def join_written(header: Header, planned: Planned, written: Sequence[Written]) -> Table:
    """Make the table of a checkpoint, ordered as docs/format.md §5.

    Args:
        written: what every rank has written, in rank order.

    Raises:
        CorruptError: a rank wrote other boxes than were planned.
    """
    ends, chunks = planned.first_number, planned.chunks
    for rank, told in enumerate(written):
        expected = digest_boxes([planned.numbers[ends[rank] : ends[rank + 1]]])
        count = planned.first[rank + 1] - planned.first[rank]
        if told.boxes != expected or told.columns["file_shards"].sum() != count:
            raise CorruptError(f"rank {rank} wrote other boxes than were planned")
    column, of_rank = {}, [*map(attrgetter("columns"), written)]
    for name, _, _ in _TOLD:
        parts = [*map(itemgetter(name), of_rank)]
        column[name] = np.concatenate(parts) if len(parts) > 1 else parts[0]
    files = np.arange(len(column["file_shards"])).repeat(column["file_shards"])
    file_first = column["file_chunks"].cumsum(dtype=np.int64) - column["file_chunks"]
    counts = [*map(len, map(itemgetter("file_bytes"), of_rank))]
    return Table(
        header=header,
        file_bytes=column["file_bytes"],
        file_footer_checksum=column["file_footer_checksum"],
        file_rank=np.arange(len(written), dtype="<u4").repeat(counts),
        file_number=column["file_number"],
        file_chunks=column["file_chunks"],
        shard_digest=column["shard_digest"],
        shard_box=planned.numbers,
        shard_tensor=planned.tensor.astype("<u4"),
        shard_file=files.astype("<u4"),
        shard_first_chunk=(chunks.cumsum() - chunks - file_first[files]).astype("<u4"),
        shard_chunks=chunks.astype("<u4"),
        chunk_checksum=column["chunk_checksum"],
        chunk_size_mode=column["chunk_size_mode"],
        chunk_offset=column["chunk_offset"],
    )
