"""Checked bytes → tensors. Knows elements and boxes; no names, no files.

Chunks that lie in a target as they are stored are placed by one call, however many they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from .._core import copy, place_reads
from ..boxes import U64, Boxes, unflatten
from ..format.manifest import CHUNKS
from ..layout import Box, Chunk, Path, boxes_of_range
from ..plan.reads import Reads
from ..state.tensors import TORCH_DTYPES

Part = tuple[torch.Tensor, Box]  # the elements of a box

_SHARDS = attrgetter("shard_first_row", "table.shard_tensor", "chunk_elements", "item_bytes")
_READS = attrgetter("rows", "first", "count", "wants", "exact")


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What a load fills; each has the number that it has among what is wanted.

    Attributes:
        boxes: which elements of its tensor each takes; None: all.
        address: of the first element where they lie behind each other in host memory, in the
            checkpoint's dtype; else 0.
    """

    paths: Sequence[Path]
    tensors: Sequence[torch.Tensor]
    boxes: Boxes | None
    address: U64

    def part(self, number: int) -> Part:
        """Return the elements to fill, and which they are."""
        tensor = self.tensors[number]
        offset = [0] * tensor.ndim
        if self.boxes is not None:
            offset = self.boxes.offset[number, : tensor.ndim].tolist()
        return tensor, Box(tuple(offset), tuple(tensor.shape))

    def fill(self, reads: Reads, base: int) -> Reads:
        """Place the elements of checked chunks that lie in their targets as they are stored.

        Args:
            reads: chunks whose payloads are their elements.
            base: address at which byte 0 of their file would be.

        Returns:
            What is left: chunks that go elsewhere, each with what wants it.
        """
        manifest = reads.manifest
        left = place_reads(CHUNKS(manifest), _SHARDS(manifest), _READS(reads), self.address, base)
        if left is None:
            return reads[:0]
        which, pair = (np.frombuffer(column, np.int64) for column in left)
        rows, ones = reads.rows[which], np.ones_like(pair)
        return Reads(manifest, rows, pair, ones, reads.wants, reads.exact)


def targets_of(
    sources: Mapping[Path, Iterable[Part]], dtypes: Sequence[str] | None = None
) -> Targets:
    """Return what is to be filled as columns.

    Args:
        dtypes: of the checkpoint's tensors, one for each part; None: nothing is known to lie as
            it is stored.
    """
    parts = [(path, *part) for path, held in sources.items() for part in held]
    ndim = np.array([len(box.shape) for _, _, box in parts], np.int64)
    flat = np.array([n for _, _, box in parts for n in (*box.offset, *box.shape)], np.int64)
    boxes = unflatten(flat, np.cumsum(2 * ndim) - 2 * ndim, ndim)
    paths, tensors = [path for path, _, _ in parts], [tensor for _, tensor, _ in parts]
    addresses = [0] * len(parts)
    if dtypes is not None:
        addresses = list(map(_address_of, tensors, dtypes))
    return Targets(paths, tensors, boxes, np.array(addresses, np.uint64))


def _address_of(tensor: torch.Tensor, dtype: str) -> int:
    straight = tensor.dtype == TORCH_DTYPES[dtype] and is_plain(tensor)
    return tensor.data_ptr() if straight else 0


def place(elements: torch.Tensor, chunk: Chunk, target: torch.Tensor, box: Box) -> None:
    """Copy the elements of a chunk that lie in ``box`` into ``target``, which holds that box.

    Args:
        elements: the chunk's bytes (uint8, host memory).
        target: any strides, any device; another dtype is converted to.
    """
    dtype = TORCH_DTYPES[chunk.shard.tensor.dtype]
    if chunk.shard.box == box and target.dtype == dtype and is_plain(target):
        # The target lies as the shard does: the chunk is a run of its bytes.
        start = target.data_ptr() + chunk.first * target.element_size()
        copy(start, elements.data_ptr(), elements.nbytes)
        return
    values = elements.view(dtype)
    if chunk.shard.box == box and target.is_cuda and is_row_major(target):
        run = target.view(-1)[chunk.first : chunk.first + chunk.elements]
        copy_elements(values, run)
        return
    origin = chunk.shard.box.offset
    for before, part in boxes_of_range(chunk.shard.box.shape, chunk.first, chunk.elements):
        offset = tuple(a + b for a, b in zip(part.offset, origin, strict=True))
        stored = Box(offset, part.shape)
        common = stored.intersect(box)
        if common is None:
            continue
        source = values[before : before + part.elements].view(part.shape)
        source = source[common.relative_to(offset).slices()]
        copy_elements(source, target[common.relative_to(box.offset).slices()])


def copy_elements(
    source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool = False
) -> None:
    """Copy a tensor's elements into another of its shape, converted where the dtypes differ."""
    if target.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():  # nowhere else may one be changed
            copy_elements(source, target, non_blocking=non_blocking)
        return
    bits = _BITS.get(source.element_size())
    views = source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()
    if views and source.device != target.device:
        # Not by one copy: torch negates what lies in other strides on CUDA twice, and loses bits
        # that are to be resolved where it does not wait (pytorch#146286).
        source = source.resolve_conj().resolve_neg()
        if target.is_conj() or target.is_neg():
            source = source.to(target.device)
        copy_elements(source, target)
    elif bits is None or views or source.dtype != target.dtype:
        target.copy_(source, non_blocking=non_blocking and not views)
    elif is_plain(source) and is_plain(target):
        # Not torch's threads: they spin for a while after each copy, on the cores that read ahead.
        copy(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        # Bits, not numbers: NaN payloads survive, and dtypes with few operations are copied too.
        target.view(bits).copy_(source.view(bits), non_blocking=non_blocking)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in host memory behind each other, as they are."""
    on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    return on_host and not (tensor.is_conj() or tensor.is_neg())


def is_row_major(elements: torch.Tensor) -> bool:
    """Whether the bytes in memory, of any device, are those of the elements in row-major order."""
    return elements.is_contiguous() and not (elements.is_conj() or elements.is_neg())


def is_lazy(elements: torch.Tensor) -> bool:
    """Whether the elements are other than what is in memory (Tensor.conj, Tensor.negative)."""
    return elements.is_conj() or elements.is_neg()


# Complex numbers of 16 bytes have no integer of their size; plain copies of them keep every bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
