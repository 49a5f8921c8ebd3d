"""A moment or a weight by repeating the optimizer's step (docs/codecs.md, "Replay").

For checkpoints one step apart: what the step misses is stored, a quarter of a bit for an element.
"""

from .._core import replay_bytes_max, replay_decode, replay_encode, replay_fits
from .base import Block, Payload, Piece, Relatives

MODES = {"exp_avg_sq": 9, "master": 16, "weight": 16}
ORDER = ("exp_avg", "exp_avg_sq", "master", "weight")  # as they need each other
SHARE_MAX = 0.5  # of the elements' bytes: what takes more is no repetition


def room(block: Block) -> int:
    """Return the bytes that `encode` may write."""
    return replay_bytes_max(block.elements)


def encode(role: str, block: Block, relatives: Relatives, out: int) -> Payload | None:
    """Encode f32; None where no step of Adam led here, or what it needs is not there.

    Args:
        out: address of `room` bytes.
    """
    mode = MODES.get(role)
    if mode is None or block.dtype != "f32":
        return None
    size = replay_encode(mode, block.address, block.elements, *_needs(mode, relatives), out)
    good = 0 < size <= SHARE_MAX * block.size_bytes
    return Payload(out, size, mode) if good else None


def is_ahead(piece: Piece) -> bool:
    """Tell whether the second moment of a piece is going to be replayed from the first."""
    second, first = piece.blocks.get("exp_avg_sq"), piece.blocks.get("exp_avg")
    bases = piece.bases
    if second is None or first is None or not {"exp_avg", "exp_avg_sq"} <= bases.keys():
        return False
    near = {"exp_avg": first.address, "other_base": bases["exp_avg"], "base": bases["exp_avg_sq"]}
    mode = MODES["exp_avg_sq"]
    return replay_fits(mode, second.address, second.elements, *_needs(mode, near))


def decode(payload: Payload, block: Block, relatives: Relatives) -> bool:
    """Decode to the block; return whether the payload is one that `encode` writes."""
    return block.dtype == "f32" and replay_decode(
        payload.mode,
        payload.address,
        payload.size_bytes,
        block.elements,
        *_needs(payload.mode, relatives),
        block.address,
    )


def _needs(mode: int, relatives: Relatives) -> tuple[int, int, int, int]:
    base = relatives.get("base", 0)
    if mode == MODES["exp_avg_sq"]:
        return base, relatives.get("exp_avg", 0), relatives.get("other_base", 0), 0
    return base, relatives.get("replayed_exp_avg", 0), 0, relatives.get("exp_avg_sq", 0)
