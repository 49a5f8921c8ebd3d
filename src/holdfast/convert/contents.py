"""What `pickles` reads → tensors and plain values by path, as a state is laid flat. No files."""

from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import StateError
from ..format.names import dotted
from ..format.values import path_text
from ..layout import Path
from .inert import Global, Inert, kind_of
from .plain_calls import Array, ArrayType, Buffer
from .rebuild import Storage, StoredTensor

SHOWN_MAX = 5  # objects that an error names
_NO_DATA = {Inert, Global, Storage, ArrayType, StoredTensor}


@dataclass(slots=True)
class Contents:
    """What is in a pickle.

    Attributes:
        tensors: by path, tied ones included.
        values: plain data by path.
        inert: {path: name of a class} of what is neither; of what is within a value, by its text.
    """

    tensors: dict[Path, StoredTensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    inert: dict[Path, str] = field(default_factory=dict)

    def ties(self) -> dict[Path, Path]:
        """Return {further path: first path} of tensors that are the same elements."""
        first: dict[str, Path] = {}  # by text, whose hash no file can foresee
        return {
            path: owner
            for path, tensor in self.tensors.items()
            if tensor.size_bytes and (owner := first.setdefault(repr(tensor), path)) != path
        }

    def left_out(self) -> tuple[str, ...]:
        """Say what is no plain data, and left out."""
        return tuple(f"left out {dotted(p)}, of {name}" for p, name in self.inert.items())

    def check_plain(self, where: str) -> None:
        """Check that all of it is plain data.

        Raises:
            StateError: it is not; the text names what is none.
        """
        if not self.inert:
            return
        shown = [f"{dotted(p) or 'the whole'} ({name})" for p, name in self.inert.items()]
        more = f" and {len(shown) - SHOWN_MAX} more" * (len(shown) > SHOWN_MAX)
        raise StateError(
            f"{where} holds objects that are no plain data: {', '.join(shown[:SHOWN_MAX])}{more}. "
            "Nothing of them was run. Where their classes are installed and you trust the file, "
            "load it with torch.load(…, weights_only=False), and save the tensors, numbers and "
            "texts in it again"
        )


def lay_flat(root: Any, where: str, below: Path = (), *, leave_out: bool = False) -> Contents:
    """Lay what was read flat, with the paths that the same state would have in `holdfast.save`.

    Args:
        root: from `read_pickle`.
        where: for people.
        below: path of the root; with one, the root may be anything.
        leave_out: take entries that are no plain data out of dicts and namespaces within values.

    Raises:
        StateError: the root is no dict, or a dict with tensors has keys of other kinds.
    """
    if not below and not isinstance(root, dict):
        what = "one tensor" if type(root) is StoredTensor else kind_of(root)
        raise StateError(
            f"{where} holds {what}; expected a dict. Save it again under a name: "
            'torch.save({"name": torch.load(…)}, …)'
        )
    contents = Contents()
    _Walk(contents, where, leave_out).visit(root, below)
    return contents


class _Walk:
    """One pass; `check_tree` has bounded its depth and its length."""

    def __init__(self, contents: Contents, where: str, leave_out: bool) -> None:
        self._contents, self._where, self._leave_out = contents, where, leave_out
        self._known: dict[int, bool] = {}  # whether a container holds tensors, by its id

    def visit(self, value: Any, path: Path) -> None:
        if type(value) is StoredTensor:
            path_text(path)
            self._contents.tensors[path] = value
        elif isinstance(value, dict) and value and self._is_opened(value, path):
            for key, item in value.items():
                self.visit(item, (*path, key))
        elif type(value) in (list, tuple) and self._holds_tensors(value):
            kind = "list" if type(value) is list else "tuple"
            for position, item in enumerate(value):
                self.visit(item, (*path, (kind, position)))  # type: ignore[arg-type]
        elif path or value:  # an empty file is an empty state
            self._leaf(value, path)

    def _is_opened(self, value: dict[Any, Any], path: Path) -> bool:
        others = [key for key in value if type(key) not in (str, int)]
        if not others:
            return True
        if self._holds_tensors(value):
            raise StateError(
                f"{self._where}: {dotted(path) or 'the whole'} holds tensors and the key "
                f"{others[0]!r:.80}; expected text or integers as keys"
            )
        return False

    def _leaf(self, value: Any, path: Path) -> None:
        path_text(path)
        left: dict[Path, str] = {}
        try:
            found = plain(value, left)
        except StateError as error:
            self._contents.inert[path] = str(error)
        else:
            if self._leave_out or not left:
                self._contents.values[path] = found
        for rest, name in left.items():
            self._contents.inert[(*path, *rest)] = name

    def _holds_tensors(self, value: Any) -> bool:
        if type(value) is StoredTensor:
            return True
        if not isinstance(value, (dict, list, tuple)) or not value:
            return False
        if id(value) not in self._known:
            below = value.values() if isinstance(value, dict) else value
            self._known[id(value)] = any(map(self._holds_tensors, below))
        return self._known[id(value)]


def plain(value: Any, left: "dict[Path, str] | None" = None) -> Any:
    """Return a value with arrays of numpy in the place of their descriptions.

    Args:
        left: takes the entries of dicts and namespaces that are no plain data, and are left out.

    Raises:
        StateError: something in it is no plain data; the text is its name.
    """
    kind = type(value)
    if kind is Array:
        return value.array()
    if kind in _NO_DATA:
        name = "a tensor" if kind is StoredTensor else kind_of(value)
        raise StateError(value.name if kind is Inert else name)
    if kind is Buffer:
        return value.buffer()
    if isinstance(value, dict):
        items = dict(_entries(value, left))
        return OrderedDict(items) if kind is OrderedDict else items
    if kind is Namespace:
        return Namespace(**dict(_entries(vars(value), left)))
    if kind in (list, tuple, set, frozenset, deque):
        return kind(map(plain, value))
    return value


def _entries(value: dict[Any, Any], left: "dict[Path, str] | None") -> Iterator[tuple[Any, Any]]:
    for key, item in value.items():
        below: dict[Path, str] | None = None if left is None else {}
        try:
            yield plain(key), plain(item, below)
        except StateError as error:
            if left is None:
                raise
            left[(str(key),)] = str(error)
        for path, name in (below or {}).items():
            if left is not None:
                left[(str(key), *path)] = name
