"""The identity codec: a payload is the chunk's bytes as they are, in place."""

from .base import Payload

NAME = "raw"
_MODE = 0


def encode(address: int, size_bytes: int) -> Payload:
    """Return the payload of ``size_bytes`` decoded bytes at ``address``: themselves."""
    return Payload(address, size_bytes, _MODE)


def decode(payload: Payload) -> int:
    """Return the address of the decoded bytes: the payload's own."""
    return payload.address
