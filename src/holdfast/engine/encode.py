"""Staged bytes → payload. Knows codecs; no tensors, no files."""

from .._core import checksum
from ..codecs.base import Payload
from ..codecs.registry import CODECS
from .stage import Staged


def encode(staged: Staged, codec: str, seed: int) -> tuple[Payload, int]:
    """Encode a chunk.

    Returns:
        (the payload, its checksum under ``seed``).
    """
    payload = CODECS[codec].encode(staged.address, staged.size_bytes)
    if payload.address == staged.address and payload.size_bytes == staged.size_bytes:
        return payload, staged.checksum
    return payload, checksum(payload.address, payload.size_bytes, seed)
