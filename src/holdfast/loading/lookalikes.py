"""Names of a target and of a checkpoint that look the same: in what they differ.

Knows paths alone.
"""

from collections.abc import Iterable
from unicodedata import normalize

from ..format.names import dotted, escaped
from ..layout import Key, Path


def lookalikes(missing: Iterable[Path], others: Iterable[Path]) -> list[str]:
    """Say in what paths that a target misses differ from others of a checkpoint.

    Example:
        ``(1,)`` and ``("1",)`` → ``1 is the integer 1 in the target, and the text "1" in the
        checkpoint``
    """
    by_look: dict[str, list[Path]] = {}
    for path in missing:
        by_look.setdefault(_look(path), []).append(path)
    found = {
        _difference(here, there)
        for there in others
        for here in by_look.get(_look(there), [])
        if here != there
    }
    return sorted(found)


def _look(path: Path) -> str:
    return normalize("NFC", dotted(path))


def _difference(here: Path, there: Path) -> str:
    name, one, other = dotted(here), escaped(here), escaped(there)
    if name != dotted(there):  # one letter may be written as several code points
        one, other = ascii(name), ascii(dotted(there))
    elif [dotted((key,)) for key in here] == [dotted((key,)) for key in there]:
        n = next(n for n, key in enumerate(here) if key != there[n])
        keys = here[n], there[n]
        is_of_list = any(isinstance(key, tuple) for key in keys)
        name = (dotted(here[:n]) or "the state") if is_of_list else dotted(here[: n + 1])
        one, other = (_holder(key) if is_of_list else _kind(key) for key in keys)
    return f"{name} is {one} in the target, and {other} in the checkpoint"


def _holder(key: Key) -> str:
    return f"a {key[0]}" if isinstance(key, tuple) else "a dict"


def _kind(key: Key) -> str:
    return f"the integer {key}" if isinstance(key, int) else f'the text "{key}"'
