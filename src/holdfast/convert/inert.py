"""What a pickle holds once it is read without running it: plain data, and records of calls.

The caller lists the names that mean plain data (`Names`). Whatever else a pickle names or calls is
an `Inert`, which keeps the name, the arguments and the state. `pickles.py` reads the bytes.
"""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from ..errors import CorruptError
from ..format.spec import DIMENSIONS_MAX, TENSOR_BYTES_MAX

DEPTH_MAX = 100  # as in a state
SHARED_MAX = 16  # steps of a walk through the result for each reference in it
SHARED_FREE = 100_000
SIZE_MAX = 1 << 60
KEY_MAX = 1 << 60  # larger integers hash alike: dicts of many would take quadratic time
KEY_ITEMS_MAX = 16  # in a tuple that is a key


class Global(NamedTuple):
    """A name in a file. It has not been imported."""

    module: str
    name: str

    def __str__(self) -> str:
        """Return the dotted name."""
        return f"{self.module}.{self.name}"


class Inert:
    """What an unknown callable would have made: a record of the call.

    Attributes:
        of: the callable: a `Global`, or what another such call would have made.
        name: the dotted name of the callable.
        args, kwargs: what it would have been called with.
        state: what it would have been given by ``__setstate__``, or None.
        items: what would have been appended or added.
        pairs: what would have been set by keys.
    """

    __slots__ = ("args", "items", "kwargs", "name", "of", "pairs", "state")

    def __init__(self, of: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None):
        self.of, self.args, self.kwargs = of, args, kwargs or {}
        self.name: str = of.name if isinstance(of, Inert) else str(of)
        self.state: Any = None
        self.items: list[Any] | None = None
        self.pairs: list[tuple[Any, Any]] | None = None

    def __repr__(self) -> str:
        """Return the name alone."""
        return f"<inert {self.name}>"


class Buildable(ABC):
    """A known object that takes its state in a second step, as arrays of numpy do."""

    __slots__ = ()

    @abstractmethod
    def build(self, state: Any) -> None:
        """Take the state; raise a CorruptError if it is not what it must be."""


Call = Callable[..., Any]
Children = Callable[[Any], "Iterator[Any] | None"]


@dataclass(frozen=True)
class Names:
    """The names that mean plain data. Functions raise a CorruptError for any argument they dislike.

    Attributes:
        constants: {"torch.float32": value}.
        calls: {"torch.Size": function of the arguments}.
        persistent: makes something of a persistent id, or None where there may be none.
    """

    constants: Mapping[str, Any] = field(default_factory=dict)
    calls: Mapping[str, Call] = field(default_factory=dict)
    persistent: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Pickled:
    """What was in a pickle.

    Attributes:
        root: plain data, with `Inert` and what the tables made.
        unknown: the names of all that is `Inert`.
        end: where the pickle ended.
    """

    root: Any
    unknown: frozenset[str]
    end: int


def children_of(value: Any) -> "Iterator[Any] | None":
    """Return what is in a container; None for any other value, and for an empty one."""
    if isinstance(value, dict):
        return chain(value, value.values()) if value else None
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return iter(value) if value else None
    return iter(vars(value).values()) if type(value) is Namespace and vars(value) else None


def children_with_inert(value: Any) -> "Iterator[Any] | None":
    """Return what is in a container, as `children_of`, or in an `Inert`."""
    if type(value) is not Inert:
        return children_of(value)
    pairs = chain.from_iterable(value.pairs or ())
    held = (value.of, value.state)
    return chain(held, value.args, value.kwargs.values(), value.items or (), pairs)


def check_tree(root: Any, within: Children = children_of) -> None:
    """Check that a walk ends soon: no cycles, no great depth, no part that is met endlessly often.

    Args:
        within: what is in a value; default: nothing in an `Inert`, whose reader knows what to
            expect there.

    Raises:
        CorruptError: a walk would not.
    """
    sizes: dict[int, int] = {}  # of a container, with all in it, as a walk meets them
    above: dict[int, Iterator[Any]] = {}  # the containers that the walk is in
    counts: list[int] = [0]
    references = 0
    value = root
    while True:
        children = within(value) if id(value) not in sizes else None
        if children is None:
            counts[-1] += sizes.get(id(value), 1)
        elif id(value) in above:
            raise CorruptError("the pickle holds a container that contains itself")
        elif len(above) >= DEPTH_MAX:
            raise CorruptError(f"the pickle nests containers deeper than {DEPTH_MAX} levels")
        else:
            above[id(value)] = children
            counts.append(1)
        while above:
            identity, children = next(reversed(above.items()))
            value = next(children, _END)
            if value is not _END:
                references += 1
                break
            del above[identity]
            sizes[identity] = min(counts.pop(), SIZE_MAX)
            counts[-1] += sizes[identity]
        else:
            break
    if counts[0] > SHARED_FREE + SHARED_MAX * references:
        raise CorruptError(
            f"the pickle holds the same parts again and again, {counts[0]:.1e} in all; expected "
            f"{SHARED_MAX} times {references:,} at most"
        )


_END = object()


RENAMED = {  # modules that have other names in other versions
    **{"__builtin__": "builtins", "copy_reg": "copyreg"},
    **{"numpy.core.multiarray": "numpy._core.multiarray"},
    **{"numpy.core.numeric": "numpy._core.numeric", "pathlib._local": "pathlib"},
}


def is_attributes(state: Any) -> bool:
    """Whether a state is attributes by name."""
    return type(state) is dict and all(type(key) is str for key in state)


def is_quick(key: Any) -> bool:
    """Whether a key of a dict takes little time to hash and to compare."""
    items = key if type(key) is tuple else (key,)
    return len(items) <= KEY_ITEMS_MAX and all(map(_is_simple, items))


def _is_simple(key: Any) -> bool:
    if type(key) is int:
        return -KEY_MAX < key < KEY_MAX
    return key is None or type(key) in (str, float, bytes, bool, Global, Inert)


def kind_of(value: Any) -> str:
    """Say what a value is, without a look inside."""
    return (
        str(value)
        if type(value) is Global
        else repr(value)
        if type(value) is Inert
        else (f"a {type(value).__name__}")
    )


def bad(what: str) -> CorruptError:
    """Return the error of a pickle that describes something impossible."""
    return CorruptError(f"the pickle describes {what}")


def sizes_of(value: Any, what: str) -> tuple[int, ...]:
    """Return a shape or strides as a tuple; raise a CorruptError if they are none."""
    fits = isinstance(value, (tuple, list)) and len(value) <= DIMENSIONS_MAX
    if not fits or not all(type(n) is int and 0 <= n <= TENSOR_BYTES_MAX for n in value):
        raise bad(f"a tensor whose {what} is no short tuple of sizes")
    return tuple(value)


def refused(name: str, *args: Any) -> Inert:
    """Return what stands for a known callable with arguments that mean more than plain data."""
    module, _, last = name.rpartition(".")
    return Inert(Global(module, last), args)
