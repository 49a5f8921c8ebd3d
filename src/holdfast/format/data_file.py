"""Header, footer, trailer and seeds of a data file (docs/format.md §4).

Bytes only; reads and writes no file.
"""

import struct
from functools import lru_cache

from .._core import xxh3_64
from ..errors import CorruptError, StateError
from . import spec
from .table import Table, encode_table

_HEADER = struct.Struct("<8sIIII16s16sQ")
_TRAILER = struct.Struct("<QQQ8s")
_SEED_HEAD = struct.Struct("<16sII")
assert _HEADER.size == spec.DATA_HEADER_BYTES
assert _TRAILER.size == spec.TRAILER_BYTES


def chunk_seed(save_id: str, rank: int, number: int, chunk: int) -> int:
    """Return the checksum seed of a chunk: binds the payload to save, file and place."""
    return xxh3_64(seed_head(save_id, rank, number) + chunk.to_bytes(8, "little"))


@lru_cache  # the same for all chunks of a file
def seed_head(save_id: str, rank: int, number: int) -> bytes:
    """Return what the seeds of all chunks of a file begin with."""
    return _SEED_HEAD.pack(bytes.fromhex(save_id), rank, number)


def align_payload(position: int, size_bytes: int, mode: int = spec.MODE_RAW) -> int:
    """Return the first offset at or after ``position`` where such a payload may start."""
    large = mode == spec.MODE_RAW and size_bytes >= spec.LARGE_PAYLOAD_BYTES
    align = spec.LARGE_ALIGN_BYTES if large else spec.SMALL_ALIGN_BYTES
    return -(-position // align) * align


def encode_header(save_id: str, rank: int, number: int) -> bytes:
    """Write the 64 bytes a data file begins with."""
    head = _HEADER.pack(
        spec.DATA_MAGIC, spec.FORMAT_VERSION, rank, number, 0, bytes.fromhex(save_id), bytes(16), 0
    )[:-8]
    return head + struct.pack("<Q", xxh3_64(head))


def check_header(data: bytes, save_id: str, rank: int, number: int) -> None:
    """Check every field of a data file's header.

    Raises:
        CorruptError: a field differs from what the manifest says, or the checksum fails.
    """
    expected = encode_header(save_id, rank, number)
    if data != expected:
        at = next((i for i, (a, b) in enumerate(zip(data, expected, strict=False)) if a != b), 0)
        raise CorruptError(
            f"header: byte {at} differs; found {data.hex()}, expected {expected.hex()}"
        )


def encode_footer(table: Table, footer_offset: int) -> tuple[bytes, int]:
    """Write footer and trailer of the one file of ``table``.

    Returns:
        (footer and trailer, footer checksum).

    Raises:
        StateError: the footer is larger than readers take.
    """
    try:
        footer = encode_table(spec.FOOTER_MAGIC, table)
    except CorruptError as error:
        raise StateError(
            f"a data file cannot be read back: {error}. Nothing was committed; save fewer tensors "
            "or values, or shorter names"
        ) from error
    rank, number = int(table.file_rank[0]), int(table.file_number[0])
    seed = chunk_seed(table.header.save_id, rank, number, spec.FOOTER_CHUNK)
    checksum = xxh3_64(footer, seed)
    trailer = _TRAILER.pack(footer_offset, len(footer), checksum, spec.TRAILER_MAGIC)
    return footer + trailer, checksum


def decode_trailer(data: bytes, file_bytes: int) -> tuple[int, int, int]:
    """Check a trailer against the size of its file.

    Returns:
        (footer offset, footer bytes, footer checksum).

    Raises:
        CorruptError: it does not fit.
    """
    if len(data) != spec.TRAILER_BYTES:
        raise CorruptError(f"trailer: {len(data)} bytes; expected {spec.TRAILER_BYTES}")
    offset, size, checksum, magic = _TRAILER.unpack(data)
    fits = offset + size + spec.TRAILER_BYTES == file_bytes
    if magic != spec.TRAILER_MAGIC or offset % spec.SMALL_ALIGN_BYTES or not fits:
        raise CorruptError(
            f"trailer: footer of {size} bytes at {offset}, magic {magic.hex()}, "
            f"do not fit a file of {file_bytes} bytes"
        )
    return offset, size, checksum
