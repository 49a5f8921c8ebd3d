"""Every bit pattern back, in about 80 % of the bytes (docs/codecs.md, "lossless").

Exponents are entropy-coded, those of an optimizer's moments after their rows' and columns' means;
a half-precision weight that is the rounding of its master takes nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from .._core import (
    Elements,
    lossless_bytes_max,
    lossless_decode,
    lossless_encode,
    lossless_encode_difference,
)
from ..errors import OptionError, shown
from ..layout import ITEM_BYTES, ROLES, Group, Tensor
from . import replay
from .base import Block, Payload, Piece, Relatives, check_every
from .groups import find_groups

NAME = "lossless"

_FLOATS = {"f32", "f64", "c32", "c64", "c128"}
_KINDS = dict.fromkeys(_FLOATS, "float") | {"bf16": "bf16", "f16": "f16"}
_NUMBERED = ("", "float", "bf16", "f16")
KINDS = {dtype: _NUMBERED.index(kind) for dtype, kind in _KINDS.items()}  # as the core has them
PARTS = {"c32": 2, "c64": 2, "c128": 2}  # elements of a complex number
_MOMENTS = ("exp_avg", "exp_avg_sq")
_DIFFERENCE = 6
_HAVE_DIFFERENCE = ("f32", "bf16", "f16", "c32", "c64")


@dataclass(frozen=True, slots=True)
class Delta:
    """Lossless delta checkpoints: of each weight, only its change since the previous checkpoint.

    One in ``every`` checkpoints is a full one. Each of the others needs the previous checkpoint,
    its base, which is in the same directory and is kept as long. Each rank keeps a copy of the
    weights that it writes in host memory.

    Attributes:
        every: one in so many checkpoints is a full one; 1: each.
        replay: for checkpoints one step apart: code second moments and weights by repeating Adam's
            step from the base. The copies then hold moments too, 12 bytes a parameter in all.

    Raises:
        OptionError: an invalid option.

    Example:
        ``holdfast.save(state, "runs/a/step-00003000", codec=holdfast.codecs.Delta(every=8))``
    """

    every: int = 16
    replay: bool = False
    name: ClassVar[str] = NAME
    is_lossy: ClassVar[bool] = False
    is_plain: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Reject invalid options."""
        check_every(self.every)
        if type(self.replay) is not bool:
            raise OptionError(f"replay is {shown(self.replay)}; expected True or False")

    @property
    def by_segment(self) -> bool:
        """Whether the core encodes it; what is replayed is coded chunk by chunk."""
        return not self.replay

    @property
    def order(self) -> tuple[str, ...]:
        """What is needed for another tensor comes before it."""
        return replay.ORDER if self.replay else ROLES

    def groups(self, tensors: Sequence[Tensor]) -> tuple[Group, ...]:
        """Find the tensors of each parameter."""
        return find_groups(tensors)

    def keeps(self, role: str, dtype: str, roles: Collection[str]) -> bool:
        """Weights: differences of moments are no smaller, roundings of masters are nothing."""
        is_rounding = role == "weight" and "master" in roles
        if role in _MOMENTS:
            return self.replay and all(moment in roles for moment in _MOMENTS)
        return dtype in _HAVE_DIFFERENCE and not is_rounding

    def room(self, block: Block) -> int:
        """Return the bytes that `encode` may write."""
        return max(room(block), replay.room(block) if self.replay else 0)

    def survey(self, pieces: Sequence[Piece]) -> None:
        """Look at nothing: each chunk says enough of itself."""

    def encode(
        self, role: str, piece: Piece, known: object, relatives: Relatives, out: int, decoded: int
    ) -> Payload:
        """Encode without loss."""
        block = piece.blocks[role]
        if self.replay and (found := replay.encode(role, block, relatives, out)):
            return found
        payload = encode(role, block, relatives, out)
        by_base = payload.mode == _DIFFERENCE
        if self.replay and role == "exp_avg" and not by_base and replay.is_ahead(piece):
            return _encode_difference(block, relatives["base"], out)
        return payload


def room(block: Block) -> int:
    """Return the bytes that `encode` may write."""
    return lossless_bytes_max(elements_of(block))


def encode(role: str, block: Block, relatives: Relatives, out: int) -> Payload:
    """Encode in the mode that a sample of the elements favours.

    Args:
        relatives: of f32: the second moment helps a first one, a master a half-precision weight;
            the base one that has changed little.
        out: address of `room` bytes.
    """
    master, second_moment, base = _needs(relatives)
    if role != "exp_avg":
        second_moment = 0  # which says nothing of weights: not worth a try
    elements = elements_of(block)
    mode, size = lossless_encode(elements, block.address, master, second_moment, base, out)
    return Payload(out if mode else block.address, size, mode)


def _encode_difference(block: Block, base: int, out: int) -> Payload:
    """Encode by the base, even if it takes more: others are coded by that, too."""
    mode, size = lossless_encode_difference(elements_of(block), block.address, base, out)
    return Payload(out if mode else block.address, size, mode)


def decode(payload: Payload, block: Block, relatives: Relatives) -> bool:
    """Decode to the block; return whether the payload is one that `encode` writes."""
    if payload.mode in replay.MODES.values():
        return replay.decode(payload, block, relatives)
    return lossless_decode(
        payload.mode,
        payload.address,
        payload.size_bytes,
        elements_of(block),
        *_needs(relatives),
        block.address,
    )


def _needs(relatives: Relatives) -> tuple[int, int, int]:
    return relatives.get("master", 0), relatives.get("exp_avg_sq", 0), relatives.get("base", 0)


def elements_of(block: Block) -> Elements:
    """Describe a block's elements; complex numbers are two elements of their parts."""
    return _elements(block.dtype, block.elements, block.row, block.column)


@lru_cache
def _elements(dtype: str, elements: int, row: int, column: int) -> Elements:
    parts = PARTS.get(dtype, 1)
    item_bytes, kind = ITEM_BYTES[dtype] // parts, _KINDS.get(dtype, "")
    return Elements(elements * parts, item_bytes, kind, row * parts, column * parts)
