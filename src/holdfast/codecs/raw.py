"""The identity codec: a payload is the chunk's bytes as they are, in place."""

from .base import Block, Payload, Relatives

NAME = "raw"
MODE = 0  # of every codec: a chunk that would grow is stored raw


def room(block: Block) -> int:
    """Return the bytes that `encode` may write."""
    return 0


def encode(block: Block, relatives: Relatives, out: int) -> Payload:
    """Return the elements themselves."""
    return Payload(block.address, block.size_bytes, MODE)


def decode(payload: Payload, block: Block, relatives: Relatives) -> bool:
    """Return False: raw payloads are not decoded, and have no other mode."""
    return False
