"""The optimizer of a framework, as one whose state is saved by its parameters' names."""

import weakref
from typing import Any

from torch.optim import Optimizer

_views: "weakref.WeakKeyDictionary[Optimizer, Optimizer]" = weakref.WeakKeyDictionary()


def named_optimizer(optimizer: Any) -> Any:
    """Return the optimizer of torch within a wrapper such as accelerate's, without empty groups.

    A group without parameters, as a Trainer makes for weight decay, has no name. What is returned
    shares groups, state and hooks with the optimizer: what is loaded into it is in the optimizer.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer) or all(g["params"] for g in optimizer.param_groups):
        return optimizer
    if optimizer not in _views:
        _views[optimizer] = object.__new__(type(optimizer))
    view = _views[optimizer]
    view.__dict__.update(optimizer.__dict__)
    view.param_groups = [group for group in optimizer.param_groups if group["params"]]
    return view
