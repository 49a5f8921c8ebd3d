"""The manifest: which extents hold which shards. Its presence is the commit.

Knows bytes and columns; reads no file. `Manifest` adds to a table what its readers ask for again
and again.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import xxh3_128
from ..boxes import (
    LANES,
    PRIME,
    Bools,
    Boxes,
    are_inside,
    measure,
    random_keys,
    spread,
    unflatten,
)
from ..errors import CorruptError, HoldfastError
from ..layout import ITEM_BYTES, Box, Shard, elements_per_chunk, tiling_fault
from . import spec
from .header import Header
from .names import data_file_name, dotted
from .references import NONE, find_based, find_references
from .signature import Statement
from .table import I64, U32, Table, decode_table, encode_table, unpacked_bytes
from .values import encode_path

BLOCK_ROWS = 1 << 16  # looked at in one go: 64 dimensions of that many boxes take 64 MiB


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
        payload_end: where the payloads of each file end and the gap before its footer begins.
        references: row of the chunk that each chunk's payload refers to, or -1; empty: none refers.
        based: whether each chunk refers to the base; empty: none does.
        tensor_order, tensor_first: shards ordered by tensor, and where those of each begin.
        size_bytes: of the MANIFEST itself, when it is unpacked.
        digest: of the bytes of the MANIFEST itself: 32 hexadecimal digits.
        signed: what a trusted key has signed of it, where that was asked for.
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
    references: I64
    based: Bools
    tensor_order: I64
    tensor_first: I64
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
        manifest = check_table(decode_table(spec.MANIFEST_MAGIC, data))
        size_bytes, digest = unpacked_bytes(data), xxh3_128(data).hex()
        return replace(manifest, size_bytes=size_bytes, digest=digest)
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
    references, based = find_references(table, box_start, first_row), find_based(table)
    sizes = table.chunk_size_mode  # with the mode above them: 0 where they are in order
    large = (sizes >= spec.LARGE_PAYLOAD_BYTES) & (sizes <= spec.PAYLOAD_BYTES_MAX)
    unaligned = chunk_start & (spec.LARGE_ALIGN_BYTES - 1) != 0
    _require(not np.any(large & unaligned), "a large payload is not aligned")
    gap_start, payload_end = _check_extents(table, file_first_chunk, chunk_start, chunk_bytes)
    _check_references(references, file_first_chunk, chunk_start, chunk_bytes, gap_start)
    names = zip(table.file_rank.tolist(), table.file_number.tolist(), strict=True)
    for block in _blocks(shards):
        _check_payload_sizes(table, box_start, first_row, block)
    counts = np.bincount(table.shard_tensor, minlength=len(table.header.tensors))
    return Manifest(
        table,
        tuple(data_file_name(table.header.save_id, rank, number) for rank, number in names),
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
    )


def content_digest(table: Table) -> str:
    """Return the digest of what a checkpoint holds, however it is stored: 32 hexadecimal digits."""
    named = [[encode_path(t.path), t.dtype, t.shape] for t in table.header.tensors]
    columns = (table.shard_digest, table.shard_box, table.shard_tensor)
    text = json.dumps(named, ensure_ascii=False, separators=(",", ":"))
    return xxh3_128(b"".join([*(column.tobytes() for column in columns), text.encode()])).hex()


def check_tiling(manifest: Manifest) -> None:
    """Check that the shards tile every tensor: no gap, no overlap.

    Raises:
        CorruptError: they do not; the text names the tensor.
    """
    table, keys = manifest.table, random_keys(spec.DIMENSIONS_MAX)
    found = np.zeros((len(table.header.tensors), LANES), np.uint64)
    for block in _blocks(len(table.shard_tensor)):
        owner, boxes = table.shard_tensor[block], manifest.boxes(block)
        ndim = (manifest.box_start[block + 1] - manifest.box_start[block]) // 2
        for lane, numbers in enumerate(measure(boxes, ndim, keys).T):
            np.add.at(found[:, lane], owner, numbers)
    expected = np.zeros_like(found)
    for block in _blocks(len(expected)):
        whole, ndim = _whole_boxes(table, block)
        expected[block] = measure(whole, ndim, keys)
    differing = (found % np.uint64(PRIME) != expected).any(axis=1)
    for index in np.flatnonzero(differing).tolist():
        tensor = table.header.tensors[index]
        held = [manifest.shard(i).box for i in manifest.shards_of(index).tolist()]
        if fault := tiling_fault(tensor.shape, held):  # pragma: no branch: measures err to one side
            raise CorruptError(f"tensor {dotted(tensor.path)}: {fault}")


def _check_extents(table: Table, file_first_chunk: I64, start: I64, size: I64) -> tuple[I64, I64]:
    """Check that payloads lie in their files and do not overlap; find the gaps.

    Empty ones lie nowhere: their offset is 0.
    """
    empty = size == 0
    if np.any(empty):
        _require(not np.any(start[empty]), "an empty payload has an offset")
        lying = np.flatnonzero(~empty)
        counts = np.bincount(
            np.repeat(np.arange(len(table.file_bytes)), np.diff(file_first_chunk))[lying],
            minlength=len(table.file_bytes),
        )
        gap_start = np.zeros_like(start)
        gap_start[lying], end = _check_extents(table, _starts(counts), start[lying], size[lying])
        return gap_start, end
    files = len(table.file_bytes)
    _require(bool(np.all(table.file_bytes <= spec.DATA_FILE_BYTES_MAX)), "a file passes 256 GiB")
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
    _require(bool(np.all(start >= gap_start)), "payloads overlap")
    _require(bool(np.all(start - gap_start < spec.GAP_BYTES_LIMIT)), "a gap is too long")
    payload_end = np.full(files, spec.DATA_HEADER_BYTES, np.int64)
    filled = np.flatnonzero(np.diff(file_first_chunk))
    payload_end[filled] = ends[file_first_chunk[1:][filled] - 1]
    room = table.file_bytes.astype(np.int64) - spec.TRAILER_BYTES
    _require(bool(np.all(payload_end <= room)), "a payload leaves its file")
    return gap_start, payload_end


def _check_references(
    references: I64, file_first_chunk: I64, start: I64, size: I64, gap_start: I64
) -> None:
    """Check that payloads lie near those they refer to; let empty ones stand where these end."""
    rows = np.flatnonzero(references != NONE)
    needed = references[rows]
    _require(not np.any(size[needed] == 0), "a chunk refers to one of no payload")
    empty = rows[size[rows] == 0]
    start[empty] = gap_start[empty] = (start + size)[references[empty]]
    further = needed
    for _ in range(spec.REFERENCE_DEPTH_MAX):
        further = references[further[further != NONE]]
    _require(bool(np.all(further == NONE)), "a chunk refers to one that refers to others in turn")
    if len(rows):
        # Ranges that overlap are one: what lies in it is read at once.
        low = np.minimum(start[rows], start[needed])
        high = np.maximum(start[rows] + size[rows], start[needed] + size[needed])
        file = np.searchsorted(file_first_chunk, rows, "right") << 40
        order = np.argsort(low + file)
        low, high = (low + file)[order], np.maximum.accumulate((high + file)[order])
        begins = np.flatnonzero(np.concatenate([[True], low[1:] >= high[:-1]]))
        ends = np.concatenate([begins[1:], [len(low)]]) - 1
        near = high[ends] - low[begins] <= spec.REFERENCE_BYTES_MAX
        _require(bool(np.all(near)), "a chunk lies far from the one it refers to")


def _check_payload_sizes(table: Table, box_start: I64, first_row: I64, block: I64) -> None:
    """Check the boxes of shards, their chunk counts, and each payload's mode and size.

    Args:
        block: consecutive shards.
    """
    tensors, chunk_elements = table.header.tensors, table.header.chunk_elements
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
    dtypes = [tensors[index].dtype for index in present.tolist()]
    steps = {dtype: elements_per_chunk(dtype, chunk_elements) for dtype in set(dtypes)}
    step = np.array([steps[dtype] for dtype in dtypes], np.int64)[place]
    item_bytes = np.array([ITEM_BYTES[dtype] for dtype in dtypes], np.int64)[place]
    elements, rows = boxes.elements, table.shard_chunks[block].astype(np.int64)
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
    shapes = [table.header.tensors[index].shape for index in tensors.tolist()]
    ndim = np.fromiter(map(len, shapes), np.int64)
    flat = np.fromiter(chain.from_iterable(shapes), np.int64)
    shape = spread(flat, np.cumsum(ndim) - ndim, ndim, filler=1)
    return Boxes(np.zeros_like(shape), shape), ndim


def _blocks(count: int) -> Iterator[I64]:
    """Cut rows into blocks, whose boxes take little memory whatever their dimensions."""
    for first in range(0, count, BLOCK_ROWS):
        yield np.arange(first, min(first + BLOCK_ROWS, count))


def _starts(counts: "npt.NDArray[np.integer[Any]]") -> I64:
    return np.concatenate([[0], np.cumsum(counts.astype(np.int64))])


def _stable_order(numbers: U32) -> I64:
    """Return the order of numbers, equal ones as they stand."""
    # Number and place in one: several times as fast as a stable sort of places.
    keys = numbers.astype(np.int64) << 32 | np.arange(len(numbers))
    keys.sort()
    return keys & ((1 << 32) - 1)


def _below(indices: np.ndarray[tuple[int], np.dtype[np.uint32]], limit: int) -> bool:
    return bool(np.all(indices < limit))


def _require(holds: bool | np.bool_, fault: str) -> None:
    if not holds:
        raise CorruptError(fault)
