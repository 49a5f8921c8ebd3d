"""Staged bytes → payloads. Knows codecs; no tensors, no files."""

from collections.abc import Sequence

from ..codecs.base import Block, Payload
from ..codecs.registry import CODECS
from .workspace import Workspace


def encode(blocks: Sequence[tuple[str, Block]], codec: str, room: Workspace) -> list[Payload]:
    """Encode the same elements of the tensors of a parameter, in the order of their roles.

    Args:
        blocks: (role, staged elements).
        room: memory that the payloads are put in.
    """
    module, relatives, payloads = CODECS[codec], dict[str, int](), []
    for role, block in blocks:
        payloads.append(module.encode(block, relatives, room.take(module.room(block)).data_ptr()))
        relatives[role] = block.address
    return payloads
