"""An optimizer within a wrapper, and a ``state_dict()`` that was made too early.

Knows one object at a time; no names, no files.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from .. import worker
from ..format.names import dotted
from ..layout import Path

logger = logging.getLogger("holdfast")

_PLAIN = (bool, int, float, str, bytes, type(None))
PLACES_MAX = 64  # whose last state is remembered


def wrapped_optimizer(value: Any, state: Mapping[str, Any] | None = None) -> Optimizer | None:
    """Return the optimizer that a wrapper (accelerate's, for example) hands everything on to.

    A wrapper that adds anything (a scale of losses, parts of its own) is none.

    Args:
        state: what its ``state_dict()`` returned, where that was called.
    """
    inner, found = value, None
    while (inner := _within(inner)) is not None:
        found = inner
    if found is None:
        return None
    state = worker.call_in_caller(value.state_dict) if state is None else state
    return found if _is_same(state, worker.call_in_caller(found.state_dict)) else None


def looks_wrapped(value: Any) -> bool:
    """Whether something has an optimizer in it, and its groups."""
    return _within(value) is not None


def _within(value: Any) -> Optimizer | None:
    inner = getattr(value, "optimizer", None)
    if not isinstance(inner, Optimizer) or inner is value:
        return None
    return inner if getattr(value, "param_groups", None) is inner.param_groups else None


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states hold the same tensors, and equal values."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, _PLAIN) and bool(one == other or (one != one and other != other))


_last: dict[Path, list[Any]] = {}  # the param_groups of each state_dict() that was saved last


def warn_of_old(groups: Mapping[Path, list[Any]]) -> None:
    """Warn of a ``state_dict()`` of an optimizer that is saved a second time.

    Each call of it makes a new list of groups; one that was saved before has their options of then,
    and lacks all state that did not exist yet.
    """
    for path, listed in groups.items():
        if _last.get(path) is listed:
            of = dotted(path[:-1]) or "the state"
            logger.warning(
                "%s is the same state_dict() of an optimizer that was saved before. If a step was "
                "taken since, it is out of date: pass the optimizer itself, such as "
                '{"optimizer": optimizer}',
                of,
            )
        if len(_last) >= PLACES_MAX:
            _last.clear()
        _last[path] = listed
