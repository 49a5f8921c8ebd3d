"""A module filled from a checkpoint of any format; parameters without memory get it first."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import MismatchError, OptionError, shown
from ..format.names import some
from ..layout import Path, Tensor
from ..options import Options
from ..state.ambient import ordinary_torch
from ..state.new import new_tensor
from ..state.tensors import TORCH_DTYPES
from ..state.wrappers import canonical_name
from .checkpoint import Checkpoint
from .load import load
from .opening import open
from .report import LoadReport

if TYPE_CHECKING:
    from .checkpoint import Device

Slot = tuple[nn.Module, str, torch.Tensor]  # a module, the name in it, what is there


def load_model(
    path: "str | os.PathLike[str]",
    model: nn.Module,
    *,
    device: "Device" = "cpu",
    dtype: torch.dtype | None = None,
    strict: bool = True,
    options: Options | None = None,
) -> LoadReport:
    """Fill a module from a checkpoint of any format, wherever its weights are in it.

    Parameters and buffers on the meta device get memory first, so no weight is initialized in vain.
    All others are filled where they are. Tied parameters are filled once.

    Args:
        path: a checkpoint of holdfast, or of another format, as for `holdfast.open`. The names of
            the module are looked for at the top, and below each key at the top, such as ``model``.
        model: the module.
        device: where what is on the meta device is to be.
        dtype: of what is on the meta device and of floating point; default: the checkpoint's.
        strict: raise when the checkpoint lacks a name; otherwise only report it.
        options: settings such as ``io`` and ``trust``.

    Returns:
        What was loaded, and what was missing.

    Raises:
        MismatchError: names, shapes or dtypes differ. Or a buffer on the meta device is in no
            ``state_dict()``, so that no checkpoint can fill it. Nothing was changed.
        HoldfastError: as `holdfast.load`.

    Example:
        ``holdfast.load_model("llama.safetensors", torch.nn.Linear(8, 8))``
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is {shown(model)}; expected a torch.nn.Module")
    with ordinary_torch():
        slots, saved = dict(_slots(model)), _saved_names(model)
        names = {name: slot for name, slot in slots.items() if name in saved}
        lost = [n for n, (_, _, tensor) in slots.items() if tensor.is_meta and n not in saved]
    if lost:
        raise MismatchError(
            f"{some(lost)} of the module are on the meta device, and in no state_dict(): no "
            "checkpoint holds them. Make them on a real device first"
        )
    with open(path, options=options) as checkpoint:
        key, found, missing = _find(checkpoint, names)
        if missing and strict:
            raise MismatchError(
                f"{checkpoint.location} lacks {some(missing)} of the module; found "
                f"{len(found)} others{f' below {key!r}' if key else ''}. Give strict=False to load "
                "the others"
            )
        _check_shapes(checkpoint, found, names)
        with ordinary_torch():
            filled = _materialize(checkpoint, found, names, device, dtype)
    into = _nested({checkpoint.path_of(found[name]): each for name, each in filled.items()})
    report = load(path, into=into, partial=True, cast=dtype is not None, options=options)
    return replace(report, missing=(*missing,))


def _slots(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Yield every place of a tensor by its canonical name."""
    for place, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    full = f"{place}.{name}" if place else name
                    yield canonical_name(full), (module, name, tensor)


def _saved_names(model: nn.Module) -> set[str]:
    return {canonical_name(name) for name in model.state_dict(keep_vars=True)}


def _find(checkpoint: Checkpoint, names: dict[str, Slot]) -> tuple[str, dict[str, str], list[str]]:
    """Find the key that most names of the module are below.

    Returns:
        (the key, or empty; name → that in the checkpoint, one for each tensor; missing names).
    """
    held = set(checkpoint.names())
    keys = ["", *dict.fromkeys(str(checkpoint.path_of(name)[0]) for name in checkpoint.names())]
    counts = {key: sum(_joined(key, name) in held for name in names) for key in keys}
    key = max(counts, key=lambda key: counts[key])
    found, present = dict[str, str](), set[int]()
    for name, (_, _, tensor) in names.items():
        if _joined(key, name) in held and id(tensor) not in present:
            present.add(id(tensor))
            found[name] = _joined(key, name)
    missing = [name for name, (_, _, tensor) in names.items() if id(tensor) not in present]
    return key, found, missing


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _check_shapes(checkpoint: Checkpoint, found: dict[str, str], names: dict[str, Slot]) -> None:
    wrong = [
        f"{name} is {list(checkpoint.info(theirs).shape)} in the checkpoint and "
        f"{list(names[name][2].shape)} in the module"
        for name, theirs in found.items()
        if checkpoint.info(theirs).shape != tuple(names[name][2].shape)
    ]
    if wrong:
        raise MismatchError(f"{checkpoint.location}: {some(wrong)}. Nothing was loaded")


def _materialize(
    checkpoint: Checkpoint,
    found: dict[str, str],
    names: dict[str, Slot],
    device: "Device",
    dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """Give memory to what has none; return every tensor to be filled."""
    new: dict[int, torch.Tensor] = {}
    for name, theirs in found.items():
        tensor = names[name][2]
        if not tensor.is_meta:
            continue
        info = checkpoint.info(theirs)
        stored = TORCH_DTYPES[info.dtype]
        wanted = dtype if dtype is not None and stored.is_floating_point else stored
        if type(tensor) in (nn.Parameter, torch.Tensor):
            form = Tensor(checkpoint.path_of(theirs), info.dtype, info.shape)
            made = new_tensor(form, info.shape, device, wanted)
        else:  # a DTensor, say, keeps its placements
            made = torch.empty_like(tensor, dtype=wanted, device=device)
        if isinstance(tensor, nn.Parameter):
            is_differentiable = made.is_floating_point() or made.is_complex()
            made = nn.Parameter(made, tensor.requires_grad and is_differentiable)
        new[id(tensor)] = made
    for module, name, tensor in names.values():
        if id(tensor) in new:
            held = module._parameters if name in module._parameters else module._buffers
            held[name] = new[id(tensor)]  # type: ignore[assignment]
    return {name: new.get(id(names[name][2]), names[name][2]) for name in found}


def _nested(tensors: dict[Path, torch.Tensor]) -> dict[Any, Any]:
    """Return a state with these paths."""
    state: dict[Any, Any] = {}
    for path, tensor in tensors.items():
        into = state
        for key in path[:-1]:
            into = into.setdefault(key, {})
        into[path[-1]] = tensor
    return state
