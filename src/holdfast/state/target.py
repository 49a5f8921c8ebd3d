"""A state to fill → the tensors and leaves to put into it. Knows no files and no other ranks.

Nothing of the target changes while it is bound: tensors are filled by the engine, and everything
    else (objects,
optimizer state that did not exist, ``load_state_dict`` of what wants it) happens in
`Target.finish`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..format.names import dotted
from ..layout import Box, Path, Tensor
from .modules import (
    ParameterNames,
    group_tensors,
    load_module_state,
    module_state,
    optimizer_names,
    parameter_names,
)
from .tensors import TORCH_DTYPES, LocalTensor, local_tensor
from .tree import find_modules, holds_tensors, open_node, rebuild, tuple_like

Setter = Callable[[Any], None]

_EXTRA_STATE = "_extra_state"  # what get_extra_state() returns, in a module's state_dict


@dataclass(frozen=True, slots=True)
class Source:
    """What a checkpoint offers: tensors (tied names included) and objects by path."""

    tensors: Mapping[Path, Tensor]
    objects: Mapping[Path, Any]
    _below: dict[Path, list[Path]] = field(default_factory=dict)

    def below(self, path: Path) -> list[Path]:
        """Return the paths that begin with ``path``."""
        if not self._below:
            for known in (*self.tensors, *self.objects):
                for n in range(len(known) + 1):
                    self._below.setdefault(known[:n], []).append(known)
        return self._below.get(path, [])


@dataclass(slots=True)
class Target:
    """What a load fills.

    Attributes:
        tensors: to be filled, by path.
        missing: paths the target wants and the checkpoint has not.
        used: paths of the checkpoint that the target takes.
        conflicts: what else does not fit, one sentence each.
    """

    tensors: dict[Path, LocalTensor] = field(default_factory=dict)
    missing: list[Path] = field(default_factory=list)
    used: set[Path] = field(default_factory=set)
    conflicts: list[str] = field(default_factory=list)
    actions: list[Callable[[], None]] = field(default_factory=list)

    def targets(self) -> dict[Path, tuple[torch.Tensor, Box]]:
        """Return what this process holds of each tensor, and which box that is."""
        return {path: (leaf.data, leaf.shard.box) for path, leaf in self.tensors.items()}

    def finish(self) -> None:
        """Put everything that is not a tensor in place; call it once all tensors are filled."""
        for action in self.actions:
            action()


def bind(into: Mapping[Any, Any], source: Source) -> Target:
    """Match a target with what a checkpoint offers.

    Optimizer state that does not exist yet is made in the shape of its parameter (of the same
    DTensor placements), with the checkpoint's dtype; no optimizer step is taken for it.

    Raises:
        StateError: the target holds something that no checkpoint could.
    """
    target = Target()
    _Bind(target, source, parameter_names(dict(find_modules(into)))).visit(into, (), _no_setter)
    return target


def _no_setter(value: Any) -> None:
    """Ignore the value: an empty target has nothing to set."""


class _Bind:
    """One pass over a target."""

    def __init__(self, target: Target, source: Source, names: dict[Path, ParameterNames]) -> None:
        self.target = target
        self.source = source
        self.names = names

    def visit(self, value: Any, path: Path, setter: Setter) -> None:
        """Bind one node; ``setter`` replaces it in its parent."""
        node = open_node(value, path)
        if node.kind == "tensor":
            self._tensor(value, path)
        elif node.kind == "module":
            self._module(value, path)
        elif node.kind == "optimizer":
            self._optimizer(value, path)
        elif node.kind == "stateful":
            self._stateful(value, path)
        elif node.kind == "container" and not self._is_one_value(value, path):
            items = list(value) if isinstance(value, tuple) else value
            for key, item in node.items:
                self.visit(item, (*path, key), _item_setter(items, key, setter, value))
        elif path:
            self._object(path, setter)

    def _is_one_value(self, value: Any, path: Path) -> bool:
        """Whether a container is replaced as a whole: not when tensors would go with it."""
        return path in self.source.objects and not holds_tensors(value)

    def _tensor(self, value: torch.Tensor, path: Path) -> None:
        if path not in self.source.tensors:
            self.target.missing.append(path)
            return
        self.target.used.add(path)
        self.target.tensors[path] = local_tensor(value, path)

    def _object(self, path: Path, setter: Setter) -> None:
        if path not in self.source.objects:
            self.target.missing.append(path)
            return
        self.target.used.add(path)
        self.target.actions.append(lambda: setter(self.source.objects[path]))

    def _module(self, module: nn.Module, path: Path) -> None:
        values: dict[str, Any] = {}
        for name, (own_key, item) in module_state(module, path).items():
            values[own_key] = item
            if name.endswith(_EXTRA_STATE):
                self._extra_state(item, (*path, name), values, own_key)
                continue
            self.visit(item, (*path, name), _item_setter(values, own_key, _no_setter, values))
        self.target.actions.append(lambda: load_module_state(module, values))

    def _extra_state(self, current: Any, path: Path, values: dict[str, Any], key: str) -> None:
        """Bind what ``get_extra_state`` returned, of which only the checkpoint knows the form."""
        found = self.source.below(path)
        if not found:
            self.target.missing.append(path)
            return
        filled = self._filled(found, path, current, _new_plain)
        self.target.actions.append(lambda: values.update({key: rebuild(filled, current)}))

    def _stateful(self, value: Any, path: Path) -> None:
        """Let the checkpoint say what is in it, as ``load_state_dict`` always has it."""
        found = self.source.below(path)
        if not found:
            self.target.missing.append(path)
            return
        current = value.state_dict()
        filled = self._filled(found, path, current, _new_plain)
        self.target.actions.append(lambda: value.load_state_dict(rebuild(filled, current)))

    def _filled(
        self, found: list[Path], path: Path, current: Any, make: Callable[[Tensor], torch.Tensor]
    ) -> dict[Path, Any]:
        """Take everything below ``path``; tensors go into those of ``current`` where they fit.

        Returns:
            By the rest of the path: objects, and the tensors that are going to be filled.
        """
        result: dict[Path, Any] = {}
        memories: dict[object, Tensor] = {}
        for leaf in found:
            self.target.used.add(leaf)
            rest = leaf[len(path) :]
            if leaf in self.source.objects:
                result[rest] = self.source.objects[leaf]
                continue
            wanted = self.source.tensors[leaf]
            tensor = _look_up(current, rest)
            local = local_tensor(tensor, leaf) if _fits(tensor, wanted) else None
            # Memory that is shared here and was not shared there cannot hold both.
            if local is None or memories.setdefault(local.tie, wanted) is not wanted:
                tensor = make(wanted)
                local = local_tensor(tensor, leaf)
            self.target.tensors[leaf] = local
            result[rest] = tensor
        return result

    def _optimizer(self, optimizer: Optimizer, path: Path) -> None:
        listed = optimizer_names(optimizer, self.names)
        groups: dict[int, dict[str, Any]] = {}
        for parameter, name, group in listed:
            options = (*path, "param_groups", name)
            if options not in self.source.objects:
                self.target.missing.append(options)
                continue
            self.target.used.add(options)
            saved = self.source.objects[options]
            if groups.setdefault(group, saved) != saved:
                self.target.conflicts.append(
                    f"{dotted(path)}: group {group} holds {name}, saved with {saved}, "
                    f"and others saved with {groups[group]}"
                )
            for key, tensor in group_tensors(optimizer.param_groups[group]).items():
                self.visit(tensor, (*path, "param_group_tensors", name, key), _no_setter)
            self._parameter_state(optimizer, parameter, group, (*path, "state", name))
        if not listed and path in self.source.objects:
            self.target.used.add(path)
        self.target.actions.append(lambda: _set_groups(optimizer, groups))

    def _parameter_state(
        self, optimizer: Optimizer, parameter: torch.Tensor, group: int, path: Path
    ) -> None:
        """Bind the state of one parameter; what the checkpoint lacks (a frozen one) is dropped."""
        found = self.source.below(path)
        if not found:
            self.target.actions.append(lambda: optimizer.state.pop(parameter, None))
            return
        current = optimizer.state.get(parameter, {})
        options = optimizer.param_groups[group]
        make = lambda wanted: _new_state(wanted, parameter, options)  # noqa: E731
        filled = self._filled(found, path, current, make)

        def put() -> None:
            optimizer.state[parameter] = rebuild(filled, current)

        self.target.actions.append(put)


def _item_setter(items: Any, key: Any, parent_setter: Setter, parent: Any) -> Setter:
    """Return what replaces one item; ``items`` is the parent, or a tuple's items as a list."""
    place = key[1] if isinstance(parent, (list, tuple)) else key

    def replace(value: Any) -> None:
        items[place] = value
        if isinstance(parent, tuple):
            parent_setter(tuple_like(parent, items))

    return replace


def _look_up(value: Any, path: Path) -> Any:
    for key in path:
        place = key[1] if isinstance(key, tuple) else key
        try:
            value = value[place]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _fits(tensor: Any, wanted: Tensor) -> bool:
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != wanted.shape:
        return False
    expanded = any(n > 1 and s == 0 for n, s in zip(wanted.shape, tensor.stride(), strict=True))
    return tensor.dtype == TORCH_DTYPES[wanted.dtype] and not expanded


def _new_plain(wanted: Tensor) -> torch.Tensor:
    return torch.empty(wanted.shape, dtype=TORCH_DTYPES[wanted.dtype])


def _new_state(wanted: Tensor, parameter: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Make optimizer state that does not exist: like its parameter when it has its shape."""
    dtype = TORCH_DTYPES[wanted.dtype]
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    if not wanted.shape and (parameter.ndim or wanted.path[-1] == "step"):
        # torch.optim keeps step counters on the CPU unless they are captured or fused.
        on_device = options.get("capturable") or options.get("fused")
        return torch.empty((), dtype=dtype, device=device if on_device else "cpu")
    if tuple(parameter.shape) == wanted.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty(wanted.shape, dtype=dtype, device=device)


def _set_groups(optimizer: Optimizer, groups: dict[int, dict[str, Any]]) -> None:
    for index, options in groups.items():
        optimizer.param_groups[index].update(options)
