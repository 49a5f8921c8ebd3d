"""Staged bytes → payloads. Knows codecs; no tensors, no files."""

from collections.abc import Sequence
from ctypes import memmove
from dataclasses import dataclass

from ..codecs.base import Block, Codec, Payload
from ..format import spec
from .workspace import Workspace


@dataclass(frozen=True, slots=True)
class Task:
    """Elements to encode.

    Attributes:
        digest: XXH3-128 of the elements.
        base: address of the same elements of the base; 0: they are not known.
        base_digest: of these; empty: it is not known.
    """

    role: str
    block: Block
    digest: bytes
    base: int
    base_digest: bytes


def encode(tasks: Sequence[Task], codec: Codec, room: Workspace) -> list[Payload]:
    """Encode the same elements of the tensors of a parameter, in the order of their roles.

    Args:
        room: memory that the payloads are put in.
    """
    relatives, payloads = dict[str, int](), []
    for task in tasks:
        block = task.block
        if task.digest == task.base_digest and block.size_bytes > len(task.digest):
            out = room.take(len(task.digest)).data_ptr()
            memmove(out, task.digest, len(task.digest))
            payloads.append(Payload(out, len(task.digest), spec.MODE_UNCHANGED))
        else:
            known = relatives | ({spec.BASE: task.base} if task.base else {})
            payloads.append(codec.encode(block, known, room.take(codec.room(block)).data_ptr()))
        relatives[task.role] = block.address
    return payloads
