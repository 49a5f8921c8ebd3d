"""The seam between the engine and the codecs.

A codec turns the elements of a chunk into a payload and back. It may look at its relatives: the
same elements of other tensors of the parameter, as a reader will have them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..layout import ITEM_BYTES

Relatives = Mapping[str, int]  # role (as in `groups`) → address of the decoded elements


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded chunk in memory: ``size_bytes`` at ``address``, stored under ``mode``."""

    address: int
    size_bytes: int
    mode: int


@dataclass(frozen=True, slots=True)
class Block:
    """A chunk's elements in memory, decoded, or to be.

    Attributes:
        row: elements of a row of the shard (of its first dimension).
        column: place of the first element in its row.
    """

    address: int
    elements: int
    dtype: str
    row: int
    column: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return self.elements * ITEM_BYTES[self.dtype]


class Codec(Protocol):
    """What the module of a codec has."""

    NAME: str

    def room(self, block: Block) -> int:
        """Return the bytes that `encode` may write."""

    def encode(self, block: Block, relatives: Relatives, out: int) -> Payload:
        """Encode a block; mode 0 is the block itself.

        Args:
            relatives: of the same unit, coded before.
            out: address of `room` bytes.
        """

    def decode(self, payload: Payload, block: Block, relatives: Relatives) -> bool:
        """Decode to the block; return whether the payload is one that `encode` writes.

        Args:
            relatives: what the payload's mode refers to.
        """
