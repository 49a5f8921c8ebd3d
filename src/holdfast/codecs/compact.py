"""Lossy: weights as steps from a base, AdamW's moments by their means (docs/codecs.md, "compact").

Pure; knows no chain of checkpoints: what a block refers to is handed in, decoded.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, get_args

from .._core import (
    compact_bytes_max,
    compact_decode,
    compact_means,
    compact_moment,
    compact_steps,
    copy,
)
from ..errors import OptionError, shown
from ..layout import ROLES, Group, Tensor
from . import lossless
from .base import Block, Loss, Payload, Piece, Relatives, check_every
from .groups import find_groups
from .lossless import elements_of

NAME = "compact"
LOSSLESS = "lossless"
MODES = (8, 10, 11, 12, 17)

Quality = Literal["high", "balanced", "small", "tiny"]

# In root mean squares of the scaled residual; the first moment of those without a step is dropped.
_WEIGHT_STEPS = {"high": 0.8, "balanced": 1.6, "small": 2.0, "tiny": 2.5}
_MOMENT_STEPS = {"high": 1.5}
_DROPPED = 0.0
_LARGEST = 3.4e38  # of f32


@dataclass(frozen=True, slots=True)
class Compact:
    """Lossy delta checkpoints: a bound for the error of weights and moments.

    At most one of ``rel``, ``abs``, ``bits`` and ``bf16_exact`` bounds the weights in place of
    ``quality``. A chunk that exceeds its bound is stored without loss.

    Attributes:
        quality: "high", "balanced", "small" or "tiny": weights and moments take some 23, 83, 113
            or 173 times less than in f32. All but "high" drop the first moment: keep the step
            counter.
        rel: squared error, relative to the energy of the difference from the base; above 0, at
            most 1.
        abs: largest error of an element, above 0.
        bits: approximate number of bits for an element, above 0, at most 6.
        bf16_exact: f32 weights round to the same bf16 values as before, so a forward pass in bf16
            is the same to the bit. Tensors of other dtypes are exact.
        residual: keep each element of the second moment within a factor of two, down to 2^-40 of
            the largest in its chunk. None: with "high" only.
        overrides: a quality, or "lossless", for parameters whose names match a pattern, such as
            ``{"*.norm.*": "lossless"}``. The first match counts.
        every: one in so many checkpoints is a full one, and lossless.

    Raises:
        OptionError: an invalid option.

    Example:
        ``codec = holdfast.codecs.Compact("high", overrides={"*.norm.*": "lossless"}, every=8)``
    """

    quality: Quality = "balanced"
    rel: float | None = None
    abs: float | None = None
    bits: float | None = None
    bf16_exact: bool = False
    residual: bool | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    every: int = 16
    name: ClassVar[str] = NAME
    is_lossy: ClassVar[bool] = True
    is_plain: ClassVar[bool] = False
    by_segment: ClassVar[bool] = False
    order: ClassVar[tuple[str, ...]] = ROLES

    def __post_init__(self) -> None:
        """Reject invalid options."""
        if self.quality not in get_args(Quality):
            known = ", ".join(get_args(Quality))
            raise OptionError(f"quality is {shown(self.quality)}; expected one of {known}")
        if type(self.bf16_exact) is not bool:
            raise OptionError(f"bf16_exact is {shown(self.bf16_exact)}; expected True or False")
        if self.residual is not None and type(self.residual) is not bool:
            raise OptionError(f"residual is {shown(self.residual)}; expected True, False or None")
        given = [name for name in ("rel", "abs", "bits") if getattr(self, name) is not None]
        given += ["bf16_exact"] if self.bf16_exact else []
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} are given; expected at most one of them")
        for name, most in (("rel", 1.0), ("abs", _LARGEST), ("bits", 6.0)):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value <= most):
                raise OptionError(
                    f"{name} is {shown(value)}; expected a number above 0, at most {most:g}"
                )
        patterns = self.overrides if isinstance(self.overrides, Mapping) else None
        if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
            raise OptionError(
                f"overrides is {self.overrides!r:.60}; expected a dict from patterns of names to "
                'qualities, such as {"*.norm.*": "lossless"}'
            )
        for pattern, choice in self.overrides.items():
            if choice not in (LOSSLESS, *get_args(Quality)):
                known = ", ".join((LOSSLESS, *get_args(Quality)))
                raise OptionError(
                    f"overrides[{shown(pattern)}] is {shown(choice)}; expected one of {known}"
                )
        check_every(self.every, 2)

    def groups(self, tensors: Sequence[Tensor]) -> tuple[Group, ...]:
        """Find the tensors of each parameter."""
        return find_groups(tensors)

    def keeps(self, role: str, dtype: str, roles: Collection[str]) -> bool:
        """Weights, which are coded as steps from their base."""
        return lossless.Delta().keeps(role, dtype, roles)

    def survey(self, pieces: Sequence[Piece]) -> None:
        """Look at nothing: each chunk says enough of itself."""

    def room(self, block: Block) -> int:
        """Return the bytes that `encode` may write."""
        return max(room(block), lossless.room(block))

    def encode(
        self, role: str, piece: Piece, known: object, relatives: Relatives, out: int, decoded: int
    ) -> Payload:
        """Encode what belongs to a parameter with moments; all else without loss."""
        block, quality = piece.blocks[role], self._quality(piece.name)
        rounds = role == "weight" and "master" in piece.blocks
        coded = "exp_avg_sq" in piece.blocks and block.dtype in ("f32", "bf16", "f16")
        if quality == LOSSLESS or not coded:
            copy(decoded, block.address, block.size_bytes)
            return lossless.encode(role, block, relatives, out)
        near = dict(relatives)
        if rounds:
            near["exact_master"] = piece.blocks["master"].address
        chosen = replace(self, quality=quality)
        payload, loss = encode(block, near, out, decoded, role=role, options=chosen)
        return replace(payload, loss=loss)

    def _quality(self, name: str) -> Any:
        fits = (choice for pattern, choice in self.overrides.items() if fnmatchcase(name, pattern))
        return next(fits, self.quality)

    @property
    def bound(self) -> tuple[str, float]:
        """The name of the bound and its limit; "" where there is none."""
        if self.bf16_exact:
            return "bf16_exact", 0.0
        for name in ("rel", "abs", "bits"):
            value = getattr(self, name)
            if value is not None:
                return name, value
        return "", 0.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def room(block: Block) -> int:
    """Return the bytes that `encode` may write."""
    return compact_bytes_max(elements_of(block))


def encode(
    block: Block,
    relatives: Relatives,
    out: int,
    decoded: int,
    *,
    role: str,
    options: Compact,
) -> tuple[Payload, Loss]:
    """Encode a block by its role; without loss where it cannot be coded otherwise.

    Args:
        relatives: decoded elements: "exp_avg_sq", "master" of the same unit, coded before; "base"
            of the same tensor in the base. And "exact_master", the master as it was: a bf16
            weight that is its rounding becomes the rounding of the decoded master.
        out: address of `room` bytes.
        decoded: address with room for the block; gets what `decode` will give.
        role: as in `groups`; of any other the elements are stored without loss.
    """
    elements, data = elements_of(block), block.address
    square = relatives.get("exp_avg_sq", 0)
    if role == "exp_avg_sq":
        rests = options.quality == "high" if options.residual is None else options.residual
        made = compact_means(elements, data, rests, out, decoded)
    elif role == "exp_avg" and square:
        step = _MOMENT_STEPS.get(options.quality, _DROPPED)
        made = compact_moment(elements, data, step, square, out, decoded)
    else:
        made = compact_steps(
            elements,
            data,
            _WEIGHT_STEPS[options.quality],
            *options.bound,
            base=relatives.get("base", 0) if role in ("master", "weight") else 0,
            second_moment=square,
            master=relatives.get("master", 0),
            exact_master=relatives.get("exact_master", 0),
            out=out,
            decoded=decoded,
        )
    mode, size, *loss = made
    return Payload(out if mode else data, size, mode), Loss(*loss)


def decode(payload: Payload, block: Block, relatives: Relatives) -> bool:
    """Decode to the block; return whether the payload is one that `encode` writes."""
    if payload.mode not in MODES:
        return lossless.decode(payload, block, relatives)
    return compact_decode(
        payload.mode,
        payload.address,
        payload.size_bytes,
        elements_of(block),
        relatives.get("base", 0),
        relatives.get("exp_avg_sq", 0),
        relatives.get("master", 0),
        block.address,
    )
