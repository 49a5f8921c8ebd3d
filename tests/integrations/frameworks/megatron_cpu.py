"""Lets Megatron-Core train on CPUs over gloo: by itself it asks CUDA for the current device.

It also mends two faults of Megatron-Core 0.16.1 in how the distributed optimizer resumes torch's
Adam, which it uses where Apex and Transformer Engine are missing. Both are in `_mend`. They concern
checkpoints of Megatron and of holdfast alike.
"""

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
    for name in ("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # a name that is missing without Transformer Engine
    _mend(DistributedOptimizer)


def _mend(kind: Any) -> None:
    """Give each parameter a step of its own when it is loaded, and keep it when moments are put.

    Megatron gives all parameters one tensor, and torch's Adam counts it up once for each of them:
    29 parameters are 29 steps further after one step. Then it copies moments by the names that
    Adam has: it finds no ``step`` among what was loaded (``fully_reshardable``), or takes the one
    from before the load (``dp_reshardable``).
    """
    load, put = kind.load_state_dict, kind._set_main_param_and_optimizer_states

    def load_state_dict(optimizer: Any, state: Any) -> None:
        load(optimizer, state)
        for held in optimizer.optimizer.state.values():
            held["step"] = held["step"].clone()

    kind.load_state_dict = load_state_dict

    @torch.no_grad()  # weights in float are views of parameters
    def put_states(optimizer: Any, param: torch.Tensor, tensors: Any) -> None:
        put(optimizer, param, {**tensors, "step": _step_of(optimizer, param)})

    kind._set_main_param_and_optimizer_states = put_states


def _step_of(optimizer: Any, param: torch.Tensor) -> torch.Tensor:
    """Return the step of a parameter."""
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
