"""Checked bytes → tensors. Knows elements and boxes; no names, no files."""

import torch

from .._core import copy
from ..layout import Box, Chunk, boxes_of_range
from ..state.tensors import TORCH_DTYPES


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
    if bits is None or views or source.dtype != target.dtype:
        # Blocking where bits have to be resolved: torch does that on the host, and without waiting
        # for a copy that is under way it is lost (pytorch#146286).
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


# Complex numbers of 16 bytes have no integer of their size; plain copies of them keep every bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
