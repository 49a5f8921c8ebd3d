"""Payload → bytes of elements. Knows codecs; no tensors, no files."""

from ctypes import string_at

from .._core import copy_and_hash_chunk
from ..codecs.base import Block, Payload, Relatives
from ..format import spec
from .registry import DECODE


def decode(payload: Payload, block: Block, codec: str, relatives: Relatives) -> bool:
    """Decode a checked payload to a block; return whether it can be one of this codec."""
    if payload.mode == spec.MODE_UNCHANGED:
        return _take_over(payload, block, relatives[spec.BASE])
    return DECODE[codec](payload, block, relatives)


def _take_over(payload: Payload, block: Block, base: int) -> bool:
    """Copy the base's elements, of which the payload is the digest."""
    _, digest = copy_and_hash_chunk(block.address, base, block.size_bytes, 0)
    return string_at(payload.address, payload.size_bytes) == digest
