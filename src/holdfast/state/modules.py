"""Canonical names of modules, and of optimizers by their parameters' names.

Wrappers (DDP, DataParallel, torch.compile, activation checkpointing) leave no trace in a name, so a
checkpoint loads with or without them. Optimizers are named by parameter, not by position, so their
state loads whatever the order or number of groups: ``state.<parameter>.exp_avg``,
``param_groups.<parameter>``.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import worker
from ..errors import StateError
from ..format.names import dotted
from ..layout import Path
from .ambient import has_modes, ordinary_torch
from .flat import FlatRun, finish_flat, held_flat, local_state
from .wrappers import canonical_name, flat_wrappers, show_shards, unwrap

# Those of torch that copy every value in place, and look only at what is missing.
_LOADERS_IN_PLACE = (
    nn.Module._load_from_state_dict,
    nn.modules.batchnorm._NormBase._load_from_state_dict,
    nn.modules.instancenorm._InstanceNorm._load_from_state_dict,
)


@dataclass(frozen=True, slots=True)
class Named:
    """The canonical name of a parameter; and which run of it, where a flat one holds it."""

    name: str
    run: FlatRun | None = None


ParameterNames = dict[int, tuple[Named, ...]]  # by the id of what an optimizer has


@dataclass(frozen=True, slots=True)
class Listed:
    """A parameter of an optimizer, or one of those that are flattened in it.

    Attributes:
        tensor: what the optimizer has.
        name: in the optimizer's paths.
        group: index of its group.
        origin: path of the parameter itself, where its module is in the state.
    """

    tensor: torch.Tensor
    name: str | int
    group: int
    run: FlatRun | None
    origin: Path | None


def module_state(module: nn.Module, path: Path) -> dict[str, tuple[str, Any]]:
    """Return ``state_dict()`` by canonical name: {canonical: (own key, value)}.

    Torch's own detaches every parameter, and a mode of the thread would see that, refuse it, or
    return something else: then the parameters themselves are returned.

    Raises:
        StateError: two keys have the same canonical name, or a flat parameter has no names.
    """
    inner = unwrap(module)
    is_flat = any(True for _ in flat_wrappers(inner))
    result: dict[str, tuple[str, Any]] = {}
    state = worker.call_in_caller(lambda: _own_state(inner, is_flat=is_flat))
    for key, value in state.items():
        name = canonical_name(key)
        if name in result:
            raise StateError(
                f"{dotted(path)} has the keys {result[name][0]!r} and {key!r}, which are both "
                f"saved as {name!r}; rename one"
            )
        result[name] = (key, value)
    for held in held_flat(inner, path):
        result |= {name: (name, held.shard) for name in held.names}
    return result


def _own_state(module: nn.Module, *, is_flat: bool) -> Mapping[str, Any]:
    keep_vars = has_modes()
    if is_flat:
        return local_state(module, keep_vars=keep_vars)
    if keep_vars and getattr(module.state_dict, "__func__", None) is nn.Module.state_dict:
        return module.state_dict(keep_vars=True)
    return module.state_dict()


def load_module_state(module: nn.Module, values: dict[str, Any]) -> None:
    """Give own keys back through ``load_state_dict``, unless every value is already in place."""
    inner = unwrap(module)
    if any(True for _ in flat_wrappers(inner)):
        finish_flat(inner, values)
    elif needs_loading(inner, values):
        load = partial(inner.load_state_dict, _with_versions(inner, values))
        worker.call_in_caller(load)


@ordinary_torch()
def parameter_names(modules: dict[Path, nn.Module]) -> dict[Path, ParameterNames]:
    """Name the parameters of each module, canonically."""
    result: dict[Path, ParameterNames] = {}
    for path, module in modules.items():
        inner = unwrap(module)
        show_shards(inner)
        named = inner.named_parameters()
        result[path] = {id(tensor): (Named(canonical_name(name)),) for name, tensor in named}
        flat: dict[int, list[Named]] = {}
        for held in held_flat(inner, path):
            flat.setdefault(id(held.owner), []).append(Named(held.names[0], held.run))
        result[path] |= {key: tuple(names) for key, names in flat.items()}
    return result


def optimizer_names(optimizer: Optimizer, names: dict[Path, ParameterNames]) -> list[Listed]:
    """Name each parameter of an optimizer, in its order.

    A parameter of a module in the state has that module's name for it; when the parameters come
    from several modules, the module's path goes before it. A parameter of no module has its
    position.

    Raises:
        StateError: a flat parameter is of no module in the state.
    """
    listed = [(p, g) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    owners = [[path for path, known in names.items() if id(p) in known] for p, _ in listed]
    several = len({found[0] for found in owners if found}) > 1
    result: list[Listed] = []
    for position, ((tensor, group), found) in enumerate(zip(listed, owners, strict=True)):
        if not found:
            if getattr(tensor, "_is_flat_param", False):
                raise StateError(
                    "an optimizer in the state has flat parameters of FullyShardedDataParallel, "
                    "and their module is missing in the state; add it"
                )
            result.append(Listed(tensor, position, group, None, None))
            continue
        for named in names[found[0]][id(tensor)]:
            name = f"{dotted(found[0])}.{named.name}" if several else named.name
            result.append(Listed(tensor, name, group, named.run, (*found[0], named.name)))
    return result


def group_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group that are no tensors."""
    return {
        key: value
        for key, value in group.items()
        if key not in ("params", "param_names") and not isinstance(value, torch.Tensor)
    }


def group_tensors(group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the hyper-parameters of a group that are tensors (a captured ``lr``)."""
    return {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}


@ordinary_torch()
def needs_loading(module: nn.Module, values: dict[str, Any]) -> bool:
    """Whether something other than the parameters' own memory has to change."""
    own = {_memory(tensor) for tensor in _tensors_of(module)}
    in_place = all(isinstance(v, torch.Tensor) and _memory(v) in own for v in values.values())
    hooked = type(module).load_state_dict is not nn.Module.load_state_dict or any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or type(part)._load_from_state_dict not in _LOADERS_IN_PLACE
        for part in module.modules()
    )
    return hooked or not in_place


def _with_versions(module: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Return values as ``state_dict()`` does: with the versions that classes recognise theirs by.

    Its keys are the present ones, or nothing would have fitted: so are its versions.
    """
    result = OrderedDict(values)
    parts = module.named_modules(remove_duplicate=False)
    versions = {name: {"version": part._version} for name, part in parts}
    result.__dict__["_metadata"] = versions  # where torch puts it and looks for it
    return result


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (local.data_ptr(), tuple(local.shape), local.stride()) if local.numel() else ()
