"""Staged bytes → payloads. Knows codecs; no tensors, no files."""

from collections.abc import Mapping
from ctypes import memmove
from dataclasses import dataclass, replace

from .._core import hash_chunk
from ..codecs.base import Codec, Payload, Piece
from ..format import spec
from .workspace import Workspace


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
    for role in (role for role in codec.order if role in piece.blocks):
        block, digest = piece.blocks[role], digests[role]
        if digest == same.get(role) and block.size_bytes > len(digest):
            out = room.take(len(digest)).data_ptr()
            memmove(out, digest, len(digest))
            payload = Payload(out, len(digest), spec.MODE_UNCHANGED)
            made[role] = Coded(payload, block.address, digest)
        else:
            near = relatives | ({spec.BASE: piece.bases[role]} if role in piece.bases else {})
            out = room.take(codec.room(block)).data_ptr()
            decoded = block.address
            if codec.is_lossy:
                decoded = room.take(block.size_bytes).data_ptr()
            payload = codec.encode(role, piece, known, near, out, decoded)
            if codec.is_lossy:
                _, digest = hash_chunk(decoded, block.size_bytes, 0)
            made[role] = Coded(payload, decoded, digest)
            if role in piece.bases and payload.mode not in spec.BASED:
                # A reader has no base of it: nothing else may be coded by it.
                rest = {other: at for other, at in piece.bases.items() if other != role}
                piece = replace(piece, bases=rest)
        relatives[role] = made[role].decoded
    return made
