"""What changes only when an optimizer steps, and ways to hold that step up or to hear of it.

Parameters and moments stay as they are through forward and backward; buffers, counters, random
states and schedules need not. Knows optimizers and memory; no files, no other ranks.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..layout import Path
from .optimizers import holder
from .tree import Leaves


def changed_by_steps(leaves: Leaves) -> set[Path]:
    """Return the tensors that nothing but a step of the state's own optimizers changes."""
    owned = {
        _memory(tensor)
        for optimizer in leaves.optimizers
        for tensor in _tensors_of(optimizer)
        if tensor.numel()
    }
    return {
        path
        for path, leaf in leaves.tensors.items()
        if leaf.data.numel() and _memory(leaf.data) in owned and not leaf.data.is_inference()
    }


def hold_steps(optimizers: Iterable[Optimizer], before: Callable[[], None]) -> None:
    """Call ``before`` ahead of every step of these optimizers, from now on for ever.

    A hook that is taken off again while torch runs through its hooks would stop it; one that has
    nothing to wait for costs a microsecond.
    """
    for optimizer in optimizers:
        if optimizer not in _held:
            optimizer.register_step_pre_hook(lambda *_: before())
            _held.add(optimizer)


def before_any_step(note: Callable[[], None]) -> Callable[[], None]:
    """Call ``note`` ahead of every step of any optimizer of torch; return what ends that."""
    return register_optimizer_step_pre_hook(lambda *_: note()).remove


_held: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def _tensors_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in holder(optimizer).state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return where the elements are: the storage may hold those of other tensors too."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.device, local.data_ptr(), local.dtype, local.shape, local.stride()
