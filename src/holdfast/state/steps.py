"""What changes only when an optimizer steps, and ways to hold that step up or to hear of it.

Parameters and moments stay as they are through forward and backward; buffers, counters, random
states and schedules need not. Knows optimizers and memory; no files, no other ranks.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..layout import Path
from .optimizers import holder
from .tree import Leaves


def changed_by_steps(leaves: Leaves) -> set[Path]:
    """Return the tensors that nothing but a step of the state's own optimizers changes."""
    owned = {*_memory([t for optimizer in leaves.optimizers for t in _tensors_of(optimizer)])}
    paths, held = [*leaves.tensors], [leaf.data for leaf in leaves.tensors.values()]
    rows = zip(paths, held, _memory(held), strict=True)
    return {
        path
        for path, data, memory in rows
        if memory in owned and data.numel() and not data.is_inference()
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


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return parameters and their state."""
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    values = [value for state in holder(optimizer).state.values() for value in state.values()]
    return parameters + [value for value in values if isinstance(value, torch.Tensor)]


def _memory(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    """Return where the elements of each are: the storage may hold those of other tensors too."""
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [(t.data_ptr(), t.dtype, t.shape, t.stride(), t.device) for t in own]
