"""How an optimizer gives its state away, and state made for one that has none yet.

Knows one optimizer at a time; no names of other things, no files, no other ranks.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import worker
from ..errors import StateError
from ..format.names import dotted
from ..layout import Path, Tensor
from .tensors import TORCH_DTYPES

# What torch.optim makes in the shape of the parameter and reads as such in every step.
_OF_PARAMETER_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def holder(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state of this rank's parameters.

    ZeroRedundancyOptimizer gives each rank the state of some parameters, whole, and an optimizer of
    these; its own state_dict() is what was last sent to one rank.
    """
    inner = getattr(optimizer, "optim", None)
    return inner if _is_partitioned(optimizer) and isinstance(inner, Optimizer) else optimizer


def owned_by(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters whose state this rank holds."""
    return {id(parameter) for parameter in _parameters(holder(optimizer))}


def _is_partitioned(optimizer: Optimizer) -> bool:
    # By name: the import takes a second. With overlap_with_ddp it has no optimizer of torch's.
    is_zero = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
    return is_zero and not getattr(optimizer, "_overlap_with_ddp", True)


def keeps_protocol(optimizer: Optimizer) -> bool:
    """Whether ``state_dict`` and ``load_state_dict`` do more than torch.optim.Optimizer's do.

    One that overrides them (to gather, to quantize) or has hooks on them is treated like any object
    with these two methods.
    """
    kind = type(holder(optimizer))
    return (
        kind.state_dict is not Optimizer.state_dict
        or kind.load_state_dict is not Optimizer.load_state_dict
        or any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    )


def is_plain(optimizer: Optimizer) -> bool:
    """Whether all that an optimizer holds is named by its parameters' names."""
    listed = {id(parameter) for parameter in _parameters(optimizer)}
    return (
        not keeps_protocol(optimizer)
        and all(group["params"] for group in optimizer.param_groups)
        and all(id(key) in listed for key in holder(optimizer).state)
    )


def own_state(value: Any, path: Path) -> Any:
    """Return ``state_dict()`` of an object.

    Raises:
        StateError: an optimizer has state of a tensor it does not optimize, which torch cannot
            number.
    """
    if isinstance(value, Optimizer) and type(value).state_dict is Optimizer.state_dict:
        listed = {id(parameter) for parameter in _parameters(value)}
        strays = [k for k in value.state if isinstance(k, torch.Tensor) and id(k) not in listed]
        if strays:
            shapes = ", ".join(str(list(stray.shape)) for stray in strays)
            raise StateError(
                f"{dotted(path)} holds state of tensors that are in none of its param_groups (of "
                f"shape {shapes:.80}); delete it from optimizer.state"
            )
    return worker.call_in_caller(value.state_dict)


def is_numbered(rests: list[Path]) -> bool:
    """Whether paths below an optimizer are those of its ``state_dict()``: groups in a list."""
    groups = [rest for rest in rests if rest[:1] == ("param_groups",)]
    return any(len(rest) == 1 or isinstance(rest[1], tuple) for rest in groups)


def is_named(rests: list[Path]) -> bool:
    """Whether paths below an optimizer are by its parameters' names."""
    groups = [rest for rest in rests if rest[:1] == ("param_groups",)]
    return bool(groups) and not is_numbered(groups)


def numbers_of(lost: list[Path], path: Path) -> set[Path] | None:
    """Return the numbered states that lost tensors belong to: ``("state", 3)``.

    Args:
        lost: of an optimizer at ``path``; the rest of each may be one dotted key.

    Returns:
        None: something else was lost.
    """
    found = [re.match(r"state\.(\d+)\.", dotted(leaf[len(path) :])) for leaf in lost]
    return {("state", int(match[1])) for match in found if match} if all(found) else None


def states_of(state_dict: Mapping[str, Any], numbers: set[Path]) -> dict[Path, Any]:
    """Return numbered states of an optimizer's ``state_dict()`` as they are, by path."""
    states = state_dict.get("state", {})
    return {
        (*number, key): value
        for number in numbers
        for key, value in states.get(number[1], {}).items()
    }


def other_kind(here: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> str | None:
    """Tell another kind of optimizer from another version of the same, which only has more.

    Args:
        here, saved: what a group has here, and the options that one had there.
    """
    plain = {key for key, value in here.items() if not isinstance(value, torch.Tensor)}
    own, others = plain - {"params", "param_names"} - set(saved), set(saved) - set(here)
    if not (own and others):
        return None
    return (
        f"{dotted(path)} was saved with {', '.join(sorted(others))}, and has "
        f"{', '.join(sorted(own))} in the target: another kind of optimizer"
    )


@dataclass(frozen=True, slots=True)
class ParameterState:
    """What the state of one parameter has to be like.

    Attributes:
        options: of the parameter's group, as they will be after the load.
        stored: the parameter itself in the checkpoint, where it is known.
    """

    parameter: torch.Tensor
    options: Mapping[str, Any]
    stored: Tensor | None

    def make(self, leaf: Path, wanted: Tensor) -> torch.Tensor:
        """Make state that does not exist: like its parameter when it has its shape."""
        dtype = self.dtype_of(leaf, wanted)
        if self._is_counter(leaf, wanted):
            return torch.empty((), dtype=dtype, device=self._counter_device())
        if tuple(self.parameter.shape) == wanted.shape:
            return _empty_like(self.parameter, dtype)
        return torch.empty(wanted.shape, dtype=dtype, device=self._device())

    def may_keep(self, leaf: Path, wanted: Tensor, tensor: torch.Tensor) -> bool:
        """Whether the optimizer can step with state that lies where ``tensor`` does."""
        return leaf[-1] != "step" or wanted.shape != () or tensor.device == self._counter_device()

    def faults(
        self, wanted: Mapping[Path, Tensor], current: Mapping[Path, Callable[[], Any]]
    ) -> list[str]:
        """Say what is wrong with state that no step could be taken with.

        Args:
            wanted, current: what is there by path, and what gives what is here.
        """
        found = (self._fault(leaf, form, current[leaf]()) for leaf, form in wanted.items())
        return [fault for fault in found if fault]

    def was_of_other_shape(self) -> bool:
        """Whether the parameter is known to have another shape in the checkpoint."""
        return self.stored is not None and self.stored.shape != tuple(self.parameter.shape)

    def _fault(self, leaf: Path, wanted: Tensor, current: Any) -> str | None:
        """Say what is wrong with one tensor.

        Shapes may differ (factors of Adafactor and Shampoo; low-rank moments of a parameter that
        has the same shape there), except where the checkpoint's parameter was another.
        """
        shape = tuple(self.parameter.shape)
        if leaf[-1] not in _OF_PARAMETER_SHAPE or wanted.shape == shape:
            return None
        if self.stored is not None and self.stored.shape == shape:
            return None
        if isinstance(current, torch.Tensor) and tuple(current.shape) == wanted.shape:
            return None
        return (
            f"{dotted(leaf)} has shape {list(wanted.shape)} in the checkpoint, and its parameter "
            f"{list(shape)} in the target"
        )

    def dtype_of(self, leaf: Path, wanted: Tensor) -> torch.dtype:
        """Choose the dtype: the checkpoint's, unless the parameter has another one here.

        torch.optim makes moments in their parameter's dtype and cannot step with others: what had
        its parameter's dtype there gets its parameter's dtype here, which takes ``cast=True`` as
        the parameter itself does. Counters and scalars are the same for parameters of all dtypes.
        """
        dtype = TORCH_DTYPES[wanted.dtype]
        follows = (
            self.stored is not None
            and self.stored.dtype == wanted.dtype
            and dtype.is_floating_point
            and self.parameter.is_floating_point()
            and not self._is_counter(leaf, wanted)
        )
        return self.parameter.dtype if follows else dtype

    def _is_counter(self, leaf: Path, wanted: Tensor) -> bool:
        return not wanted.shape and (self.parameter.ndim > 0 or leaf[-1] == "step")

    def _counter_device(self) -> torch.device:
        # torch.optim keeps step counters on the CPU unless they are captured or fused.
        on_device = self.options.get("capturable") or self.options.get("fused")
        return self._device() if on_device else torch.device("cpu")

    def _device(self) -> torch.device:
        held = self.parameter
        return held.to_local().device if isinstance(held, DTensor) else held.device


def new_numbered(optimizer: Optimizer, leaf: Path, rest: Path, wanted: Tensor) -> torch.Tensor:
    """Make what an optimizer's own ``load_state_dict`` gets: shards, for sharded parameters.

    Args:
        rest: ``leaf`` below the optimizer: ``("state", 3, "exp_avg")`` where torch numbers it.

    Raises:
        StateError: parameters of this shape are sharded in several ways, and nothing tells which
            of them the tensor belongs to.
    """
    dtype = TORCH_DTYPES[wanted.dtype]
    listed = _parameters(optimizer)
    number = rest[1] if len(rest) > 2 and rest[0] == "state" else None
    if type(number) is int and 0 <= number < len(listed):
        listed = [listed[number]]
    alike = [p for p in listed if isinstance(p, DTensor) and tuple(p.shape) == wanted.shape]
    if not alike:
        return torch.empty(wanted.shape, dtype=dtype, device="cpu")
    if any(
        (p.device_mesh, p.placements) != (alike[0].device_mesh, alike[0].placements) for p in alike
    ):
        raise StateError(
            f"{dotted(leaf)} has shape {list(wanted.shape)}, like several parameters with "
            "different shardings, and its name does not tell which is meant. Take one optimizer "
            "step before the load, or name this state by parameter"
        )
    return _empty_like(alike[0], dtype)


def _empty_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of the same kind: outside of torch's own hooks a subclass would be lost."""
    made, kind = torch.empty_like(parameter.detach(), dtype=dtype), type(parameter)
    return made if kind is torch.nn.Parameter or isinstance(made, kind) else made.as_subclass(kind)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
