"""Elements as they are: every payload is the chunk itself."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..layout import ROLES, Group, Tensor
from .base import Block, Payload, Piece, Relatives

NAME = "raw"


@dataclass(frozen=True, slots=True)
class Raw:
    """Nothing is lost, and nothing saved: who writes need not wait for what comes of a chunk."""

    name: ClassVar[str] = NAME
    every: ClassVar[int] = 1
    is_lossy: ClassVar[bool] = False
    is_plain: ClassVar[bool] = True
    by_segment: ClassVar[bool] = False
    order: ClassVar[tuple[str, ...]] = ROLES

    def groups(self, tensors: Sequence[Tensor]) -> tuple[Group, ...]:
        """No tensor helps another."""
        return ()

    def keeps(self, role: str, dtype: str, roles: Collection[str]) -> bool:
        """Nothing of a base."""
        return False

    def survey(self, pieces: Sequence[Piece]) -> None:
        """Look at nothing."""

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
