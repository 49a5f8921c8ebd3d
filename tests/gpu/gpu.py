"""What the tests of CUDA share. Without a device they are skipped: `make gpu`, where one is.

``HOLDFAST_GPU=cpu`` runs on the CPU what makes sense there, to try the tests themselves.
"""

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

DEVICE = os.environ.get("HOLDFAST_GPU", "cuda")
ON_CUDA = DEVICE == "cuda"
LONG_NS = 200_000_000  # about so many cycles keep a device busy: 0.1 s

needs_device = pytest.mark.skipif(
    ON_CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"
)
needs_cuda = pytest.mark.skipif(
    not (ON_CUDA and torch.cuda.is_available()), reason="needs a CUDA device"
)


def busy() -> None:
    """Keep the current stream busy, and come back at once."""
    if ON_CUDA:
        torch.cuda._sleep(LONG_NS)


def new_stream() -> AbstractContextManager[Any]:
    """Return what makes another stream the current one."""
    if not ON_CUDA:
        return contextlib.nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, on whatever devices."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex() and tensor.dtype.itemsize > 4:
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    tensor = tensor.resolve_neg()
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]).cpu()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
