"""FullyShardedDataParallel (FSDP1): runs of parameters, out of the flat ones that its ranks hold.

It flattens the parameters of a module, puts them behind each other and gives each rank a part, with
padding. Torch notes which run of which parameter that is, so every parameter has its own name and
shape here, and no rank asks another one. Knows modules; no optimizers, no files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import worker
from ..errors import StateError
from ..format.names import dotted
from ..layout import Path, Shape
from .ambient import ordinary_torch
from .shard import Shard
from .wrappers import canonical_name, flat_wrappers

_FLAT = "_flat_param"  # what torch calls it in state_dict()


@dataclass(frozen=True, slots=True)
class FlatRun:
    """Elements of a parameter that follow each other in a 1-dimensional tensor too.

    Attributes:
        shape: that of the parameter.
        start: how many elements of the parameter come before the run.
        first: how many elements of the tensor do.
        elements: of the run; 0 where a rank has nothing of the parameter.
        length: elements of the tensor.
    """

    shape: Shape
    start: int
    first: int
    elements: int
    length: int

    def of(self, values: torch.Tensor) -> Shard:
        """Return the run in a tensor of ``length`` elements."""
        part = values[self.first : self.first + self.elements]
        return Shard(part, self.shape, start=self.start)


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """A parameter as one rank holds it.

    Attributes:
        names: its own, and those of modules that share it.
        owner: what an optimizer has of it: the flat parameter, or a view of the run alone.
        run: in ``owner``.
        shard: the run itself, in the memory that outlives every forward.
    """

    names: tuple[str, ...]
    owner: torch.Tensor
    run: FlatRun
    shard: Shard


@ordinary_torch()
def held_flat(module: nn.Module, path: Path) -> list[FlatParameter]:
    """List the parameters that a module holds in flat ones; those of NO_SHARD need none of this.

    Raises:
        StateError: a parameter was flattened in another order than that of its elements.
    """
    return [
        held
        for name, part in flat_wrappers(module)
        if getattr(part, "_handle", None) is not None
        for held in _held_in(part._handle, name, path)
    ]


def _held_in(handle: Any, prefix: str, path: Path) -> Iterator[FlatParameter]:
    flat, own_views = handle.flat_param, handle._use_orig_params
    if own_views and not handle.uses_sharded_strategy:
        return  # whole parameters, under their own names
    # Between forward and backward flat.data is gathered; before the first forward there is no more.
    memory = getattr(flat, "_local_shard", flat).detach()
    shared: dict[str, list[str]] = {}
    for info in flat._shared_param_infos:
        first = _joined(info.prim_module_name, info.prim_param_name)
        shared.setdefault(first, []).append(_joined(info.module_name, info.param_name))
    for index, (name, info) in enumerate(zip(flat._fqns, flat._shard_param_infos, strict=True)):
        if not flat._contiguities[index] or flat._param_extensions[index] is not None:
            raise StateError(
                f"{dotted(path)} has {name} in FullyShardedDataParallel; expected a contiguous "
                "parameter (no channels_last) that is no shard itself (no tensor parallelism). Use "
                "torch.distributed.fsdp.fully_shard"
            )
        shape, count = tuple(flat._shapes[index]), info.numel_in_shard or 0
        start, at = info.intra_param_start_idx or 0, info.offset_in_shard or 0
        run = FlatRun(shape, start, at, count, memory.numel())
        names = tuple(canonical_name(_joined(prefix, n)) for n in (name, *shared.get(name, ())))
        owner = flat._params[index] if own_views else flat
        in_owner = FlatRun(shape, start, 0, count, count) if own_views else run
        yield FlatParameter(names, owner, in_owner, run.of(memory))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def local_state(module: nn.Module, *, keep_vars: bool) -> dict[str, Any]:
    """Return ``state_dict()`` of a module with FSDP1 in it, without what its hooks gather.

    What FSDP1 manages is in it as the pieces that the rank holds, or not at all.
    """
    found: dict[str, Any] = {}
    _collect(module, "", found, keep_vars)
    return {key: value for key, value in found.items() if key.split(".")[-1] != _FLAT}


def _collect(part: nn.Module, prefix: str, found: dict[str, Any], keep_vars: bool) -> None:
    """Do as ``nn.Module.state_dict``."""
    wrappers = [wrapper for _, wrapper in flat_wrappers(part)]
    if not wrappers:
        found.update(part.state_dict(prefix=prefix, keep_vars=keep_vars))
        return
    hooked = part not in wrappers  # those of FSDP1 gather
    for before in part._state_dict_pre_hooks.values() if hooked else ():
        before(part, prefix, keep_vars)
    part._save_to_state_dict(found, prefix, keep_vars)
    for name, child in part._modules.items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", found, keep_vars)
    for after in part._state_dict_hooks.values() if hooked else ():
        after(part, found, prefix, {})


def finish_flat(module: nn.Module, values: dict[str, Any]) -> None:
    """Make a module use what has been put into its memory.

    Args:
        values: by own key; only extra states are not in place already.
    """
    for key, value in values.items():
        owner, _, name = key.rpartition(".")
        if name == "_extra_state":
            part = module.get_submodule(owner)
            worker.call_in_caller(partial(part.set_extra_state, value))
    _forget_gathered(module)


@ordinary_torch()
def _forget_gathered(module: nn.Module) -> None:
    """Let the next forward gather anew, and not use what an earlier one has gathered."""
    for _, part in flat_wrappers(module):
        handle = getattr(part, "_handle", None)
        if (
            handle is not None
            and handle.uses_sharded_strategy
            and hasattr(handle.flat_param, "_local_shard")
        ):
            handle.reshard(True)
