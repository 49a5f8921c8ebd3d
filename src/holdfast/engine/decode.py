"""Payload → bytes of elements. Knows codecs; no tensors, no files."""

from ..codecs.base import Payload
from ..codecs.raw import decode as decode_raw


def decode(payload: Payload) -> int:
    """Return the address of the decoded bytes, which stay valid as long as the payload does."""
    return decode_raw(payload)
