"""Two tensors of one dtype → how far apart they are. Knows elements; no names, no checkpoints.

Elements are equal when their bits are: NaN equals the same NaN, and -0.0 is not 0.0 (though at
distance 0). The distance of two elements is the absolute value of their difference, computed in
binary64; that of integers is exact before it is rounded. It is not finite where a NaN or an
infinity meets another value.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

BLOCK_ELEMENTS = 1 << 20  # temporaries in binary64 stay at some 8 MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_HALF_BYTE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # f4_e2m1fn (OCP MX 1.0, table 5), sign apart
_FOUR_BIT = np.concatenate([_HALF_BYTE, -_HALF_BYTE])

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Distance:
    """How far two tensors are apart, of the elements added so far.

    Attributes:
        elements: compared.
        differing: elements whose bits differ.
        not_finite: of those, how many have no finite distance; they count in no other figure.
        max_abs: largest finite distance.
        sum_abs: sum of the finite distances, wide enough that it does not overflow.
        with_angle: whether to add up ``squares``.
        squares: sums of a², b², a b and (b - a)² over the elements that are finite on both sides.
    """

    elements: int = 0
    differing: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    sum_abs: np.longdouble = field(default_factory=np.longdouble)
    with_angle: bool = False
    squares: npt.NDArray[np.longdouble] = field(default_factory=lambda: np.zeros(4, np.longdouble))

    @property
    def mean_abs(self) -> float:
        """Mean of the finite distances, those of equal elements (0) included."""
        return float(self.sum_abs / max(self.elements - self.not_finite, 1))

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare two tensors of one shape and dtype, element by element."""
        a, b = a.reshape(-1), b.reshape(-1)
        for first in range(0, a.numel(), BLOCK_ELEMENTS):
            self._add_block(a[first : first + BLOCK_ELEMENTS], b[first : first + BLOCK_ELEMENTS])

    def _add_block(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.elements += a.numel()
        if self.with_angle and a.is_floating_point() and a.dtype != torch.float4_e2m1fn_x2:
            self._add_angle(a.to(torch.float64).numpy(), b.to(torch.float64).numpy())
        bits_a, bits_b = _bits(a), _bits(b)
        differs = (bits_a != bits_b).any(dim=1)
        count = int(differs.sum())
        if not count:
            return
        found = distances(
            bits_a[differs].view(a.dtype).reshape(-1), bits_b[differs].view(b.dtype).reshape(-1)
        )
        finite = found[np.isfinite(found)]
        self.differing += count
        self.not_finite += count - len(finite)
        if len(finite):
            self.max_abs = max(self.max_abs, float(finite.max()))
            self.sum_abs += finite.sum(dtype=np.longdouble)

    def _add_angle(self, a: Floats, b: Floats) -> None:
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            a, b = a[finite], b[finite]
        with np.errstate(over="ignore"):
            parts = (a @ a, b @ b, a @ b, (b - a) @ (b - a))
        self.squares += np.array(parts, np.longdouble)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """Return a row of integers for each element."""
    return flat.view(_BITS[flat.element_size()]).reshape(flat.numel(), -1)


def distances(a: torch.Tensor, b: torch.Tensor) -> Floats:
    """Return the distance of each pair of elements of two flat tensors of one dtype."""
    if a.dtype == torch.float4_e2m1fn_x2:
        return _four_bit_distances(a, b)
    if a.dtype == torch.bool:
        flips: Floats = (a ^ b).to(torch.float64).numpy()
        return flips
    if not (a.is_floating_point() or a.is_complex()):
        return _integer_distances(a.numpy(), b.numpy())
    wide = torch.complex128 if a.is_complex() else torch.float64
    with np.errstate(invalid="ignore", over="ignore"):
        result: Floats = np.abs(a.to(wide).numpy() - b.to(wide).numpy())
    return result


def _integer_distances(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> Floats:
    """Subtract in 64 bits without a sign, where no difference of two integers overflows."""
    larger, smaller = np.maximum(a, b), np.minimum(a, b)
    wide = np.int64 if larger.dtype.kind == "i" else np.uint64
    bits = larger.astype(wide).view(np.uint64) - smaller.astype(wide).view(np.uint64)
    result: Floats = bits.astype(np.float64)
    return result


def _four_bit_distances(a: torch.Tensor, b: torch.Tensor) -> Floats:
    """Take the larger distance of the two 4-bit values that make an element."""
    x, y = a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy()
    low = np.abs(_FOUR_BIT[x & 15] - _FOUR_BIT[y & 15])
    high = np.abs(_FOUR_BIT[x >> 4] - _FOUR_BIT[y >> 4])
    larger: Floats = np.maximum(low, high)
    return larger
