"""A new tensor for what is read, on a device and of a dtype that a user names."""

from typing import Any

import torch

from ..errors import MismatchError, OptionError, shown
from ..format.names import dotted
from ..layout import Shape, Tensor
from .tensors import DTYPE_NAMES, TORCH_DTYPES


def new_tensor(tensor: Tensor, shape: Shape, device: Any, dtype: Any) -> torch.Tensor:
    """Return memory for a part of a tensor, of any content.

    Args:
        device: where it is to be.
        dtype: what its elements are converted to; None: its own.

    Raises:
        OptionError: these are no device and no dtype.
        MismatchError: elements of the tensor are not converted to this dtype.
    """
    wanted = TORCH_DTYPES[tensor.dtype] if dtype is None else dtype
    if not isinstance(wanted, torch.dtype) or wanted not in DTYPE_NAMES:
        raise OptionError(f"dtype is {shown(dtype)}; expected one such as torch.bfloat16")
    name = DTYPE_NAMES[wanted]
    if name != tensor.dtype and not converts(tensor.dtype, name):
        raise MismatchError(
            f"{dotted(tensor.path)} is {tensor.dtype}, which is not converted to {name}; leave "
            "dtype out, and convert it yourself"
        )
    check_device(device)
    return torch.empty(shape, dtype=wanted, device=device)


def check_device(device: Any) -> None:
    """Check that a tensor can be made on a device.

    Raises:
        OptionError: it cannot.
    """
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        text = str(error).partition("\n")[0].rstrip(".")
        raise OptionError(
            f"device is {shown(device)}, where no tensor can be made: {text:.200}. Give one that "
            "is here, such as 'cpu'"
        ) from error


def converts(stored: str, wanted: str) -> bool:
    """Whether ``cast`` may convert: never an imaginary part away, nor two numbers in a byte."""
    complex_dtypes = ("c32", "c64", "c128")
    packed = "f4_e2m1fn_x2" in (stored, wanted)
    return not packed and (stored not in complex_dtypes or wanted in complex_dtypes)
