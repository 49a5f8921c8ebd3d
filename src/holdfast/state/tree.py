"""A nested state → a flat map of paths to leaves. Knows no files and no other ranks.

Dicts are opened; lists and tuples are opened only when a tensor or a stateful object is inside,
else they are one JSON-like leaf. Modules and optimizers get canonical names (`modules`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import StateError
from ..format.names import dotted
from ..format.values import encode_value, path_text
from ..layout import Key, Path
from .ambient import ordinary_torch
from .flat_optimizer import state_of_run
from .memory import ORDINARY
from .modules import (
    ParameterNames,
    group_options,
    group_tensors,
    module_state,
    optimizer_names,
    parameter_names,
)
from .optimizers import holder, is_plain, own_state
from .shard import TENSORS, Shard
from .tensors import LocalTensor, local_tensors, mesh_of
from .value import Value
from .wrapped import warn_of_old, wrapped_optimizer

Setter = Callable[[Any], None]  # replaces a value where it stands: in a dict, a list or a tuple

DEPTH_MAX = 100  # of containers and stateful objects; more is a cycle or a mistake


@dataclass(slots=True)
class Leaves:
    """A state laid flat.

    Attributes:
        tensors: every tensor by path, in the state's order, tied ones included.
        objects: every JSON-like leaf by path.
        exact: tensors that are an optimizer's state, so that they differ only by mistake.
        mesh: of the first DTensor, for people.
        optimizers: those of which every tensor is named by its parameter.
        ties: {further path: first path} of tensors that share one memory.
    """

    tensors: dict[Path, LocalTensor] = field(default_factory=dict)
    objects: dict[Path, Any] = field(default_factory=dict)
    exact: set[Path] = field(default_factory=set)
    mesh: dict[str, Any] | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    ties: dict[Path, Path] = field(default_factory=dict)


def flatten(state: Mapping[Any, Any]) -> Leaves:
    """Lay a state flat: ``{"model": {"w": t}, "step": 3}`` → tensors ``model.w``, objects ``step``.

    Raises:
        StateError: a leaf that cannot be saved; the text names its path.
    """
    leaves = Leaves()
    modules = modules_in(state)
    walk = _Walk(leaves, parameter_names(modules) if modules else {})
    walk.visit(state, ())
    whole = leaves.objects.pop((), {})
    if not isinstance(whole, Mapping) or whole:  # an empty state is a state
        raise StateError(
            f"the state is {whole!r:.80}; expected a dict with str or int keys, such as "
            '{"model": model}'
        )
    if walk.groups:
        warn_of_old(walk.groups)
    leaves.tensors = local_tensors(walk.found)
    first: dict[object, Path] = {}
    for path, tensor in leaves.tensors.items():
        if (tie := tensor.tie) is not None and (before := first.setdefault(tie, path)) is not path:
            leaves.ties[path] = before
        if not tensor.plain and leaves.mesh is None:
            leaves.mesh = mesh_of(walk.found[path])
    return leaves


def plain_key(key: Key) -> Key:
    """Return the text or number of a key: the str() of an enumeration is another text."""
    if isinstance(key, str):
        return str.__str__(key)
    return int.__int__(key) if isinstance(key, int) else key


def items_of(value: Any) -> Iterator[tuple[Key, Any]]:
    """Return the items of a dict with its own keys, of a list or tuple with those of paths."""
    if isinstance(value, Mapping):
        yield from value.items()
    else:
        kind = "list" if isinstance(value, list) else "tuple"
        for position, item in enumerate(value):
            yield (kind, position), item  # type: ignore[misc]


def modules_in(state: object) -> dict[Path, nn.Module]:
    """Find the modules in a state, outermost only, without a look at its tensors."""
    found: dict[Path, nn.Module] = {}
    waiting: list[tuple[object, Path, tuple[int, ...]]] = [(state, (), ())]
    while waiting:
        value, path, above = waiting.pop()
        if isinstance(value, nn.Module):
            found[path] = value
        elif isinstance(value, (Mapping, list, tuple)):
            if id(value) in above or len(above) > DEPTH_MAX:
                continue
            within = (*above, id(value))
            items = value.items() if isinstance(value, Mapping) else items_of(value)
            others = [pair for pair in items if not isinstance(pair[1], torch.Tensor)]
            waiting += [(item, (*path, plain_key(key)), within) for key, item in reversed(others)]
    return found


@dataclass(frozen=True, slots=True)
class Node:
    """One place in a state: what stands there, and what is below it when it is opened."""

    kind: Literal["tensor", "module", "optimizer", "stateful", "container", "leaf"]
    items: tuple[tuple[Key, Any], ...] = ()


_TENSOR, _LEAF = Node("tensor"), Node("leaf")


def open_node(value: Any, path: Path) -> Node:
    """Tell what kind of thing a value is; dicts, and lists and tuples with tensors, are opened.

    Raises:
        StateError: a dict that holds tensors has a key that is neither text nor an integer.
    """
    if len(path) > DEPTH_MAX:
        check_depth(len(path), path)
    if isinstance(value, TENSORS):
        return _TENSOR
    if isinstance(value, nn.Module):
        return Node("module")
    if isinstance(value, Optimizer):
        return Node("optimizer" if is_plain(value) else "stateful")
    if _is_stateful(value):
        return Node("stateful")
    if isinstance(value, Mapping) and value:
        if getattr(type(value), "is_checkpoint", False):  # which would be read, and never filled
            raise StateError(
                f"{dotted(path) or 'the state'} is an open checkpoint; give what state() returns"
            )
        if {*map(type, value)} <= _KEYS or all(map(_is_key, value)):
            return Node("container", tuple(value.items()))
        if holds_tensors(value):
            where = dotted(path) or "the state"
            odd = next(key for key in value if not _is_key(key))
            raise StateError(f"{where} holds tensors and the key {odd!r}; expected str or int keys")
    if isinstance(value, (list, tuple)) and holds_tensors(value):
        return Node("container", tuple(items_of(value)))
    return _LEAF


_KEYS = {str, int}
_HELD = (*TENSORS, Value)


def _is_key(key: object) -> bool:
    return isinstance(key, (str, int)) and not isinstance(key, bool)


def check_depth(depth: int, path: Path) -> None:
    """Check that a walk is not endless.

    Raises:
        StateError: it is deeper than any state is meant to be.
    """
    if depth > DEPTH_MAX:
        raise StateError(
            f"{dotted(path)[:80]}… is nested deeper than {DEPTH_MAX} levels; if it contains "
            "itself, remove that reference"
        )


def _is_stateful(value: object) -> bool:
    if not hasattr(value, "state_dict") or isinstance(value, type):
        return False
    return callable(value.state_dict) and callable(getattr(value, "load_state_dict", None))


def holds_tensors(value: object) -> bool:
    """Whether a tensor or a stateful object is anywhere in a value."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _HELD) or _is_stateful(item):
            return True
        if isinstance(item, (Mapping, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting += [child for _, child in items_of(item)]
    return False


class _Walk:
    """One pass over a state; ``names`` are the parameters' names that optimizers use.

    It calls users' hooks in the thread of their user, and touches no tensor itself.
    """

    def __init__(self, leaves: Leaves, names: dict[Path, ParameterNames]) -> None:
        self.leaves = leaves
        self.names = names
        self.found: dict[Path, torch.Tensor | Shard] = {}
        self.depth = 0
        self.exact = False  # whether within an optimizer's state
        self.groups: dict[Path, list[Any]] = {}  # of an optimizer's state_dict()
        self.checked: dict[int, Any] = {}  # values by their ids, held so that these stay theirs

    def visit(self, value: Any, path: Path) -> None:
        self.depth += 1
        if self.depth > DEPTH_MAX:  # an object may save itself as an object that saves itself …
            check_depth(self.depth, path)
        node = open_node(value, path)
        if node.kind == "tensor":
            self._tensor(value, path)
        elif node.kind == "module":
            named = [(name, item) for name, (_, item) in module_state(value, path).items()]
            self._visit_all(named, path)
        elif node.kind == "optimizer":
            self._optimizer(value, path)
        elif node.kind == "stateful":
            self._stateful(value, path)
        elif node.kind == "container":
            self._visit_all(node.items, path)
        else:
            self._object(value, path)
        self.depth -= 1

    def _visit_all(self, items: Sequence[tuple[Key, Any]], path: Path) -> None:
        """Visit what is in a container; tensors, which are many, without a further call."""
        for key, item in items:
            if type(item) not in ORDINARY or type(key) is not str:
                self.visit(item, (*path, plain_key(key)))
                continue
            below = (*path, key)
            if below in self.found or below in self.leaves.objects:
                self._claim(below)
            self.found[below] = item
            if self.exact:
                self.leaves.exact.add(below)

    def _tensor(self, value: torch.Tensor | Shard, path: Path) -> None:
        self._claim(path)
        self.found[path] = value
        if self.exact:
            self.leaves.exact.add(path)

    def _object(self, value: Any, path: Path) -> None:
        if path:
            path_text(path)
        if id(value) not in self.checked:
            encode_value(value, path)  # fails here, with the path, rather than at the commit
            self.checked[id(value)] = value
        self._claim(path)
        self.leaves.objects[path] = value
        if type(value) is list and path[-1:] == ("param_groups",):
            self.groups[path] = value

    def _stateful(self, value: Any, path: Path) -> None:
        state = own_state(value, path)
        inner = wrapped_optimizer(value, state)
        if inner is not None and is_plain(inner):
            self._optimizer(inner, path)
        else:
            self.visit(state, path)

    def _claim(self, path: Path) -> None:
        if path in self.found or path in self.leaves.objects:
            raise StateError(f"two leaves of the state have the path {dotted(path)}; rename one")

    def _optimizer(self, optimizer: Optimizer, path: Path) -> None:
        listed = optimizer_names(optimizer, self.names)
        self.leaves.optimizers.append(optimizer)
        groups, held = optimizer.param_groups, holder(optimizer).state
        # One dict for all parameters of a group: what is done with a value is done once.
        options, tensors = [*map(group_options, groups)], [*map(group_tensors, groups)]
        with ordinary_torch():
            runs = {
                entry.name: state_of_run(state, entry.run, (*path, "state", entry.name))
                for entry in listed
                if entry.run is not None and (state := held.get(entry.tensor))
            }
        for entry in listed:
            self._object(options[entry.group], (*path, "param_groups", entry.name))
            for key, value in tensors[entry.group].items():
                self.visit(value, (*path, "param_group_tensors", entry.name, key))
            if state := runs.get(entry.name, held.get(entry.tensor)):
                self.exact = True
                self.visit(state, (*path, "state", entry.name))
                self.exact = False
        if not listed:
            self._object({}, path)


def rebuild(leaves: Mapping[Path, Any], like: object = None) -> Any:
    """Nest leaves by path again; containers of ``like`` at the same place lend their type.

    ``{("a", 0): x, ("a", 1): y}`` → ``{"a": {0: x, 1: y}}``

    Raises:
        StateError: one place holds a value and a container, or containers of two kinds.
    """
    if () in leaves and len(leaves) == 1:
        return _typed(leaves[()], like)
    if len({_kind_at(path) for path in leaves}) > 1:
        where = ", ".join(sorted(dotted(path) for path in leaves))
        raise StateError(
            f"these names need containers of different kinds in one place: {where:.200}; read them "
            "one by one, by tensor() and objects()"
        )
    below: dict[Key, dict[Path, Any]] = {}
    for path, value in leaves.items():
        below.setdefault(path[0], {})[path[1:]] = value
    guide = dict(items_of(like)) if isinstance(like, (Mapping, list, tuple)) else {}
    items = {key: rebuild(part, guide.get(key)) for key, part in below.items()}
    first = next(iter(items), None)
    if isinstance(first, tuple):
        ordered = [items[key] for key in sorted(items, key=_position)]
        return ordered if first[0] == "list" else tuple_like(like, ordered)
    return _typed(items, like)


def _position(key: Key) -> int:
    return key[1] if isinstance(key, tuple) else -1


def _kind_at(path: Path) -> str:
    """Tell what stands where a path begins: a value, a dict, a list or a tuple."""
    if not path:
        return "value"
    return path[0][0] if isinstance(path[0], tuple) else "dict"


def _typed(value: Any, like: object) -> Any:
    """Give a plain dict or tuple the type that stands in its place."""
    if isinstance(value, tuple):
        return tuple_like(like, list(value))
    if type(value) is dict and isinstance(like, dict) and type(like) is not dict:
        filled = like.copy()  # a Counter stays one, a defaultdict keeps its factory
        filled.clear()
        filled.update(value)
        return filled
    return value


def tuple_like(like: object, items: list[Any]) -> tuple[Any, ...]:
    """Make a tuple, a named one where ``like`` is."""
    fits = isinstance(like, tuple) and len(like) == len(items)
    result: tuple[Any, ...] = (getattr(like, "_make", tuple) if fits else tuple)(items)
    return result


def look_up(value: Any, path: Path) -> Any:
    """Return what is at a path in nested containers, None where nothing is."""
    for key in path:
        place = key[1] if isinstance(key, tuple) else key
        try:
            value = value[place]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def no_setter(value: Any) -> None:
    """Ignore the value: an empty target has nothing to set."""


def item_setter(items: Any, key: Any, parent_setter: Setter, parent: Any) -> Setter:
    """Return what replaces one item; ``items`` is the parent, or a tuple's items as a list."""
    place = key[1] if isinstance(parent, (list, tuple)) else key

    def replace(value: Any) -> None:
        items[place] = value
        if isinstance(parent, tuple):
            parent_setter(tuple_like(parent, items))

    return replace
