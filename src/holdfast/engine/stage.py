"""Tensor → bytes in host memory, chunk by chunk and hashed as they arrive.

Knows elements and memory; no names, no files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .._core import copy_and_hash_chunk, hash_chunk
from ..layout import Box, Chunk, Path, Shard, boxes_of_range
from .place import copy_elements, is_row_major
from .workspace import bytes_at

Part = tuple[torch.Tensor, Box]  # the elements of a box
Sources = Mapping[Path, Sequence[Part]]  # what this rank holds of each tensor


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


def stage(source: torch.Tensor, box: Box, chunk: Chunk, address: int, seed: int) -> Staged:
    """Copy one chunk's elements to host memory in row-major order.

    The hashes are those of the copied bytes: a source that changes meanwhile gives a checkpoint
    that is whole, if not the one that was meant.

    Args:
        source: what this rank holds: the elements of ``box``, in any strides, on any device.
        address: of ``chunk.size_bytes``.
    """
    start, is_copied = gather(source, box, chunk, lambda _: address)
    if is_copied:
        return seal(address, chunk.size_bytes, seed)
    checksum, digest = copy_and_hash_chunk(address, start, chunk.size_bytes, seed)
    return Staged(address, chunk.size_bytes, checksum, digest)


def gather(
    source: torch.Tensor, box: Box, chunk: Chunk, take: Callable[[int], int]
) -> tuple[int, bool]:
    """Find, or make, a chunk's elements in host memory in row-major order.

    Args:
        source, box: as `stage` takes them.
        take: returns memory for so many bytes, which they are copied to if they lie otherwise.

    Returns:
        (their address, whether they were copied: nothing else changes them).
    """
    held = elements_of(chunk.shard, source, box)
    if held.is_cpu and is_row_major(held):
        return held.data_ptr() + chunk.first * held.element_size(), False
    address = take(chunk.size_bytes)
    copy_chunk(held, chunk, bytes_at(address, chunk.size_bytes))
    return address, True


def whole_of(source: torch.Tensor, box: Box, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Return all elements of a shard behind each other in host memory; copied where they are not.

    Args:
        source, box: as `stage` takes them.
        chunks: all of the shard.
    """
    held = elements_of(chunks[0].shard, source, box)
    if held.device.type == "cpu" and is_row_major(held):
        return held
    memory = torch.empty(chunks[0].shard.size_bytes, dtype=torch.uint8, device="cpu")
    at = 0
    for chunk in chunks:
        copy_chunk(held, chunk, memory[at : at + chunk.size_bytes])
        at += chunk.size_bytes
    return memory


def elements_of(shard: Shard, source: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of a shard among those of ``box``."""
    if shard.box == box:
        return source
    inner = shard.box.relative_to(box.offset)
    return source[inner.slices()] if inner.shape != tuple(source.shape) else source


def seal(address: int, size_bytes: int, seed: int) -> Staged:
    """Hash a chunk that stands in its place already."""
    checksum, digest = hash_chunk(address, size_bytes, seed)
    return Staged(address, size_bytes, checksum, digest)


def copy_chunk(
    held: torch.Tensor, chunk: Chunk, target: torch.Tensor, *, non_blocking: bool = False
) -> None:
    """Gather a run of elements, box by box where they do not lie behind each other."""
    values = target.view(held.dtype)
    if is_row_major(held):
        run = held.view(-1)[chunk.first : chunk.first + chunk.elements]
        copy_elements(run, values, non_blocking=non_blocking)
        return
    for before, part in boxes_of_range(chunk.shard.box.shape, chunk.first, chunk.elements):
        run = values[before : before + part.elements].view(part.shape)
        copy_elements(held[part.slices()], run, non_blocking=non_blocking)
