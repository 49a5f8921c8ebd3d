"""What replaces a value of a state where it stands: in a dict, a list or a tuple."""

from collections.abc import Callable
from typing import Any

from .tree import tuple_like

Setter = Callable[[Any], None]


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
