"""The names of a checkpoint → other names: ``rename``. Knows names alone."""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from ..errors import MismatchError, OptionError, shown

Rename = Mapping[str, str] | Iterable[tuple[str, str]] | Callable[[str], str]

SHOWN_MAX = 3  # of names that are the same
_EXPECTED = (
    'a dict such as {"module": "model"}, pairs of a regular expression and its replacement such as '
    'r"^module\\." and "", or a function of a name'
)


def renamed(
    names: Sequence[str], rename: Rename, kept: Container[str], where: str
) -> dict[str, str]:
    """Return each name's new one.

    A dict maps names, or what names begin with up to a dot: the longest that fits. ``""`` drops it.
    Pairs are applied one after the other, as `re.sub` does; a function is called with each name.

    Args:
        kept: those that may not become one.
        where: the checkpoint, as errors name it.

    Raises:
        OptionError: these are no names and no patterns, or a function raises.
        MismatchError: one of them changes no name, or two names become one.

    Example:
        ``{"model": "net"}`` makes ``net.weight`` of ``model.weight``
    """
    if isinstance(rename, Mapping):
        found = _by_beginnings(names, rename, where)
    elif callable(rename):
        found = _by_call(names, rename)
    else:
        found = _by_patterns(names, rename, where)
    for name, new in found.items():
        if not isinstance(new, str) or (name and not new):  # the name of the key "" may stay
            raise OptionError(f"rename makes {shown(new)} of {name!r}; expected another name")
    check_distinct({name: new for name, new in found.items() if name in kept}, where)
    return found


def _by_beginnings(names: Sequence[str], rename: Mapping[Any, Any], where: str) -> dict[str, str]:
    if not rename or not all(isinstance(text, str) for pair in rename.items() for text in pair):
        raise OptionError(f"rename is {shown(rename)}; expected {_EXPECTED}")
    rename = {old.removesuffix("."): new.removesuffix(".") for old, new in rename.items()}
    found, used = dict[str, str](), set[str]()
    for name in names:
        ends = [len(name), *(m.start() for m in reversed([*re.finditer(r"\.", name)]))]
        old = next((name[:end] for end in ends if name[:end] in rename), None)
        found[name] = name
        if old is not None:
            used.add(old)
            rest = name[len(old) :]
            found[name] = f"{rename[old]}{rest}" if rename[old] else rest.removeprefix(".")
    _check_used([old for old in rename if old not in used], names, where)
    return found


def _by_patterns(names: Sequence[str], rename: Any, where: str) -> dict[str, str]:
    is_one = isinstance(rename, (tuple, list)) and [*map(type, rename)] == [str, str]
    try:
        pairs = [(re.compile(old), new) for old, new in ([rename] if is_one else rename)]
        found = {name: name for name in names}
        for pattern, new in pairs:
            after = {name: pattern.subn(new, now) for name, now in found.items()}
            if not any(count for _, count in after.values()):
                _check_used([pattern.pattern], [*found.values()], where)
            found = {name: now for name, (now, _) in after.items()}
    except (re.error, TypeError, ValueError, IndexError) as error:
        text = f"rename is {shown(rename)}, which cannot be used: {error}; expected {_EXPECTED}"
        raise OptionError(text) from error
    if not pairs:
        raise OptionError(f"rename is {shown(rename)}; expected {_EXPECTED}")
    return found


def _by_call(names: Sequence[str], rename: Callable[[str], str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = rename(name)
        except Exception as error:
            text = f"rename raised {type(error).__name__} for {name!r}: {error}"
            raise OptionError(f"{text}. Let it return each name, or another one") from error
    return found


def _check_used(unused: Sequence[str], names: Sequence[str], where: str) -> None:
    if unused:
        some = f"; it has names such as {', '.join(names[:SHOWN_MAX])}" if names else ""
        raise MismatchError(f"rename: no name of {where} fits {unused[0]!r:.80}{some}")


def check_distinct(found: Mapping[str, str], where: str) -> None:
    """Check that all new names differ.

    Raises:
        MismatchError: two are the same.
    """
    first: dict[str, str] = {}
    same = [
        (first[new], name) for name, new in found.items() if first.setdefault(new, name) != name
    ]
    if same:
        shown_pairs = [f"{one} and {two} → {found[two]}" for one, two in same[:SHOWN_MAX]]
        more = f" and {len(same) - SHOWN_MAX:,} more" if len(same) > SHOWN_MAX else ""
        raise MismatchError(
            f"rename makes one name of two in {where}: {'; '.join(shown_pairs)}{more}. Give them "
            "different names, or leave one out with exclude="
        )
