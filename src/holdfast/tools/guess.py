"""What somebody meant who mistyped: a verb, an option, or the name of a file."""

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

NAMES_MAX = 10_000  # of a directory, that are compared
_LIKE = 0.6  # how alike a name has to be


def guess(given: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"``, or nothing where nothing is alike."""
    found = get_close_matches(given, list(known), n=1, cutoff=_LIKE)
    return f" Did you mean '{found[0]}'?" if found else ""


def guess_path(given: Sequence[str], error: str) -> str:
    """Return the same for the argument that an error names, if it is no place but has one beside.

    ``(["runs/b"], "/data/runs/b does not exist")`` → ``" Did you mean runs/a1?"``
    """
    for path in given:
        if not path or path.startswith("-") or "://" in path or os.path.lexists(path):
            continue
        try:
            place = os.path.abspath(path)
            above, name = os.path.split(place)
            if place not in error:
                continue
            with os.scandir(above) as entries:
                names = [e.name for _, e in zip(range(NAMES_MAX), entries, strict=False)]
        except OSError:  # also where the working directory was deleted
            continue
        if found := get_close_matches(name, names, n=1, cutoff=_LIKE):
            return f" Did you mean {os.path.join(os.path.dirname(path), found[0])}?"
    return ""
