"""A state to fill → the tensors and leaves to put into it. Knows no files and no other ranks.

Nothing of the target changes while it is bound: tensors are filled by the engine, and everything
else (objects, optimizer state that did not exist, ``load_state_dict`` of what wants it) happens in
`Target.finish`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import worker
from ..errors import StateError
from ..format.names import dotted
from ..layout import Path, Tensor
from .ambient import computes_nothing, fake_load, ordinary_torch
from .assign import Assignment, device_of
from .filled import Target, Waiting
from .memory import ORDINARY
from .modules import (
    ParameterNames,
    load_module_state,
    module_state,
    needs_loading,
    parameter_names,
)
from .optimizer_target import Maker, MayKeep, OptimizerTarget
from .optimizers import (
    is_named,
    is_numbered,
    keeps_protocol,
    new_numbered,
    numbers_of,
    own_state,
    states_of,
)
from .overlap import find_overlaps
from .shard import Shard
from .source import Source
from .tensors import TORCH_DTYPES, LocalTensor, fits, local_tensor
from .tree import (
    DEPTH_MAX,
    Setter,
    holds_tensors,
    item_setter,
    items_of,
    look_up,
    modules_in,
    no_setter,
    open_node,
    plain_key,
    rebuild,
)
from .value import Value
from .wrapped import looks_wrapped, wrapped_optimizer

_EXTRA_STATE = "_extra_state"  # what get_extra_state() returns, in a module's state_dict


def bind(
    into: Mapping[Any, Any], source: Source, *, skips: bool = False, assign: object = False
) -> Target:
    """Match a target with what a checkpoint offers.

    Optimizer state that does not exist yet is made in the shape of its parameter (of the same
    DTensor placements), with the checkpoint's dtype; no optimizer step is taken for it.

    Args:
        skips: leave out optimizer state that does not fit its parameter, instead of a conflict.
        assign: give modules on the meta device new memory, as `holdfast.load` says.

    Raises:
        StateError: the target holds something that no checkpoint could.
        OptionError: ``assign`` is no device.
    """
    target = Target()
    modules = modules_in(into)
    walk = _Bind(target, source, parameter_names(modules) if modules else {})
    walk.skips = skips
    if assign is not False:
        walk.assignment = Assignment(device_of(assign))
    walk.visit(into, (), no_setter)
    with ordinary_torch():
        target.plain.take(walk.later, walk.take)
        near = target.plain.touching(target.tensors.values())
        if near or target.tensors:
            target.conflicts += find_overlaps(near | target.tensors)
    return target


class _Bind(OptimizerTarget):
    """One pass over a target.

    It calls users' hooks in the thread of their user, and touches no tensor itself: ``later`` does
    that, behind it.
    """

    def __init__(self, target: Target, source: Source, names: dict[Path, ParameterNames]) -> None:
        self.target = target
        self.source = source
        self.names = names
        self.skips = False
        self.assignment: Assignment | None = None
        self.memories: dict[object, tuple[Path, Tensor]] = {}
        self.later: list[Waiting] = []

    def visit(self, value: Any, path: Path, setter: Setter) -> None:
        """Bind one node; ``setter`` replaces it in its parent."""
        is_shallow = len(path) < DEPTH_MAX and type(value) is dict
        if is_shallow and path not in self.source.objects and _is_plain_dict(value):
            self._items(value.items(), value, path, setter)
            return
        node = open_node(value, path)
        if node.kind == "tensor":
            self._tensor(value, path)
        elif node.kind == "module":
            self._module(value, path)
        elif isinstance(value, Optimizer) or (hasattr(value, "optimizer") and looks_wrapped(value)):
            self._any_optimizer(value, path)
        elif node.kind == "stateful":
            self._stateful(value, path)
        elif node.kind == "container" and not self._is_one_value(value, path):
            self._items(node.items, value, path, setter)
        elif setter is _cannot_set and self.source.below(path):
            raise StateError(
                f"{dotted(path)} is a value in a mapping that cannot be changed, such as a "
                "MappingProxyType; use a dict there. Nothing was loaded"
            )
        elif type(value) is Value:
            self._whole(path, setter)
        elif path:
            grows = isinstance(value, Mapping) and not value
            self._object(path, setter, grows_like=value if grows else None)

    def _items(
        self, items: Iterable[tuple[Any, Any]], parent: Any, path: Path, setter: Setter
    ) -> None:
        """Bind what is in a container; plain tensors without a call for each."""
        tensors, used, later = self.source.tensors, self.target.used, self.later
        kept = list(parent) if isinstance(parent, tuple) else parent
        cannot = setter is _cannot_set if kept is not parent else not hasattr(kept, "__setitem__")
        for key, item in items:
            below = (*path, key if type(key) is str else plain_key(key))
            if type(item) in ORDINARY and (wanted := tensors.get(below)) is not None:
                used.add(below)
                later.append((item, below, wanted))
            else:
                own = _cannot_set if cannot else item_setter(kept, key, setter, parent)
                self.visit(item, below, own)

    def _is_one_value(self, value: Any, path: Path) -> bool:
        """Whether a container is replaced as a whole: not when tensors would go with it."""
        return path in self.source.objects and not holds_tensors(value)

    def _tensor(self, value: torch.Tensor | Shard, path: Path) -> None:
        if path not in self.source.tensors:
            is_value = path in self.source.objects
            (self.target.values if is_value else self.target.missing).append(path)
            return
        self.target.used.add(path)
        self.later.append((value, path, self.source.tensors[path]))

    def take(self, value: torch.Tensor | Shard, path: Path) -> None:
        """Take a tensor that is not plain."""
        local, wanted = local_tensor(value, path), self.source.tensors[path]
        other, known = self._claim(local, path, wanted)
        if known is not wanted:
            self.target.conflicts.append(
                f"{dotted(other)} and {dotted(path)} share memory in the target, and are two "
                "tensors in the checkpoint"
            )
        if isinstance(value, DTensor):
            self.target.around[path] = value
        self.target.tensors[path] = local

    def _claim(self, local: LocalTensor, path: Path, wanted: Tensor) -> tuple[Path, Tensor]:
        """Return what the memory of a tensor is filled from: the first that claimed it."""
        tie = object() if local.tie is None else local.tie
        plain = self.target.plain
        if local.tie is not None and (number := plain.at.get(local.data.data_ptr())) is not None:
            own, of = plain.local(number), plain.paths[number]
            self.memories.setdefault(own.tie, (of, self.source.tensors[of]))
        return self.memories.setdefault(tie, (path, wanted))

    def _object(self, path: Path, setter: Setter, grows_like: object = None) -> None:
        if path not in self.source.objects and grows_like is not None:
            self._grown(path, setter, grows_like)
            return
        if path not in self.source.objects:
            self.target.missing.append(path)
            return
        self.target.used.add(path)
        self.target.actions.append(lambda: setter(self.source.objects[path]))

    def _grown(self, path: Path, setter: Setter, like: object) -> None:
        """Give an empty dict the values of one that grew; tensors would have nowhere to go."""
        values = {
            rest: value
            for rest, value in self.source.values_below(path).items()
            # What is in a list is there because a tensor is in it too.
            if not any(isinstance(key, tuple) for key in rest)
        }
        if not values:
            self.target.missing.append(path)
            return
        self.target.used.update((*path, *rest) for rest in values)
        self.target.actions.append(lambda: setter(rebuild(values, like)))

    def _whole(self, path: Path, setter: Setter) -> None:
        """Bind a `Value`: all that the checkpoint has there."""
        found = self.source.below(path)
        if not found:
            self.target.missing.append(path)
            return
        made: dict[int, torch.Tensor] = {}  # tied names share one tensor

        def make(leaf: Path, rest: Path, wanted: Tensor) -> torch.Tensor:
            return made.setdefault(id(wanted), _new_plain(leaf, rest, wanted))

        filled = self._filled(found, path, None, make)
        self.target.actions.append(lambda: setter(rebuild(filled)))

    def _module(self, module: nn.Module, path: Path) -> None:
        values: dict[str, Any] = {}
        new = self.assignment.memory_for(module) if self.assignment else {}
        if self.assignment and new:
            self.target.actions.append(partial(self.assignment.put, module, path, self._is_filled))
        for name, (own_key, own) in module_state(module, path).items():
            item = new.get(name, own)
            values[own_key] = item
            if name.endswith(_EXTRA_STATE):
                self._extra_state(item, (*path, name), values, own_key)
                continue
            if type(item) in ORDINARY:
                self._tensor(item, (*path, name))
            else:
                self.visit(item, (*path, name), item_setter(values, own_key, no_setter, values))
            if name in new:
                keep = partial(self._keep, values, own_key, own, (*path, name))
                self.target.actions.append(keep)
        if computes_nothing() and needs_loading(module, values):
            raise fake_load(path)
        self.target.actions.append(lambda: load_module_state(module, values))

    def _keep(self, values: dict[str, Any], key: str, own: Any, path: Path) -> None:
        if not self._is_filled(path):
            values[key] = own

    def _is_filled(self, path: Path) -> bool:
        return path in self.target.used and path not in self.target.skipped

    def _extra_state(self, current: Any, path: Path, values: dict[str, Any], key: str) -> None:
        """Bind what ``get_extra_state`` returned, of which only the checkpoint knows the form."""
        found, lost = self.source.below(path), self.source.gone_below(path)
        if lost or not found:
            self.target.missing += lost or [path]
            self.target.used.update(found)
            return
        filled = self._filled(found, path, current, _new_plain)
        self.target.actions.append(lambda: values.update({key: rebuild(filled, current)}))

    def _stateful(self, value: Any, path: Path) -> None:
        """Let the checkpoint say what is in it, as ``load_state_dict`` always has it."""
        found = self.source.below(path)
        if not found:
            self.target.missing.append(path)
            return
        if computes_nothing() and any(leaf in self.source.tensors for leaf in found):
            raise fake_load(path)
        current = own_state(value, path)
        make: Maker = _new_plain
        if isinstance(value, Optimizer):
            make = lambda leaf, rest, wanted: new_numbered(value, leaf, rest, wanted)  # noqa: E731
            rests = [leaf[len(path) :] for leaf in found]
            if is_named(rests) and isinstance(current.get("param_groups"), list):
                self.target.conflicts.append(
                    f"{dotted(path)} was saved by its parameters' names, and the target's hooks or "
                    "state_dict() use numbers: load it with an optimizer without them"
                )
        kept: dict[Path, Any] = {}
        lost = self.source.gone_below(path) if self.source.gone or self.source.left_out else []
        if self.source.is_repaired and not lost and not isinstance(value, Optimizer):
            lost = [*_lacking(current, path, set(found))]
        if lost:
            self.target.missing += lost
            self.target.used.update(found)
            if not isinstance(value, Optimizer) or (numbers := numbers_of(lost, path)) is None:
                return  # it stays as it is: no object can take a part of its state
            found = [leaf for leaf in found if leaf[len(path) :][:2] not in numbers]
            kept = states_of(current, numbers)
        filled = self._filled(found, path, current, make)
        filled |= kept  # in place: its tensors are put there later
        self.target.actions.append(
            lambda: worker.call_in_caller(partial(value.load_state_dict, rebuild(filled, current)))
        )

    def _filled(
        self,
        found: list[Path],
        path: Path,
        current: Any,
        make: Maker,
        may_keep: MayKeep = lambda *_: True,
    ) -> dict[Path, Any]:
        """Take everything below ``path``; tensors go into those of ``current`` where they fit.

        Returns:
            By the rest of the path: objects, and the tensors that are going to be filled, which
            are there when `bind` returns.
        """
        result: dict[Path, Any] = {}
        for leaf in found:
            self.target.used.add(leaf)
            rest = leaf[len(path) :]
            if leaf in self.source.objects:
                result[rest] = self.source.objects[leaf]
            else:
                result[rest] = None  # its place in the order
                now = partial(look_up, current, rest)
                self.later.append(partial(self._fill, result, leaf, rest, now, make, may_keep))
        return result

    def _fill(
        self,
        result: dict[Path, Any],
        leaf: Path,
        rest: Path,
        now: Callable[[], Any],
        make: Maker,
        may_keep: MayKeep,
    ) -> None:
        tensor, wanted = now(), self.source.tensors[leaf]
        local = None
        if fits(tensor, wanted) and may_keep(leaf, wanted, tensor):
            local = local_tensor(tensor, leaf)
        # Memory that is shared here and was not shared there cannot hold both.
        if local is None or self._claim(local, leaf, wanted)[1] is not wanted:
            tensor = make(leaf, rest, wanted)
            local = local_tensor(tensor, leaf)
        if isinstance(tensor, DTensor):
            self.target.around[leaf] = tensor
        self.target.tensors[leaf] = local
        result[rest] = tensor

    def _any_optimizer(self, optimizer: Any, path: Path) -> None:
        """Let the checkpoint say whether names or numbers, where this optimizer takes both."""
        rests = [leaf[len(path) :] for leaf in self.source.below(path)]
        if hasattr(optimizer, "optimizer") and not is_numbered(rests):
            optimizer = wrapped_optimizer(optimizer) or optimizer
        is_optimizer = isinstance(optimizer, Optimizer)
        if not is_optimizer or keeps_protocol(optimizer) or is_numbered(rests):
            self._stateful(optimizer, path)
        else:
            self._optimizer(optimizer, path)


def _cannot_set(value: Any) -> None:
    """Stand where a setter would, of what is in a mapping that cannot be changed; never called."""


def _is_plain_dict(value: dict[Any, Any]) -> bool:
    """Whether it is opened, without a look at each of its items."""
    return bool(value) and set(map(type, value)) <= {str, int}


def _new_plain(_leaf: Path, _rest: Path, wanted: Tensor) -> torch.Tensor:
    return torch.empty(wanted.shape, dtype=TORCH_DTYPES[wanted.dtype], device="cpu")


def _lacking(state: Any, path: Path, found: set[Path]) -> Iterator[Path]:
    """Yield what an object's own state has and a checkpoint has not: values may be lost, too."""
    if path in found:
        return
    if not isinstance(state, (Mapping, list, tuple)):
        yield path
        return
    for key, item in items_of(state):
        yield from _lacking(item, (*path, key), found)
