"""Whether the elements of a tensor are in memory, and in none that they share. Knows no files.

The core reads and writes by address: what has none is refused here, by its path.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ..errors import StateError
from ..format.names import dotted
from ..format.spec import DIMENSIONS_MAX
from ..layout import Path

_WORK_MAX = 1_000_000  # numpy's bound; what is harder to tell is taken to overlap
ORDINARY = (torch.Tensor, nn.Parameter)  # types that leave every operation to torch


def check_dense(value: torch.Tensor, path: Path) -> None:
    """Check that a tensor has elements one can count: some kinds do not even have a shape."""
    fault = ""
    if isinstance(value, UninitializedTensorMixin):
        fault = "belongs to a lazy module; run the module once to give it a shape"
    elif value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        fault = f"has layout {kind}; make it dense, or save its parts"
    elif value.is_meta:
        fault = (
            "is on the meta device and has no elements; materialize it first, or load its module, "
            "not a state_dict(), with assign=True"
        )
    elif value.ndim > DIMENSIONS_MAX:
        fault = f"has {value.ndim} dimensions; expected at most {DIMENSIONS_MAX}"
    if fault:
        raise StateError(f"{dotted(path)} {fault}")


def own_memory(value: torch.Tensor, path: Path) -> torch.Tensor:
    """Return the elements of a dense tensor as an ordinary tensor, in the same memory.

    Call it in `ordinary_torch`. A subclass that has memory of its own loses its class here.

    Raises:
        StateError: the elements are in no memory, or in that of other tensors.
    """
    if fault := _no_memory(value):
        raise StateError(f"{dotted(path)} {fault}")
    if type(value) in ORDINARY:
        data = value.detach()
    else:
        with torch._C._DisableTorchDispatch():
            data = value.detach()
    _check_storage(data, path)
    if data.numel() and not data.data_ptr():
        raise StateError(f"{dotted(path)} {_unknown(value)}")
    return data


def _no_memory(value: torch.Tensor) -> str:
    """Say why a tensor has no address, and what to do; nothing of one that may have."""
    kind = type(value)
    if isinstance(value, FakeTensor):
        return (
            "is a FakeTensor, which has a shape and no elements; expected a tensor with memory. "
            "Make it outside of FakeTensorMode"
        )
    if hasattr(kind, "__tensor_flatten__"):
        return f"is a {kind.__name__}, which wraps other tensors; save those instead"
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return (
            "is a tensor within a torch.func transform (vmap, grad), which has no memory of its "
            "own; return it from the transform, and call holdfast with the result"
        )
    try:
        is_there = value.data_ptr() or kind in ORDINARY or not value.numel()
    except RuntimeError:
        is_there = False
    return "" if is_there else _unknown(value)


def _unknown(value: torch.Tensor) -> str:
    return (
        f"is a {type(value).__name__} without memory of its own; expected a tensor with elements. "
        "Save the tensors that it wraps instead"
    )


def _check_storage(data: torch.Tensor, path: Path) -> None:
    """Check that the elements are there: frameworks free the storage of a tensor they keep."""
    if not data.numel():
        return
    last = data.numel() - 1
    if not data.is_contiguous():
        last = sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))
    end = data.storage_offset() + last + 1
    needed, held = end * data.element_size(), data.untyped_storage().nbytes()
    if held < needed:
        raise StateError(
            f"{dotted(path)} needs {needed} bytes of its storage, which holds {held}: its memory "
            "was freed (resize_(0)). Allocate it again before this call, or leave the tensor out"
        )


def spread(data: torch.Tensor) -> tuple[int, str]:
    """Tell how elements lie that do not follow each other.

    Returns:
        (how many would lie from the first to the last one, and what the tensor is if two elements
        are one place in memory).
    """
    sides = sorted((s, n) for s, n in zip(data.stride(), data.shape, strict=True) if n > 1)
    reach, is_clear = 0, True
    for step, count in sides:
        is_clear = is_clear and step > reach
        reach += (count - 1) * step
    if is_clear:
        return reach + 1, ""
    if not sides[0][0]:
        return reach + 1, "an expanded tensor"
    view = _array(data)
    for _ in data.shape:
        # Two places that first differ in this dimension: the lower one may be its first.
        if _share(view[:1], view[1:]):
            return reach + 1, "a tensor that overlaps itself"
        view = view[0]
    return reach + 1, ""


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have an element, or a byte of one, in the same place."""
    return _share(_array(one), _array(other))


class _Address:
    """Memory as numpy is told of it, which does not look into it."""

    def __init__(self, data: torch.Tensor) -> None:
        item = data.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{item}",
            "data": (data.data_ptr(), False),
            "shape": tuple(data.shape),
            "strides": tuple(step * item for step in data.stride()),
        }


def _array(data: torch.Tensor) -> Any:
    return np.asarray(_Address(data))


def _share(one: Any, other: Any) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=_WORK_MAX))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
