"""Tensor → bytes in the pool, hashed as they arrive.

Knows elements and memory; no names, no files.
"""

from dataclasses import dataclass

import torch

from .._core import copy_and_hash_chunk, hash_chunk
from ..layout import Box, Chunk, boxes_of_range
from .place import copy_elements


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk in host memory that nothing else changes.

    Attributes:
        checksum: XXH3-64 of the bytes, seeded for the place of the chunk in its file.
        digest: XXH3-128 of the bytes.
    """

    address: int
    size_bytes: int
    checksum: int
    digest: bytes


def stage(source: torch.Tensor, box: Box, chunk: Chunk, target: torch.Tensor, seed: int) -> Staged:
    """Copy one chunk's elements into ``target`` in row-major order.

    The hashes are those of the copied bytes: a source that changes meanwhile gives a checkpoint
    that is whole, if not the one that was meant.

    Args:
        source: what this rank holds: the elements of ``box``, in any strides, on any device.
        target: uint8 host memory of ``chunk.size_bytes``.
    """
    address, size = target.data_ptr(), chunk.size_bytes
    inner = chunk.shard.box.relative_to(box.offset)
    held = source[inner.slices()] if inner.shape != tuple(source.shape) else source
    if held.device.type == "cpu" and held.is_contiguous() and not (held.is_conj() or held.is_neg()):
        start = held.data_ptr() + chunk.first * held.element_size()
        checksum, digest = copy_and_hash_chunk(address, start, size, seed)
        return Staged(address, size, checksum, digest)
    _copy_elements(held, chunk, target)
    checksum, digest = hash_chunk(address, size, seed)
    return Staged(address, size, checksum, digest)


def _copy_elements(held: torch.Tensor, chunk: Chunk, target: torch.Tensor) -> None:
    """Gather a run of elements box by box."""
    values = target.view(held.dtype)
    for before, part in boxes_of_range(chunk.shard.box.shape, chunk.first, chunk.elements):
        run = values[before : before + part.elements].view(part.shape)
        copy_elements(held[part.slices()], run)
