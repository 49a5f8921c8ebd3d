"""torch's own plain values: sizes, dtypes, devices. The rest is in `format/natives.py`."""

from typing import Any

import torch

from ..errors import VersionError
from ..format.inexact import Malformed
from ..format.natives import add_native


def _dtype(content: Any) -> torch.dtype:
    found = getattr(torch, content, None) if type(content) is str else None
    if isinstance(found, torch.dtype):
        return found
    if type(content) is str and content.isidentifier():
        raise VersionError(f"torch {torch.__version__} has no dtype {content:.80}. Upgrade torch")
    raise Malformed("expected the name of a dtype")


def _device(content: Any) -> torch.device:
    if type(content) is not str:
        raise Malformed("expected the name of a device")
    try:
        return torch.device(content)
    except RuntimeError as error:
        raise Malformed(f"{content:.80} is no device") from error


def _size(content: Any) -> torch.Size:
    if not all(type(side) is int and side >= 0 for side in content):
        raise Malformed("expected sides from 0")
    return torch.Size(content)


def add_torch_types() -> None:
    """Let values be torch's sizes, dtypes and devices."""
    add_native(torch.dtype, "$dtype", lambda value: str(value).removeprefix("torch."), _dtype)
    add_native(torch.device, "$device", str, _device)
    add_native(torch.Size, "$size", list, _size)
