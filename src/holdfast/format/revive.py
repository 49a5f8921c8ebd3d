"""Tagged values → members of enumerations and instances of dataclasses that a reader has given.

No name in a file is imported, and no constructor is called. Knows no files.
"""

import dataclasses
import enum
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import MismatchError, OptionError, shown
from ..layout import Path
from .names import dotted
from .natives import Tagged, namespace_of


def types_by_name(types: Iterable[type]) -> dict[str, type]:
    """Return classes by the names that files give them.

    Raises:
        OptionError: one is no enumeration or dataclass, or two have the same name.
    """
    found = dict[str, type]()
    if isinstance(types, (type, str, bytes)) or not isinstance(types, Iterable):
        raise OptionError(f"types is {_shown(types)}; {_EXPECTED}")
    for kind in types:
        if not (isinstance(kind, type) and _is_known(kind)):
            raise OptionError(f"types has {_shown(kind)}; {_EXPECTED}")
        name = f"{kind.__module__}.{kind.__qualname__}"
        if found.setdefault(name, kind) is not kind:
            raise OptionError(f"types has two classes of the name {name}; give one of them")
    return found


# By an enumeration that lacks a member, and by classes of fields that they did not write.
_RAISED = (MismatchError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_EXPECTED = "expected a list of enumerations and dataclasses, as in types=[Colour]"


def _shown(value: object) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else shown(value)


def _is_known(kind: type) -> bool:
    return issubclass(kind, enum.Enum) or dataclasses.is_dataclass(kind)


def revive_objects(
    objects: Mapping[Path, Any], types: Mapping[str, type], where: str
) -> dict[Path, Any]:
    """Do as `revive` with all values of a checkpoint, which is at ``where``.

    Raises:
        MismatchError: a class is not as it was saved.
    """
    return {p: revive_at(value, types, f"{dotted(p)} of {where}") for p, value in objects.items()}


def revive_at(value: Any, types: Mapping[str, type], where: str) -> Any:
    """Do as `revive`; an error names ``where``, and whatever a class raises is a MismatchError."""
    try:
        return revive(value, types)
    except _RAISED as error:
        raise MismatchError(f"{where}: {error}. Check types=") from error


def revive(value: Any, types: Mapping[str, type]) -> Any:
    """Return a value with members and instances of the classes that a reader has given.

    Args:
        types: {name: class}, of enumerations and dataclasses.

    Raises:
        MismatchError: a class has other fields, or makes two elements or keys one.
        ValueError: an enumeration has no such member.
    """
    if type(value) is Tagged:
        content = revive(value.content, types)
        if value.name in types:
            return _revived(types[value.name], value, content)
        return Tagged(value.tag, value.name, content)
    if type(value) in (list, tuple):
        return type(value)(revive(item, types) for item in value)
    if type(value) in (set, frozenset):
        return _whole(type(value)(revive(item, types) for item in value), len(value))
    if type(value) is deque:
        return deque((revive(item, types) for item in value), value.maxlen)
    if type(value) in (dict, OrderedDict):
        pairs = ((revive(key, types), revive(item, types)) for key, item in value.items())
        return _whole(type(value)(pairs), len(value))
    if type(value) is defaultdict:
        pairs = ((revive(key, types), revive(item, types)) for key, item in value.items())
        return _whole(defaultdict(value.default_factory, pairs), len(value))
    if type(value) is Namespace:
        return namespace_of({name: revive(item, types) for name, item in vars(value).items()})
    return value


def _whole(found: Any, count: int) -> Any:
    if len(found) != count:
        raise MismatchError("two elements or keys are the same as members of the classes given")
    return found


def _revived(kind: type, value: Tagged, content: Any) -> Any:
    if value.tag == "$enum" and issubclass(kind, enum.Enum):
        return kind(content)
    if value.tag != "$dataclass" or not dataclasses.is_dataclass(kind):
        raise MismatchError(f"{value.name} was saved as {value.tag[1:]}, which its class is not")
    names = {field.name for field in dataclasses.fields(kind)}
    if names != content.keys():
        raise MismatchError(
            f"{value.name} has the fields {sorted(names)}, and was saved with {sorted(content)}"
        )
    found = object.__new__(kind)  # no constructor is called
    for name, item in content.items():
        object.__setattr__(found, name, item)
    return found
