"""The manifest: which extents hold which shards. Its presence is the commit.

Knows bytes and columns; reads no file. `Manifest` adds to a table what its readers ask for again
and again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import derive_plain, xxh3_128
from ..boxes import Bools, Boxes, are_inside, spread, unflatten
from ..errors import CorruptError, HoldfastError
from ..layout import ITEM_BYTES, Box, Shard
from . import spec
from .header import Header
from .names import data_file_name, dotted
from .references import check_references, find_based, find_references
from .signature import Statement
from .table import I64, U32, Table, decode_table, encode_table, unpacked_bytes

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
_CHECKED = attrgetter(
    *("file_bytes", "file_rank", "file_number", "file_chunks"),
    *("shard_tensor", "shard_file", "shard_first_chunk", "shard_chunks", "shard_box"),
    *("chunk_size_mode", "chunk_offset"),
)
# Where chunks lie: what the core takes of a `Manifest`, to say what is read and to place it.
CHUNKS = attrgetter("file_first_chunk", "chunk_start", "chunk_bytes", "chunk_gap_start")
BLOCK_ROWS = 1 << 16  # looked at in one go: 64 dimensions of that many boxes take 64 MiB
# Of `Manifest`, from ``chunk_elements`` to ``is_cut``.
Derived = tuple[I64, I64, I64, I64, I64, I64, I64, I64, I64, I64, Bools, I64, I64, Bools]
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
        data: those bytes, where it names one data file; else empty.
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
    data: bytes = field(default=b"", repr=False, compare=False)
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
        return _whole_boxes(self.table, tensors)

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
        return check_table(table, unpacked_bytes(data), xxh3_128(data).hex(), data)
    except HoldfastError as error:
        raise type(error)(f"{where} cannot be read: {error}") from error


def chunk_steps(item_bytes: I64, chunk_elements: int) -> I64:
    """Return the chunk lengths of many dtypes (`layout.elements_per_chunk`)."""
    return np.where(item_bytes == 16, -(-chunk_elements // 2), chunk_elements)


def check_table(table: Table, size_bytes: int = 0, digest: str = "", data: bytes = b"") -> Manifest:
    """Check columns against each other and the header; derive what readers need.

    One call of the core takes a plain table. Any other, and one in which it finds a fault, is
    checked column by column, which also says what the fault is.

    Args:
        size_bytes, digest, data: as `Manifest` has them.

    Raises:
        CorruptError: anything of docs/format.md §7 that is about numbers.
    """
    header = table.header
    item_bytes = [*map(ITEM_BYTES.__getitem__, map(_DTYPE, header.tensors))]
    derived = derive_at_once(table, item_bytes)
    if derived is None:
        derived = derive_by_columns(table, np.array(item_bytes, np.int64))
    save_ids, numbers = repeat(header.save_id), table.file_number.tolist()
    names = tuple(map(data_file_name, save_ids, table.file_rank.tolist(), numbers))
    data = data if len(names) == 1 else b""
    return Manifest(table, names, *derived, size_bytes, digest, data)


def derive_at_once(table: Table, item_bytes: list[int]) -> Derived | None:
    """Check a plain table in one pass; None where it is not plain, or not right.

    Args:
        item_bytes: of each tensor.
    """
    files, shards, chunks = len(table.file_bytes), len(table.shard_tensor), len(table.chunk_offset)
    shapes, header, count = [*map(_SHAPE, table.header.tensors)], table.header, len(item_bytes)
    of_shards = files + 1, files, shards, shards + 1, shards, count + 1
    sizes = (count, count, *of_shards, chunks, chunks, chunks)
    out, is_cut = np.empty(sum(sizes), np.int64), np.empty(count, np.bool_)
    tensors = item_bytes, shapes, header.chunk_elements
    if not derive_plain(_CHECKED(table), *tensors, header.world_size, out, is_cut):
        return None
    steps, items, first_chunk, end, first_row, box_start, order, first, start, size, gap_start = [
        out[stop - count : stop] for stop, count in zip(accumulate(sizes), sizes, strict=True)
    ]
    places = steps, items, first_chunk, first_row, box_start, start, size, gap_start, end
    return *places, _NO_REFERENCES, _NO_BASED, order, first, is_cut


def derive_by_columns(table: Table, item_bytes: I64) -> Derived:
    """Check columns against each other and the header; derive what readers need.

    Args:
        item_bytes: of each tensor.

    Raises:
        CorruptError: anything of docs/format.md §7 that is about numbers.
    """
    file_first_chunk, box_start, first_row = _check_rows(table)
    chunk_elements = chunk_steps(item_bytes, table.header.chunk_elements)
    chunk_start = table.chunk_offset.astype(np.int64) * spec.SMALL_ALIGN_BYTES
    chunk_bytes = (table.chunk_size_mode & spec.PAYLOAD_BYTES_MAX).astype(np.int64)
    references, based = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    if np.any(table.chunk_size_mode > spec.PAYLOAD_BYTES_MAX):  # only a mode tells of another
        references, based = find_references(table, box_start, first_row), find_based(table)
    sizes = table.chunk_size_mode  # with the mode above them: 0 where they are in order
    large = (sizes >= spec.LARGE_PAYLOAD_BYTES) & (sizes <= spec.PAYLOAD_BYTES_MAX)
    unaligned = chunk_start & (spec.LARGE_ALIGN_BYTES - 1) != 0
    _require((not np.any(large & unaligned), "a large payload is not aligned"))
    gap_start, payload_end = _check_extents(table, file_first_chunk, chunk_start, chunk_bytes)
    if len(references):
        check_references(references, file_first_chunk, chunk_start, chunk_bytes, gap_start)
    whole = np.zeros(len(first_row), np.bool_)
    for block in blocks(len(first_row)):
        whole[block] = _check_payload_sizes(
            table, box_start, first_row, block, chunk_elements, item_bytes
        )
    counts = np.bincount(table.shard_tensor, minlength=len(table.header.tensors))
    is_cut = counts != 1
    is_cut[table.shard_tensor[~whole]] = True
    return (
        chunk_elements,
        item_bytes,
        file_first_chunk,
        first_row,
        box_start,
        chunk_start,
        chunk_bytes,
        gap_start,
        payload_end,
        references,
        based,
        _stable_order(table.shard_tensor),
        _starts(counts),
        is_cut,
    )


def _check_rows(table: Table) -> tuple[I64, I64, I64]:
    """Check that files, shards and chunks follow each other.

    Returns:
        ``file_first_chunk``, ``box_start`` and ``shard_first_row`` of `Manifest`.
    """
    files, shards, chunks = len(table.file_bytes), len(table.shard_tensor), len(table.chunk_offset)
    file_first_chunk = _starts(table.file_chunks)
    tensors = len(table.header.tensors)
    order = table.file_rank.astype(np.int64) << 32 | table.file_number
    _require(
        (file_first_chunk[-1] == chunks, "its files do not hold as many chunks as it has"),
        ((table.shard_tensor < tensors).all(), "a shard names no tensor"),
        ((table.shard_file < files).all(), "a shard names no file"),
        ((table.file_rank < table.header.world_size).all(), "a file is of no rank"),
        ((order[1:] > order[:-1]).all(), "its files are not in order"),
    )
    box_start = table.box_starts()
    first_row = file_first_chunk[table.shard_file] + table.shard_first_chunk
    ends = first_row + table.shard_chunks
    # Shards ordered by file follow each other row by row, so no chunk is shared or forgotten.
    expected = np.concatenate([[0], ends[:-1]]) if shards else np.zeros(0, np.int64)
    follows = bool(np.all(first_row == expected)) and (ends[-1] if shards else 0) == chunks
    _require(
        (box_start[-1] == len(table.shard_box), "its boxes do not fit its shards"),
        (follows, "its shards do not follow each other in its chunks"),
        ((ends <= file_first_chunk[1:][table.shard_file]).all(), "a shard leaves its file"),
    )
    return file_first_chunk, box_start, first_row


def _check_extents(table: Table, file_first_chunk: I64, start: I64, size: I64) -> tuple[I64, I64]:
    """Check that payloads lie in their files and do not overlap; find the gaps.

    Empty ones lie nowhere: their offset is 0.
    """
    empty = size == 0
    if np.any(empty):
        _require((not np.any(start[empty]), "an empty payload has an offset"))
        lying = np.flatnonzero(~empty)
        counts = np.bincount(
            np.repeat(np.arange(len(table.file_bytes)), np.diff(file_first_chunk))[lying],
            minlength=len(table.file_bytes),
        )
        gap_start = np.zeros_like(start)
        gap_start[lying], end = _check_extents(table, _starts(counts), start[lying], size[lying])
        return gap_start, end
    files = len(table.file_bytes)
    file_of = np.repeat(np.arange(files), np.diff(file_first_chunk))
    same_file = file_of[1:] == file_of[:-1]
    order: I64 | slice = slice(None)
    if not np.all(~same_file | (start[1:] > start[:-1])):
        # Of each file by itself, so the files stay where they are. Two payloads that begin at one
        # place overlap in either order.
        order = np.argsort(file_of << 32 | start // spec.SMALL_ALIGN_BYTES)
    ends = (start + size)[order]
    gaps = np.full(len(start), spec.DATA_HEADER_BYTES, np.int64)
    np.copyto(gaps[1:], ends[:-1], where=same_file)
    gap_start = np.empty_like(gaps)
    gap_start[order] = gaps
    payload_end = np.full(files, spec.DATA_HEADER_BYTES, np.int64)
    filled = np.flatnonzero(np.diff(file_first_chunk))
    payload_end[filled] = ends[file_first_chunk[1:][filled] - 1]
    room = table.file_bytes.astype(np.int64) - spec.TRAILER_BYTES
    _require(
        ((table.file_bytes <= spec.DATA_FILE_BYTES_MAX).all(), "a file passes 256 GiB"),
        ((start >= gap_start).all(), "payloads overlap"),
        ((start - gap_start < spec.GAP_BYTES_LIMIT).all(), "a gap is too long"),
        ((payload_end <= room).all(), "a payload leaves its file"),
    )
    return gap_start, payload_end


def _check_payload_sizes(
    table: Table,
    box_start: I64,
    first_row: I64,
    block: I64,
    chunk_elements: I64,
    item_bytes: I64,
) -> Bools:
    """Check the boxes of shards, their chunk counts, and each payload's mode and size.

    Args:
        block: consecutive shards.
        chunk_elements, item_bytes: as `Manifest` has them.

    Returns:
        Which shards are all of their tensors.
    """
    tensors = table.header.tensors
    owner = table.shard_tensor[block].astype(np.int64)
    ndim = (box_start[block + 1] - box_start[block]) // 2

    def require(holds: Bools, fault: Callable[[int], str]) -> None:
        if not np.all(holds):
            first = int(np.argmin(holds))
            raise CorruptError(f"a shard of {dotted(tensors[owner[first]].path)} {fault(first)}")

    seen = np.zeros(len(tensors), np.bool_)
    seen[owner] = True
    present, place = np.flatnonzero(seen), (np.cumsum(seen) - 1)[owner]
    boxes, whole = unflatten(table.shard_box, box_start[block], ndim), _whole_boxes(table, present)
    # A gather of rows would lay the numbers of a box, not of a dimension, side by side.
    shape = whole[0].shape.T.take(place, axis=1).T
    require(are_inside(boxes, shape), lambda _: "leaves the tensor")
    step, item_bytes = chunk_elements[owner], item_bytes[owner]
    elements, rows = (
        boxes.shape.prod(axis=1, dtype=np.int64),
        table.shard_chunks[block].astype(np.int64),
    )
    require(rows == -(-elements // step), lambda first: f"has {rows[first]} chunks")
    # Of mode 0, so size and mode together are the size.
    expected = np.repeat(step * item_bytes, rows)
    ends = np.cumsum(rows)
    expected[ends - 1] = (elements - (rows - 1) * step) * item_bytes
    start = int(first_row[block[0]])
    found = table.chunk_size_mode[start : start + len(expected)]
    right = expected == found
    if not np.all(right):
        right |= _is_coded(table.header, found, expected, np.repeat(owner, rows))
    if not np.all(right):
        wrong = int(np.searchsorted(ends, int(np.argmin(right)), "right"))
        require(np.arange(len(rows)) != wrong, lambda _: "has a payload of another size or mode")
    return np.asarray((boxes.shape == shape).all(axis=1))


def _is_coded(header: Header, found: U32, decoded_bytes: I64, tensor: I64) -> Bools:
    """Whether the payloads are of modes of their codecs, and of sizes that can be."""
    known = np.zeros((len(header.codecs), 256), np.bool_)
    for number, codec in enumerate(header.codecs):
        known[number, list(spec.MODES[codec.name])] = True
    mode, size = found >> np.uint32(24), found & np.uint32(spec.PAYLOAD_BYTES_MAX)
    codec_of = np.array(header.codec_of or [0] * len(header.tensors), np.int64)[tensor]
    fits = (size < decoded_bytes) & ((size == 0) == (mode == spec.MODE_ROUNDED))
    return np.asarray(known[codec_of, mode] & fits)


def _whole_boxes(table: Table, tensors: I64) -> tuple[Boxes, I64]:
    """Return the boxes of whole tensors, and their dimensions."""
    shapes = list(map(_SHAPE, map(table.header.tensors.__getitem__, tensors.tolist())))
    ndim = np.fromiter(map(len, shapes), np.int64)
    flat = np.fromiter(chain.from_iterable(shapes), np.int64)
    shape = spread(flat, np.cumsum(ndim) - ndim, ndim, filler=1)
    return Boxes(np.zeros_like(shape), shape), ndim


def blocks(count: int) -> Iterable[I64]:
    """Cut rows into blocks, whose boxes take little memory whatever their dimensions."""
    return np.split(np.arange(count), range(BLOCK_ROWS, count, BLOCK_ROWS)) if count else ()


def _starts(counts: "npt.NDArray[np.integer[Any]]") -> I64:
    return np.concatenate([[0], np.cumsum(counts.astype(np.int64))])


def _stable_order(numbers: U32) -> I64:
    """Return the order of numbers, equal ones as they stand."""
    # Number and place in one: several times as fast as a stable sort of places.
    keys = numbers.astype(np.int64) << 32 | np.arange(len(numbers))
    keys.sort()
    return keys & ((1 << 32) - 1)


def _require(*rules: tuple[bool | np.bool_, str]) -> None:
    for holds, fault in rules:
        if not holds:
            raise CorruptError(fault)
