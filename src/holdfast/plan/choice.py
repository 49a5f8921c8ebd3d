"""Which names of a checkpoint are meant: ``include`` and ``exclude``. Knows names and paths."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from typing import Any

from ..errors import MismatchError, OptionError, shown
from ..layout import Path

Patterns = str | Iterable[str]
SEPARATOR = "."


def chosen(names: Sequence[str], include: Patterns, exclude: Patterns, where: str) -> list[str]:
    """Return the names that are meant, in their order.

    A pattern is a name, or a part of a name up to a dot, which means all below it; ``*``, ``?`` and
    ``[abc]`` stand for any characters, dots too, as in `fnmatch`.

    Args:
        include: what is meant; empty: everything.
        exclude: what is not, of this.
        where: the checkpoint, as errors name it.

    Raises:
        OptionError: these are no patterns.
        MismatchError: a pattern means no name.

    Example:
        ``model`` means ``model.weight``; ``*.bias`` means ``model.bias``
    """
    kept = _meant(names, _patterns(include, "include"), where) if include != () else {*names}
    if exclude != ():
        kept -= _meant(names, _patterns(exclude, "exclude"), where)
    return [name for name in names if name in kept]


def without_gaps(kept: Mapping[Path, Any], every: Iterable[Path]) -> dict[Path, Any]:
    """Number what is left of lists and tuples: a list of it would have other positions.

    Args:
        kept: by path.
        every: the paths of all that there is.
    """
    positions, all_positions = _positions(kept), _positions(every)
    whole = {above for above, found in positions.items() if found == all_positions[above]}
    return {
        tuple(
            key[1] if isinstance(key, tuple) and path[:depth] not in whole else key
            for depth, key in enumerate(path)
        ): value
        for path, value in kept.items()
    }


def _positions(paths: Iterable[Path]) -> dict[Path, set[int]]:
    """Return which positions each list or tuple has."""
    found: dict[Path, set[int]] = {}
    for path in paths:
        for depth, key in enumerate(path):
            if isinstance(key, tuple):
                found.setdefault(path[:depth], set()).add(key[1])
    return found


def _patterns(given: Patterns, argument: str) -> list[str]:
    patterns = [given] if isinstance(given, str) else given
    try:
        listed = list(patterns)
    except TypeError:
        listed = [None]  # type: ignore[list-item]
    if not all(isinstance(pattern, str) and pattern for pattern in listed):
        raise OptionError(
            f'{argument} is {shown(given)}; expected a name or pattern, such as "model" or '
            '"*.bias", or a list of them'
        )
    return listed


def _meant(names: Sequence[str], patterns: Sequence[str], where: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        form = re.compile(f"(?:{translate(pattern)[:-2]})(?:{re.escape(SEPARATOR)}.*)?", re.DOTALL)
        below = f"{pattern}{SEPARATOR}"  # a name may have characters that mean others
        meant = {n for n in names if n == pattern or n.startswith(below) or form.fullmatch(n)}
        if not meant:
            near = difflib.get_close_matches(pattern, names, 3) or names[:3]
            more = f"; it has names such as {', '.join(near)}" if near else "; it has no names"
            raise MismatchError(f"{where} has nothing that {pattern!r:.80} means{more}")
        found |= meant
    return found
