"""The SIGNATURE of a checkpoint: docs/format.md §8 in code. Knows bytes; no keys and no files."""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._core import xxh3_128
from ..errors import CorruptError
from . import spec

_HEAD = struct.Struct("<8s2I32s32s")
_CHUNK = np.dtype(f"V{spec.SIGNED_DIGEST_BYTES}")


@dataclass(frozen=True, slots=True)
class Statement:
    """What is signed: BLAKE3 digests of everything that a load takes from a checkpoint.

    Attributes:
        manifest: of the MANIFEST.
        base: of the statement about the base; zeros where there is none.
        payloads: of each chunk's, by row.
    """

    manifest: bytes
    base: bytes
    payloads: "npt.NDArray[np.void]"

    def encode(self) -> bytes:
        """Return the bytes that are signed."""
        head = _HEAD.pack(spec.SIGNATURE_MAGIC, spec.SIGNATURE_VERSION, 0, self.manifest, self.base)
        return head + self.payloads.tobytes()


@dataclass(frozen=True, slots=True)
class Signature:
    """A statement with the key that signed it and what it signed it with, none of it checked."""

    statement: Statement
    signed: bytes  # the statement as it stands in the file
    key: bytes
    signature: bytes


def statement_of(manifest: bytes, base: bytes, payloads: list[bytes]) -> Statement:
    """Make a statement of digests."""
    return Statement(manifest, base, np.frombuffer(b"".join(payloads), _CHUNK))


def encode_signature(statement: bytes, key: bytes, signature: bytes) -> bytes:
    """Return the file."""
    content = statement + key + signature
    return content + xxh3_128(content)


def decode_signature(data: bytes) -> Signature:
    """Take the file apart; its digest tells damage, but nothing of who wrote it.

    Raises:
        CorruptError: it is not a whole SIGNATURE of version 1.
    """
    tail = spec.PUBLIC_KEY_BYTES + spec.SIGNATURE_BYTES + spec.TABLE_CHECKSUM_BYTES
    listed = len(data) - _HEAD.size - tail
    if listed < 0 or listed % spec.SIGNED_DIGEST_BYTES:
        raise CorruptError(f"{len(data)} bytes are not a SIGNATURE")
    content = data[: -spec.TABLE_CHECKSUM_BYTES]
    if xxh3_128(content) != data[-spec.TABLE_CHECKSUM_BYTES :]:
        raise CorruptError("its digest does not match its bytes: it was damaged")
    magic, version, zero, manifest, base = _HEAD.unpack_from(content)
    if (magic, version, zero) != (spec.SIGNATURE_MAGIC, spec.SIGNATURE_VERSION, 0):
        raise CorruptError(
            f"it begins with {content[:16].hex()}; this holdfast reads SIGNATUREs of version "
            f"{spec.SIGNATURE_VERSION}"
        )
    end = _HEAD.size + listed
    payloads = np.frombuffer(content, _CHUNK, listed // spec.SIGNED_DIGEST_BYTES, _HEAD.size)
    key = content[end : end + spec.PUBLIC_KEY_BYTES]
    signed, signature = content[:end], content[end + spec.PUBLIC_KEY_BYTES :]
    return Signature(Statement(manifest, base, payloads), signed, key, signature)
