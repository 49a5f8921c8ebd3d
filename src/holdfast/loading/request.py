"""What a load was asked to do with names, shapes and dtypes. Knows no state and no files."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .selection import Selection


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a load was asked for; see `load`."""

    strict: bool = True
    partial: bool = False
    cast: bool = False
    types: Iterable[type] = ()
    selection: Selection | None = None
    assign: Any = False

    def arguments(self) -> dict[str, Any]:
        """Return what all ranks have to give alike, as values of JSON, but for ``types``."""
        alike = {"strict": self.strict, "partial": self.partial, "cast": self.cast}
        return alike | ({"assign": "given"} if self.assign is not False else {})
