"""Elements as they are: every payload is the chunk itself."""

from dataclasses import dataclass
from typing import ClassVar

from .base import Block, Independent, Payload, Piece, Relatives

NAME = "raw"


@dataclass(frozen=True, slots=True)
class Raw(Independent):
    """Nothing is lost, and nothing saved: who writes need not wait for what comes of a chunk."""

    name: ClassVar[str] = NAME
    is_plain: ClassVar[bool] = True

    def room(self, block: Block) -> int:
        """Nothing is written beside the elements."""
        return 0

    def encode(
        self, role: str, piece: Piece, known: object, relatives: Relatives, out: int, decoded: int
    ) -> Payload:
        """Return the block itself."""
        block = piece.blocks[role]
        return Payload(block.address, block.size_bytes, 0)


def decode(payload: Payload, block: Block, relatives: Relatives) -> bool:
    """There is no payload but the elements, which nobody decodes."""
    return False
