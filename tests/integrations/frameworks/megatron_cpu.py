"""Lets Megatron-Core train on CPUs over gloo: by itself it asks CUDA for the current device."""

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch

KINDS = {torch.float32: "FloatTensor", torch.bfloat16: "BFloat16Tensor"}


def prepare() -> None:
    """Let what asks CUDA be told of the CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    cuda.set_device = lambda *_: None  # each its own: torch's compiler tells them apart
    cuda.current_stream = lambda *_: SimpleNamespace(
        wait_stream=lambda *_: None, synchronize=lambda: None
    )
    cuda.stream = lambda *_: contextlib.nullcontext()
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    stock = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *given, **named: (  # type: ignore[method-assign]
        stock(tensor, *given, **named) if given or named else f"torch.cuda.{KINDS[tensor.dtype]}"
    )
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    put = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = lambda optimizer, param, tensors: (
        put(optimizer, param, {"step": _step_of(optimizer, param), **tensors})
    )


def _step_of(optimizer: Any, param: torch.Tensor) -> torch.Tensor:
    """Return the step of torch's Adam, which Megatron 0.16.1 forgets where Apex is missing."""
    group, order = optimizer.model_param_group_index_map[param]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    step: torch.Tensor = optimizer.optimizer.state[main]["step"]
    return step


def _on_cpu(make: Any) -> Any:
    """Let what makes a tensor on a CUDA device make it on the CPU."""

    @functools.wraps(make)
    def made(*arguments: Any, device: Any = None, **named: Any) -> Any:
        is_cuda = str(device).startswith("cuda")
        return make(*arguments, device="cpu" if is_cuda else device, **named)

    return made
