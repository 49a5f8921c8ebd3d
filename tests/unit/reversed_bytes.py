"""A codec as somebody outside of holdfast writes one: the bytes from back to front, deflated."""

import ctypes
import zlib
from dataclasses import dataclass
from typing import ClassVar

from holdfast.codecs.base import Block, Independent, Payload, Piece, Relatives

DEFLATED = 200  # the mode
MODES: dict[int, tuple[str, ...]] = {DEFLATED: ()}  # refers to nothing


@dataclass(frozen=True, slots=True)
class Reversed(Independent):
    """See `holdfast.codecs.base.Codec`."""

    level: int = 6
    name: ClassVar[str] = "reversed"

    def room(self, block: Block) -> int:
        """What is no smaller is not written."""
        return block.size_bytes

    def encode(
        self, role: str, piece: Piece, known: object, relatives: Relatives, out: int, decoded: int
    ) -> Payload:
        """Deflate; or leave the elements where that takes no less."""
        block = piece.blocks[role]
        made = zlib.compress(ctypes.string_at(block.address, block.size_bytes)[::-1], self.level)
        if len(made) >= block.size_bytes:
            return Payload(block.address, block.size_bytes, 0)
        ctypes.memmove(out, made, len(made))
        return Payload(out, len(made), DEFLATED)


def decode(payload: Payload, block: Block, relatives: Relatives) -> bool:
    """Inflate; return whether that gives as many bytes as there are elements."""
    stream = zlib.decompressobj()
    try:
        made = stream.decompress(ctypes.string_at(payload.address, payload.size_bytes))
    except zlib.error:
        return False
    if not stream.eof or len(made) != block.size_bytes:
        return False
    ctypes.memmove(block.address, made[::-1], block.size_bytes)
    return True
