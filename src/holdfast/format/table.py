"""The table of docs/format.md §6: bytes ⇄ header and columns. Knows no file system and no torch.

A MANIFEST is a table of all files, a footer is a table of one. What comes out of `decode_table`
has passed every check that one table can be put to.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import xxh3_128
from ..errors import CorruptError, VersionError
from . import spec
from .header import RAW_ONLY, Header, decode_header, encode_header
from .values import path_text

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer[Any]]

_PREAMBLE = struct.Struct("<8sIIQQQQQQQ")
assert _PREAMBLE.size == spec.PREAMBLE_BYTES


_LEVEL = 5  # of zlib: takes a third of the time that 6 does, and as many bytes


@dataclass(frozen=True, slots=True)
class Table:
    """A header and its columns, as docs/format.md §6 names them.

    Attributes:
        shard_digest: (S, 2) little-endian halves of each XXH3-128.
        shard_box: all offsets and shapes, flat; `box_starts` says where each shard's begin.
    """

    header: Header
    file_bytes: U64
    file_footer_checksum: U64
    file_rank: U32
    file_number: U32
    file_chunks: U32
    shard_digest: U64
    shard_box: I64
    shard_tensor: U32
    shard_file: U32
    shard_first_chunk: U32
    shard_chunks: U32
    chunk_checksum: U64
    chunk_size_mode: U32
    chunk_offset: U32

    def box_starts(self) -> I64:
        """Return where each shard's numbers begin in ``shard_box``, and the end of the last."""
        shapes = map(attrgetter("shape"), self.header.tensors)
        ndim = np.fromiter(map(len, shapes), np.int64, len(self.header.tensors))
        return np.concatenate([[0], np.cumsum(2 * ndim[self.shard_tensor])]).astype(np.int64)


# (field, dtype, items per row, which count) in file order.
_COLUMNS = (
    *(("file_bytes", "<u8", 1, "F"), ("file_footer_checksum", "<u8", 1, "F")),
    *(
        ("shard_digest", "<u8", 2, "S"),
        ("shard_box", "<i8", 1, "B"),
        ("chunk_checksum", "<u8", 1, "C"),
    ),
    *(("file_rank", "<u4", 1, "F"), ("file_number", "<u4", 1, "F"), ("file_chunks", "<u4", 1, "F")),
    *(("shard_tensor", "<u4", 1, "S"), ("shard_file", "<u4", 1, "S")),
    *(("shard_first_chunk", "<u4", 1, "S"), ("shard_chunks", "<u4", 1, "S")),
    *(("chunk_size_mode", "<u4", 1, "C"), ("chunk_offset", "<u4", 1, "C")),
)


_NOT_IN_FOOTER = bytes(16)  # ``file_bytes`` and ``file_footer_checksum`` of one file


_ALL = attrgetter(*(name for name, *_ in _COLUMNS))
_DTYPES = [np.dtype(dtype) for _, dtype, *_ in _COLUMNS]
_ROW_BYTES = {
    count: sum(items * int(dtype[-1]) for _, dtype, items, c in _COLUMNS if c == count)
    for count in "FSCB"
}


def encode_table(magic: bytes, table: Table) -> bytes:
    """Write a table as bytes, H128 included."""
    header = encode_header(table.header)
    columns: list[Any] = [*map(np.ascontiguousarray, _ALL(table), _DTYPES)]
    plain = b"".join([header, *columns])
    body = plain if table.header.codecs in RAW_ONLY else _pack(plain)
    counts = (
        len(table.file_bytes),
        len(table.shard_tensor),
        len(table.chunk_offset),
        len(table.shard_box),
    )
    total = spec.PREAMBLE_BYTES + len(body) + spec.TABLE_CHECKSUM_BYTES
    packed = 0 if body is plain else len(body)
    preamble = _PREAMBLE.pack(magic, spec.FORMAT_VERSION, 0, total, len(header), *counts, packed)
    written = preamble + body
    return written + xxh3_128(written)


def decode_table(magic: bytes, data: bytes, likely: Header | None = None) -> Table:
    """Parse and check a table; every check of docs/format.md §7 that needs no other file.

    Args:
        likely: what the header may say: where it does, to the byte, it is not parsed again.

    Raises:
        CorruptError: the bytes are not a whole table of version 1.
        VersionError: a newer holdfast wrote them.
    """
    header_bytes, body_bytes, packed_bytes, counts = _decode_preamble(magic, data)
    end = len(data) - spec.TABLE_CHECKSUM_BYTES
    if xxh3_128(memoryview(data)[:end]) != data[end:]:
        raise CorruptError("its checksum (XXH3-128) does not match its bytes")
    start = spec.PREAMBLE_BYTES
    if packed_bytes:
        data, start = _unpack(data[start : start + packed_bytes], body_bytes), 0
    end = start + header_bytes
    text = data[start:end]
    header = likely if likely and encode_header(likely) == text else decode_header(text)
    columns = {}
    for name, dtype, items, count in _COLUMNS:
        rows = counts[count] * items
        columns[name] = np.frombuffer(data, dtype, rows, end)
        end += rows * int(dtype[-1])
    columns["shard_digest"] = columns["shard_digest"].reshape(-1, 2)
    return Table(header=header, **columns)


def content_digest(table: Table) -> str:
    """Return the digest of what a checkpoint holds, however it is stored: 32 hexadecimal digits."""
    columns = (table.shard_digest, table.shard_box, table.shard_tensor)
    tensors = table.header.tensors
    paths = map(path_text, map(_PATH, tensors))
    shapes = [",".join(map(str, shape)) for shape in map(_SHAPE, tensors)]
    named = map(_NAMED, paths, map(_DTYPE, tensors), shapes)
    text = f"[{','.join(named)}]"
    return xxh3_128(b"".join([*map(_BYTES, columns), text.encode()])).hex()


_PATH, _SHAPE, _DTYPE = attrgetter("path"), attrgetter("shape"), attrgetter("dtype")
_BYTES, _NAMED = methodcaller("tobytes"), '[{},"{}",[{}]]'.format


def renumbered_tensors(tensor: Integers, count: int) -> tuple[Sequence[int], Integers]:
    """Number the tensors of shards anew, without those of which there is none.

    Args:
        tensor: index of each shard's tensor, of ``count``.

    Returns:
        those that are kept, ascending, and the new number of each shard's.
    """
    if len(tensor) == count and (tensor == np.arange(count)).all():
        return range(count), tensor
    kept, own = np.unique(tensor, return_inverse=True)
    return kept.tolist(), own


def footer_of_all(manifest: bytes) -> bytes:
    """Return the footer of a checkpoint's only data file, made from the bytes of its MANIFEST.

    They are the same but for the magic, what only MANIFEST says of the file, and the checksum.

    Args:
        manifest: checked and not packed, of a header without objects and losses.
    """
    header_bytes, *_ = _decode_preamble(spec.MANIFEST_MAGIC, manifest)
    start = spec.PREAMBLE_BYTES + header_bytes
    before = manifest[len(spec.MANIFEST_MAGIC) : start]
    after = manifest[start + len(_NOT_IN_FOOTER) : -spec.TABLE_CHECKSUM_BYTES]
    written = b"".join([spec.FOOTER_MAGIC, before, _NOT_IN_FOOTER, after])
    return written + xxh3_128(written)


def unpacked_bytes(data: bytes) -> int:
    """Return the bytes that a checked table would have if it were not packed."""
    _, body_bytes, _, _ = _decode_preamble(data[: len(spec.MANIFEST_MAGIC)], data)
    return spec.PREAMBLE_BYTES + body_bytes + spec.TABLE_CHECKSUM_BYTES


def _pack(body: bytes) -> bytes:
    """Return the stream of a body with its padding; the body where that is too short."""
    import zlib  # which plain tables need not wait for

    packed = zlib.compress(body, _LEVEL)
    packed += bytes(-len(packed) % 8)
    return packed if len(packed) < len(body) <= spec.PACKED_RATIO_MAX * len(packed) else body


def _unpack(packed: bytes, body_bytes: int) -> bytes:
    """Undo `_pack`; nothing is allocated beyond what was announced."""
    import zlib

    stream = zlib.decompressobj()
    try:
        body = stream.decompress(packed, body_bytes + 1)
    except zlib.error as error:
        raise CorruptError(f"it cannot be unpacked: {error}") from error
    rest = stream.unused_data
    if len(body) != body_bytes or not stream.eof or any(rest) or len(rest) >= 8:
        raise CorruptError(f"it does not unpack to {body_bytes} bytes")
    return body


def _decode_preamble(magic: bytes, data: bytes) -> tuple[int, int, int, dict[str, int]]:
    """Check sizes against each other before anything is read with them.

    Returns:
        (bytes of the JSON header, of the whole body, of the body as it is stored packed or 0,
        the counts of rows).
    """
    if len(data) < spec.PREAMBLE_BYTES + spec.TABLE_CHECKSUM_BYTES:
        raise CorruptError(f"it has {len(data)} bytes, fewer than the smallest table")
    found, version, zero, total, header_bytes, files, shards, chunks, numbers, packed_bytes = (
        _PREAMBLE.unpack_from(data)
    )
    if found != magic:
        raise CorruptError(f"its magic is {found.hex()}; expected {magic.hex()}")
    if version > spec.FORMAT_VERSION:
        raise VersionError(
            f"it has format version {version}; this holdfast reads version {spec.FORMAT_VERSION}. "
            "Upgrade holdfast"
        )
    counts = {"F": files, "S": shards, "C": chunks, "B": numbers}
    body_bytes = header_bytes + files * _ROW_BYTES["F"] + shards * _ROW_BYTES["S"]
    body_bytes += chunks * _ROW_BYTES["C"] + numbers * _ROW_BYTES["B"]
    size = spec.PREAMBLE_BYTES + (packed_bytes or body_bytes) + spec.TABLE_CHECKSUM_BYTES
    if version != spec.FORMAT_VERSION or zero or total != len(data) or size != len(data):
        raise CorruptError(f"its preamble does not fit its {len(data)} bytes")
    if header_bytes % 8 or header_bytes > spec.HEADER_BYTES_MAX:
        raise CorruptError(f"its JSON header takes {header_bytes} bytes")
    if packed_bytes:
        fits = packed_bytes % 8 == 0 and body_bytes <= spec.MANIFEST_BYTES_MAX
        if not fits or not packed_bytes < body_bytes <= spec.PACKED_RATIO_MAX * packed_bytes:
            raise CorruptError(f"it is packed into {packed_bytes} bytes, from {body_bytes}")
    return header_bytes, body_bytes, packed_bytes, counts
