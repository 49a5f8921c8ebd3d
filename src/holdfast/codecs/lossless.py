"""Every bit pattern back, in about 80 % of the bytes (docs/codecs.md, "lossless").

Exponents are entropy-coded, those of an optimizer's moments after their rows' and columns' means;
a half-precision weight that is the rounding of its master takes nothing.
"""

from .._core import Elements, lossless_bytes_max, lossless_decode, lossless_encode
from ..layout import ITEM_BYTES
from .base import Block, Payload, Relatives

NAME = "lossless"

_FLOATS = {"f32", "f64", "c32", "c64", "c128"}
_KINDS = dict.fromkeys(_FLOATS, "float") | {"bf16": "bf16", "f16": "f16"}
_PARTS = {"c32": 2, "c64": 2, "c128": 2}


def room(block: Block) -> int:
    """Return the bytes that `encode` may write."""
    return lossless_bytes_max(_elements(block))


def encode(block: Block, relatives: Relatives, out: int) -> Payload:
    """Encode in the mode that a sample of the elements favours.

    Args:
        relatives: of f32: the second moment helps a first one, a master a half-precision weight.
        out: address of `room` bytes.
    """
    mode, size = lossless_encode(_elements(block), block.address, *_needs(relatives), out)
    return Payload(out if mode else block.address, size, mode)


def decode(payload: Payload, block: Block, relatives: Relatives) -> bool:
    """Decode to the block; return whether the payload is one that `encode` writes."""
    return lossless_decode(
        payload.mode,
        payload.address,
        payload.size_bytes,
        _elements(block),
        *_needs(relatives),
        block.address,
    )


def _needs(relatives: Relatives) -> tuple[int, int]:
    return relatives.get("master", 0), relatives.get("exp_avg_sq", 0)


def _elements(block: Block) -> Elements:
    parts = _PARTS.get(block.dtype, 1)
    item_bytes, kind = ITEM_BYTES[block.dtype] // parts, _KINDS.get(block.dtype, "")
    return Elements(
        block.elements * parts, item_bytes, kind, block.row * parts, block.column * parts
    )
