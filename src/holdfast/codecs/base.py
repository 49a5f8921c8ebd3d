"""The seam between the engine and the codecs.

A codec turns the elements of a chunk into a payload and back. It may look at its relatives: the
same elements of other tensors of the parameter, as a reader will have them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..errors import OptionError, shown
from ..layout import ITEM_BYTES, ROLES, Group, Tensor

EVERY_MAX = 65  # a chain may have 64 links below its newest (docs/format.md §6)

Relatives = Mapping[str, int]  # role (as in `groups`) → address of the decoded elements


@dataclass(frozen=True, slots=True)
class Loss:
    """What decoding loses.

    Attributes:
        squared_error: sum of the squares of the errors.
        largest_error: of any element.
        energy: sum of the squares of what was coded: the difference from the base, or the moments.
            0 where nothing is lost.

    Example::

        loss = holdfast.open("runs/a/step-00001000").info("model.weight").loss
        print(loss.largest_error if loss else "exact")
    """

    squared_error: float = 0.0
    largest_error: float = 0.0
    energy: float = 0.0

    def __add__(self, other: "Loss") -> "Loss":
        """Return the loss of the elements of both."""
        return Loss(
            self.squared_error + other.squared_error,
            max(self.largest_error, other.largest_error),
            self.energy + other.energy,
        )


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded chunk in memory: ``size_bytes`` at ``address``, stored under ``mode``."""

    address: int
    size_bytes: int
    mode: int
    loss: Loss | None = None


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


@dataclass(frozen=True, slots=True)
class Piece:
    """The same elements of the tensors of a parameter.

    Attributes:
        name: of the parameter, as people see it.
        blocks: by role.
        bases: by role, the address of the elements that a reader has of the base, where known.
    """

    name: str
    blocks: Mapping[str, Block]
    bases: Mapping[str, int]


class Codec(Protocol):
    """How chunks are coded, and how often a checkpoint stands by itself: a frozen dataclass.

    Its fields are its options, values of JSON, with which each rank makes it again.

    One that is lossy decodes what `lossless` encodes too: a chunk that it cannot code, and a
    checkpoint that stands by itself, are stored so, under its name.
    """

    @property
    def name(self) -> str:
        """As it stands in a checkpoint."""

    @property
    def every(self) -> int:
        """Of so many checkpoints one needs no other; 1: each."""

    @property
    def is_lossy(self) -> bool:
        """Whether what is decoded may differ; those that need no other are lossless anyway."""

    @property
    def is_plain(self) -> bool:
        """Whether every payload is the elements: each has its place before one is made."""

    @property
    def by_segment(self) -> bool:
        """Whether the core encodes many chunks by one call, as `lossless` would."""

    @property
    def order(self) -> Sequence[str]:
        """The roles of a parameter's tensors, as they are coded one after the other."""

    def groups(self, tensors: Sequence[Tensor]) -> tuple[Group, ...]:
        """Find the tensors that help to code each other (`groups.find_groups`)."""

    def keeps(self, role: str, dtype: str, roles: Collection[str]) -> bool:
        """Whether the elements of the base may help to code a tensor, and are to be kept.

        Args:
            roles: of the tensors of its group.
        """

    def survey(self, pieces: Sequence[Piece]) -> object:
        """Look at all chunks of a parameter before the first is coded.

        Returns:
            what `encode` is to know of it; None where nothing is.
        """

    def room(self, block: Block) -> int:
        """Return the bytes that `encode` may write."""

    def encode(
        self, role: str, piece: Piece, known: Any, relatives: Relatives, out: int, decoded: int
    ) -> Payload:
        """Encode a block of a piece; mode 0 is the block itself.

        Args:
            known: what `survey` returned.
            relatives: what a reader has: of the roles coded before; "base" of the same tensor;
                "other_base" of the weight, or master, for a first moment, and of that for a second
                one; for weights "replayed_exp_avg" where the second moment was replayed from it.
            out: address of `room` bytes.
            decoded: where a codec with loss puts what a reader will have.
        """


class Decode(Protocol):
    """What a codec decodes with, whatever its options were."""

    def __call__(self, payload: Payload, block: Block, relatives: Relatives) -> bool:
        """Decode to the block; return whether the payload is one that the codec writes.

        Args:
            relatives: what the payload's mode refers to.
        """


def check_every(every: object, least: int = 1) -> None:
    """Check how many checkpoints make a chain.

    Raises:
        OptionError: so many do not.
    """
    if type(every) is not int or not least <= every <= EVERY_MAX:
        raise OptionError(
            f"every is {shown(every)}; expected an integer from {least} to {EVERY_MAX}: one in so "
            "many checkpoints is a full one"
        )


class Independent:
    """The common part of codecs that code each chunk by itself. A codec may inherit it.

    It needs no other tensor and no base, and loses nothing.
    """

    every: ClassVar[int] = 1
    is_lossy: ClassVar[bool] = False
    is_plain: ClassVar[bool] = False
    by_segment: ClassVar[bool] = False
    order: ClassVar[tuple[str, ...]] = ROLES

    def groups(self, tensors: Sequence[Tensor]) -> tuple[Group, ...]:
        """No tensor helps another."""
        return ()

    def keeps(self, role: str, dtype: str, roles: Collection[str]) -> bool:
        """Nothing of a base is kept."""
        return False

    def survey(self, pieces: Sequence[Piece]) -> None:
        """Nothing is looked at before the first chunk is coded."""
