"""DCP's names → paths of holdfast, and lists that DCP opened → lists. Reads no files.

DCP opens nested dicts, and lists in which there is a dict or a tensor, and names what it finds by
its keys, joined with dots: the FQN. The keys themselves it keeps as ``planner_data``.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..layout import Path
from ..state.tree import rebuild

PICKLED = "dcp.pickled"  # the only key of a value that holds a planner's bytes as they were


def path_of(fqn: str, planner_data: object) -> Path:
    """Return the path behind an FQN: as the planner nested it, else the FQN as the only key."""
    keys = planner_data.get(fqn) if isinstance(planner_data, Mapping) else None
    if not isinstance(keys, tuple) or len(keys) > len(fqn) + 1 or ".".join(map(str, keys)) != fqn:
        return (fqn,)
    return tuple(("list", key) if type(key) is int else str(key) for key in keys)


def opened(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves that DCP makes of a value without tensors; an empty dict is one of them."""
    if isinstance(value, Mapping) and value and not is_pickled(value):
        for key, item in value.items():
            yield from opened((*path, str(key)), item)
    elif isinstance(value, list) and _is_opened(value):
        for position, item in enumerate(value):
            yield from opened((*path, ("list", position)), item)
    else:
        yield path, value


def _is_opened(value: Any) -> bool:
    below = value if isinstance(value, list) else ()
    return isinstance(value, Mapping) or any(_is_opened(item) for item in below)


def joined(objects: Mapping[Path, Any], tensors: Iterable[Path]) -> dict[Path, Any]:
    """Put lists together again that hold no tensors: of those, `holdfast.save` makes one leaf.

    Only what `opened` opens into the very same leaves is joined.
    """
    lists: dict[Path, dict[Path, Any]] = {}
    with_tensors = {path[:n] for path in tensors for n in range(len(path))}
    for path, value in objects.items():
        at = (i for i, key in enumerate(path) if isinstance(key, tuple))
        top = next((path[:i] for i in at if path[:i] not in with_tensors), path)
        lists.setdefault(top, {})[path[len(top) :]] = value
    result: dict[Path, Any] = {}
    for top, leaves in lists.items():
        whole = rebuild(leaves)
        if {path for path, _ in opened(top, whole)} == {(*top, *path) for path in leaves}:
            result[top] = whole
        else:
            result |= {(*top, *path): value for path, value in leaves.items()}
    return result


def is_pickled(value: Any) -> bool:
    """Whether a value holds a planner's bytes, which may be a pickle."""
    return type(value) is dict and value.keys() == {PICKLED} and type(value[PICKLED]) is bytes
