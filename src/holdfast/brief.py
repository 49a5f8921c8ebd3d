"""A record as a short text, however much it holds. Knows nothing else."""

import reprlib
from dataclasses import fields
from typing import Any

CHARACTERS_MAX = 1800  # of all fields together
_ITEMS_MAX = 4  # of a list, tuple, dict or set
_TEXT_MAX = 120


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
