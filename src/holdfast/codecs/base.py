"""The seam between the engine and the codecs.

A codec turns the elements of a chunk into a payload and back. It may look at its relatives: the
same elements of other tensors of the parameter, as a reader will have them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import OptionError
from ..layout import ITEM_BYTES

EVERY_MAX = 65  # a chain may have 64 links below its newest (docs/format.md §6)

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
    """How chunks are coded, and how often a checkpoint stands by itself."""

    @property
    def name(self) -> str:
        """As it stands in a checkpoint."""

    @property
    def every(self) -> int:
        """Of so many checkpoints one needs no other; 1: each."""

    def describe(self) -> dict[str, Any]:
        """Return its options, as values of JSON: all that `registry.make` needs."""

    def keeps(self, role: str, dtype: str, roles: Collection[str]) -> bool:
        """Whether the elements of the base may help to code a tensor, and are to be kept.

        Args:
            roles: of the tensors of its group.
        """

    def room(self, block: Block) -> int:
        """Return the bytes that `encode` may write."""

    def encode(self, block: Block, relatives: Relatives, out: int) -> Payload:
        """Encode a block; mode 0 is the block itself.

        Args:
            relatives: of the same unit, coded before, and "base".
            out: address of `room` bytes.
        """


class Decode(Protocol):
    """What a codec decodes with, whatever its options were."""

    def __call__(self, payload: Payload, block: Block, relatives: Relatives) -> bool:
        """Decode to the block; return whether the payload is one that the codec writes.

        Args:
            relatives: what the payload's mode refers to.
        """


def check_every(every: object) -> None:
    """Check how many checkpoints make a chain.

    Raises:
        OptionError: so many do not.
    """
    if type(every) is not int or not 1 <= every <= EVERY_MAX:
        raise OptionError(
            f"every is {every!r:.40}; expected an integer from 1 to {EVERY_MAX}: of so many "
            "checkpoints one stands by itself"
        )
