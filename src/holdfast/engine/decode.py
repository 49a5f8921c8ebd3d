"""Payload → bytes of elements. Knows codecs; no tensors, no files."""

from ..codecs.base import Block, Payload, Relatives
from ..codecs.registry import CODECS


def decode(payload: Payload, block: Block, codec: str, relatives: Relatives) -> bool:
    """Decode a checked payload to a block; return whether it can be one of this codec."""
    return CODECS[codec].decode(payload, block, relatives)
