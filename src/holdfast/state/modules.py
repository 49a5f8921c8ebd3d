"""Canonical names of modules, and of optimizers by their parameters' names.

Wrappers (DDP, DataParallel, torch.compile, activation checkpointing) leave no trace in a name, so a
checkpoint loads with or without them. Optimizers are named by parameter, not by position, so their
state loads whatever the order or number of groups: ``state.<parameter>.exp_avg``,
``param_groups.<parameter>``.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..errors import StateError
from ..format.names import dotted
from ..layout import Path

_WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

# Those of torch that copy every value in place, and look only at what is missing.
_LOADERS_IN_PLACE = (
    nn.Module._load_from_state_dict,
    nn.modules.batchnorm._NormBase._load_from_state_dict,
    nn.modules.instancenorm._InstanceNorm._load_from_state_dict,
)

ParameterNames = dict[int, str]  # id of the parameter → canonical name


def module_state(module: nn.Module, path: Path) -> dict[str, tuple[str, Any]]:
    """Return ``state_dict()`` by canonical name: {canonical: (own key, value)}.

    Raises:
        StateError: two keys have the same canonical name, or the parameters are flat pieces.
    """
    inner = _unwrap(module)
    _check_not_flat(inner, path)
    result: dict[str, tuple[str, Any]] = {}
    for key, value in inner.state_dict().items():
        name = canonical_name(key)
        if name in result:
            raise StateError(f"{dotted(path)} has both {result[name][0]!r} and {key!r}")
        result[name] = (key, value)
    return result


def load_module_state(module: nn.Module, values: dict[str, Any]) -> None:
    """Give own keys back through ``load_state_dict``, unless every value is already in place."""
    inner = _unwrap(module)
    if _needs_loading(inner, values):
        inner.load_state_dict(_with_versions(inner, values))


def canonical_name(key: str) -> str:
    """Drop the segments that wrappers put into names."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPER_SEGMENTS)


def parameter_names(modules: dict[Path, nn.Module]) -> dict[Path, ParameterNames]:
    """Name the parameters of each module, canonically."""
    return {
        path: {
            id(parameter): canonical_name(name)
            for name, parameter in _unwrap(module).named_parameters()
        }
        for path, module in modules.items()
    }


def optimizer_names(
    optimizer: Optimizer, names: dict[Path, ParameterNames]
) -> list[tuple[torch.Tensor, str | int, int]]:
    """Name each parameter of an optimizer.

    A parameter of a module in the state has that module's name for it; when the parameters come
    from several modules, the module's path goes before it. A parameter of no module has its
    position.

    Returns:
        (parameter, name, index of its group) in the optimizer's order.

    Raises:
        StateError: the parameters are flat pieces.
    """
    listed = [(p, g) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    if any(getattr(parameter, "_is_flat_param", False) for parameter, _ in listed):
        raise StateError(
            "an optimizer of the state has flat parameters of FullyShardedDataParallel, of which "
            "each rank holds a piece; use fully_shard, or give FSDP.optim_state_dict(…)"
        )
    owners = [[path for path, known in names.items() if id(p) in known] for p, _ in listed]
    several = len({found[0] for found in owners if found}) > 1
    result: list[tuple[torch.Tensor, str | int, int]] = []
    for position, ((parameter, group), found) in enumerate(zip(listed, owners, strict=True)):
        name: str | int = position
        if found:
            name = names[found[0]][id(parameter)]
            name = f"{dotted(found[0])}.{name}" if several else name
        result.append((parameter, name, group))
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


def _unwrap(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def _needs_loading(module: nn.Module, values: dict[str, Any]) -> bool:
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


def _check_not_flat(module: nn.Module, path: Path) -> None:
    for part in module.modules():
        # By name: the import takes a second, and the class is the one torch retires.
        is_flat = any(kind.__name__ == "FullyShardedDataParallel" for kind in type(part).__mro__)
        if is_flat and getattr(part, "world_size", 1) > 1:
            raise StateError(
                f"{dotted(path)} is in FullyShardedDataParallel, whose ranks hold pieces of flat "
                "parameters; use torch.distributed.fsdp.fully_shard, or give its state_dict() "
                "(and FSDP.optim_state_dict) under FSDP.state_dict_type with sharded DTensors"
            )


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (local.data_ptr(), tuple(local.shape), local.stride()) if local.numel() else ()
