"""Lets torchtitan 0.3.0 take the CPU for its device, and leaves out what is for CUDA alone.

Nothing here is about checkpoints.
"""

import sys
import types
from typing import Any

import torch


class _Kernels(types.ModuleType):
    """Stands for kernels of triton, which are imported and not used."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = _Kernels("kernels")

import torchtitan.tools.utils as utils  # noqa: E402


class _Properties:
    """Of the device."""

    total_memory = 8 << 30


_device = types.ModuleType("cpu_device")
_device.__dict__.update(
    {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")},
    get_device_name=lambda *_: "cpu",
    get_device_properties=lambda *_: _Properties,
    current_device=lambda: 0,
    device_count=lambda: 1,
    memory_stats=lambda *_: {},
    reset_peak_memory_stats=lambda *_: None,
    empty_cache=lambda *_: None,
    set_device=lambda *_: None,
)
utils.device_type, utils.device_module = "cpu", _device
utils.get_local_device = lambda: torch.device("cpu")

# What takes the device from there when it is imported.
import torchtitan.distributed.utils as distributed  # noqa: E402
import torchtitan.models.common.attention as attention  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

distributed.set_pg_timeouts = lambda *_, **__: None


def _causal(
    q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **_: Any
) -> Any:
    """Attend; flex_attention has no backward on the CPU."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


attention.FlexAttention._compiled_flex_attn = staticmethod(_causal)
attention._compiled_create_block_mask = create_block_mask

_stock = FSDPModule.set_gradient_divide_factor


def _set_factor(self: Any, factor: float) -> None:
    _stock(self, factor)
    self.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


FSDPModule.set_gradient_divide_factor = _set_factor
