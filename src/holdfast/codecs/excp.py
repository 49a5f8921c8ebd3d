"""Weights as pruned steps from a base, moments pruned, both in 15 values a tensor: lossy.

The algorithm of ExCP (Li et al., "ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum
Joint Shrinking", ICML 2024, arXiv:2406.11257), as its public code has it; docs/codecs.md, "excp".
A unit is surveyed whole, then coded chunk by chunk: the weight, its first moment, the second.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from .._core import (
    ExcpPart,
    ExcpRule,
    ExcpSurvey,
    copy,
    excp_bytes_max,
    excp_decode,
    excp_encode,
    excp_survey,
    measure_loss,
)
from ..errors import OptionError, shown
from ..layout import Group, Tensor
from . import lossless
from .base import Block, Loss, Payload, Piece, Relatives, check_every
from .groups import find_groups

NAME = "excp"
FROM_BASE, OF_FIRST, OF_SECOND = 13, 14, 15  # modes
ORDER = ("master", "weight", "exp_avg", "exp_avg_sq")  # of coding

_MODES = {"exp_avg": OF_FIRST, "exp_avg_sq": OF_SECOND}
_ROLES = {FROM_BASE: "weight", OF_FIRST: "exp_avg", OF_SECOND: "exp_avg_sq"}
_ROUNDED = 5  # the mode of lossless of which a reader makes a half-precision weight

Part = ExcpPart  # addresses of a chunk's tensors: what they are, the base as a reader has it
Survey = ExcpSurvey


@dataclass(frozen=True, slots=True)
class Excp:
    """Lossy delta checkpoints by ExCP: pruned, and quantized to 15 values a tensor.

    The defaults are those of the paper, except where those lose second moments.

    A weight's residual is kept above ``min(cap, alpha / sqrt(mean(v))) * median(|residual|)``. A
    moment is kept where its weight's residual is kept and ``|m| > beta * mean(|m|)``.

    Attributes:
        alpha: factor of the threshold for weights, from 0 to 1e30.
        beta: factor of the threshold for moments, from 0 to 1e30.
        cap: upper bound of the factor for weights: 2.5 in the paper's code, None in its text.
        threshold: "tensor": the mean of v, as in the code; "element": v of each element.
        codebook: "f32"; or "f16", as in the code: second moments below 3e-8 become 0.
        kmeans: "sampled": 25 rounds on 256 elements a centre; "optimal": all elements.
        every: one in so many checkpoints is a full one, and lossless.

    Raises:
        OptionError: an invalid option.

    Example:
        ``checkpointer = holdfast.Checkpointer("runs/b", codec=holdfast.codecs.Excp(every=8))``
    """

    alpha: float = 5e-5
    beta: float = 2.0
    cap: float | None = 2.5
    threshold: Literal["tensor", "element"] = "tensor"
    codebook: Literal["f32", "f16"] = "f32"
    kmeans: Literal["sampled", "optimal"] = "sampled"
    every: int = 16
    name: ClassVar[str] = NAME
    is_lossy: ClassVar[bool] = True
    is_plain: ClassVar[bool] = False
    by_segment: ClassVar[bool] = False
    order: ClassVar[tuple[str, ...]] = ORDER

    def __post_init__(self) -> None:
        """Reject what cannot be."""
        _check_number("alpha", self.alpha)
        _check_number("beta", self.beta)
        if self.cap is not None:
            _check_number("cap", self.cap)
        _check_choice("threshold", self.threshold, ("tensor", "element"))
        _check_choice("codebook", self.codebook, ("f32", "f16"))
        _check_choice("kmeans", self.kmeans, ("sampled", "optimal"))
        check_every(self.every, 2)

    def groups(self, tensors: Sequence[Tensor]) -> tuple[Group, ...]:
        """Find the tensors of each parameter."""
        return find_groups(tensors)

    def keeps(self, role: str, dtype: str, roles: Collection[str]) -> bool:
        """Weights, which are coded as steps from their base."""
        return lossless.Delta().keeps(role, dtype, roles)

    def survey(self, pieces: Sequence[Piece]) -> Survey | None:
        """Find what is kept of a parameter; None where it is to be coded without loss."""
        parts = [part for part in map(_part, pieces) if part is not None]
        return survey(parts, self) if len(parts) == len(pieces) else None

    def room(self, block: Block) -> int:
        """Return the bytes that `encode` may write."""
        return room(block)

    def encode(
        self,
        role: str,
        piece: Piece,
        known: Survey | None,
        relatives: Relatives,
        out: int,
        decoded: int,
    ) -> Payload:
        """Encode what is kept."""
        part = _part(piece) if known is not None else None
        return encode(piece.blocks[role], role, known, part, relatives, out, decoded)

    def rule(self) -> ExcpRule:
        """Return what the native code is told."""
        return ExcpRule(
            self.alpha,
            self.beta,
            math.inf if self.cap is None else self.cap,
            self.threshold == "element",
            self.codebook == "f16",
            self.kmeans == "optimal",
        )


def _full(piece: Piece) -> str:
    return "master" if "master" in piece.blocks else "weight"


def _part(piece: Piece) -> Part | None:
    """Return the addresses of a chunk's tensors; None where one is not there, or not of f32."""
    full, blocks = _full(piece), piece.blocks
    base = piece.bases.get(full, 0)
    found = [blocks[role] for role in (full, "exp_avg", "exp_avg_sq") if role in blocks]
    if not base or len(found) < 3 or any(block.dtype != "f32" for block in found):
        return None
    weight, first, second = (block.address for block in found)
    half = blocks.get("weight") if full == "master" else None
    rounded = half.address if half is not None and half.dtype == "bf16" else 0
    return Part(found[0].elements, weight, base, first, second, rounded)


def _check_number(name: str, value: object) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= 1e30:  # type: ignore[operator]  # it is a number
        raise OptionError(f"{name} of Excp is {shown(value)}; expected a number from 0 to 1e30")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = ", ".join(choices)
        raise OptionError(f"{name} of Excp is {shown(value)}; expected one of {known}")


def survey(parts: Sequence[Part], options: Excp) -> Survey | None:
    """Look at all chunks of a unit, three times over; None if it is to be coded without loss.

    Args:
        parts: all that this rank has of a parameter, in order, as f32. The result is the same
            however it is cut, but for the last bit of a mean.
    """
    found = excp_survey(list(parts), options.rule())
    return found if found.usable else None


def room(block: Block) -> int:
    """Return the bytes that `encode` may write."""
    return max(lossless.room(block), excp_bytes_max(block.elements))


def encode(
    block: Block,
    role: str,
    survey: Survey | None,
    part: Part | None,
    relatives: Relatives,
    out: int,
    decoded: int,
) -> Payload:
    """Encode a block of a unit, whose tensors come in `ORDER`.

    Args:
        survey: of the unit; None codes without loss.
        part: of the chunk.
        relatives: what a reader has decoded: for a weight or master "base"; for "exp_avg" the
            weight or master, and its base as "other_base"; for "exp_avg_sq" "exp_avg"; for a
            half-precision weight its "master".
        out: address of `room` bytes.
        decoded: address where the elements are put that a reader will have; not the base's.
    """
    if survey is not None and part is not None:
        if block.dtype == "bf16" and role == "weight" and survey.rounded:
            payload = Payload(out, 0, _ROUNDED)
            target = Block(decoded, block.elements, block.dtype, block.row, block.column)
            if lossless.decode(payload, target, relatives):
                return payload
        elif block.dtype == "f32":
            size = excp_encode(survey, role, part, *_needs(role, relatives), out, decoded)
            if size:
                base = 0 if role in _MODES else relatives.get("base", 0)
                loss = Loss(*measure_loss(block.address, decoded, base, block.elements))
                return Payload(out, size, _MODES.get(role, FROM_BASE), loss)
    payload = lossless.encode(role, block, relatives, out)
    copy(decoded, block.address, block.size_bytes)
    return payload


def decode(payload: Payload, block: Block, relatives: Relatives) -> bool:
    """Decode to the block, which may be the base; return whether `encode` writes such a payload.

    Args:
        relatives: as of `encode`.
    """
    role = _ROLES.get(payload.mode)
    if role is None:
        return lossless.decode(payload, block, relatives)
    return block.dtype == "f32" and excp_decode(
        role,
        payload.address,
        payload.size_bytes,
        block.elements,
        *_needs(role, relatives),
        block.address,
    )


def _needs(role: str, relatives: Relatives) -> tuple[int, int, int]:
    base = relatives.get("other_base" if role in _MODES else "base", 0)
    weight = relatives.get("master", 0) or relatives.get("weight", 0)
    return base, weight, relatives.get("exp_avg", 0)
