"""Lets FSDP1 take the CPU: the frameworks name another device, or none."""

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel


def flatten_on_cpu() -> None:
    """Give every FullyShardedDataParallel the CPU as its device."""
    stock = FullyShardedDataParallel.__init__

    def begin(self: Any, *given: Any, **more: Any) -> None:
        stock(self, *given, **more | {"device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = begin  # type: ignore[method-assign]
