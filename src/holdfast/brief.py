"""A record, however much it holds, a size, or a text as a short text. Knows nothing else."""

import reprlib
from dataclasses import fields
from typing import Any

CHARACTERS_MAX = 1800  # of all fields together
_ITEMS_MAX = 4  # of a list, tuple, dict or set
_TEXT_MAX = 120
_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = _ITEMS_MAX
        self.maxstring = self.maxother = _TEXT_MAX

    def repr_instance(self, x: Any, level: int) -> str:
        """Show a tensor by its form: its numbers could be many."""
        if hasattr(x, "dtype") and hasattr(x, "shape"):
            return f"<{type(x).__name__} {x.dtype} {list(x.shape)}>"
        return super().repr_instance(x, level)


def brief(record: Any) -> str:
    """Return the ``repr`` of a dataclass, its long values cut; use it as ``__repr__``."""
    listed = [field.name for field in fields(record) if field.repr]
    most = CHARACTERS_MAX // max(len(listed), 1)
    parts = []
    for name in listed:
        text = _Brief().repr(getattr(record, name))
        parts.append(f"{name}={text if len(text) <= most else f'{text[: most - 1]}…'}")
    return f"{type(record).__name__}({', '.join(parts)})"


def show_bytes(count: int) -> str:
    """Show a number of bytes in decimal units: 1230000 → ``1.23 MB``."""
    if count < 1000:
        return f"{count} B"
    # Three digits: 999.6 kB would round to 1000 kB, so it is shown in the next unit.
    size = float(count)
    for unit in _UNITS:
        size /= 1000
        if size < 999.5 or unit == _UNITS[-1]:
            break
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{decimals}f} {unit}"


def shortened(text: str, count: int) -> str:
    """Cut a text of more than ``count`` characters after a word: ``"no room …"``."""
    if len(text) <= count:
        return text
    head = text[: count - 2]
    if text[len(head)] != " ":
        head = head.rpartition(" ")[0] or head
    return f"{head.rstrip()} …"
