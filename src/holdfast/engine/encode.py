"""Staged bytes → payloads. Knows codecs; no tensors, no files."""

import logging
from collections.abc import Mapping
from ctypes import memmove
from dataclasses import dataclass, replace

from .._core import hash_chunk
from ..codecs.base import Codec, Payload, Piece, Relatives
from ..format import spec
from .decode import decode
from .registry import LOSSLESS
from .workspace import Workspace

logger = logging.getLogger("holdfast")

_NEEDS_BASE_OF = {"exp_avg": ("master", "weight"), "exp_avg_sq": ("exp_avg",)}


@dataclass(frozen=True, slots=True)
class Coded:
    """A payload, and what a reader will have of it.

    Attributes:
        decoded: address of the elements.
        digest: XXH3-128 of these.
    """

    payload: Payload
    decoded: int
    digest: bytes


def encode(
    piece: Piece,
    digests: Mapping[str, bytes],
    same: Mapping[str, bytes],
    codec: Codec,
    known: object,
    room: Workspace,
) -> dict[str, Coded]:
    """Encode the same elements of the tensors of a parameter; return them by role.

    Args:
        digests: of the elements.
        same: digests of the base's, where known: what has not changed takes a digest.
        known: what the codec's survey said of the parameter.
        room: memory that the payloads are put in.
    """
    relatives, made = dict[str, int](), dict[str, Coded]()
    refers = spec.MODES[codec.name]
    for role in (role for role in codec.order if role in piece.blocks):
        block, digest = piece.blocks[role], digests[role]
        if digest == same.get(role) and block.size_bytes > len(digest):
            out = room.take(len(digest))
            memmove(out, digest, len(digest))
            payload = Payload(out, len(digest), spec.MODE_UNCHANGED)
            made[role] = Coded(payload, block.address, digest)
        else:
            near = relatives | bases_of(role, piece)
            if "exp_avg_sq" in made and made["exp_avg_sq"].payload.mode == spec.MODE_REPLAY_MOMENT:
                near[spec.REPLAYED] = relatives["exp_avg"]
            out = room.take(codec.room(block))
            found = _encode_lossy(role, piece, codec, known, near, out, room)
            if found is None:
                exact = LOSSLESS if codec.is_lossy else codec
                payload = exact.encode(role, piece, None, near, out, 0)
                found = Coded(payload, block.address, digest)
            made[role] = found
            if role in piece.bases and spec.BASE not in refers.get(found.payload.mode, ()):
                # A reader has no base of it: nothing else may be coded by it.
                rest = {other: at for other, at in piece.bases.items() if other != role}
                piece = replace(piece, bases=rest)
        relatives[role] = made[role].decoded
    return made


def bases_of(role: str, piece: Piece) -> dict[str, int]:
    """Return the bases that a reader has: of the tensor itself, and of what it may refer to."""
    if not piece.bases:
        return {}
    found = {spec.BASE: piece.bases[role]} if role in piece.bases else {}
    others = _NEEDS_BASE_OF.get(role, ())
    of_others = [piece.bases[other] for other in others if other in piece.bases]
    return found | ({spec.OTHER_BASE: of_others[0]} if of_others else {})


def _encode_lossy(
    role: str,
    piece: Piece,
    codec: Codec,
    known: object,
    near: Relatives,
    out: int,
    room: Workspace,
) -> Coded | None:
    """Encode, and decode again; None where that gives something else, or the codec is lossless."""
    if not codec.is_lossy:
        return None
    block = piece.blocks[role]
    decoded = room.take(block.size_bytes)
    payload = codec.encode(role, piece, known, near, out, decoded)
    _, digest = hash_chunk(decoded, block.size_bytes, 0)
    if payload.mode != spec.MODE_RAW:
        target = replace(block, address=room.take(block.size_bytes))
        good = decode(payload, target, codec.name, near)
        if not good or hash_chunk(target.address, block.size_bytes, 0)[1] != digest:
            logger.error(
                f"{role} of {piece.name} is stored without loss: its encoding in mode "
                f"{payload.mode} did not decode to the expected elements; please report this"
            )
            return None
    return Coded(payload, decoded, digest)
