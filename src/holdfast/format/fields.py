"""Checks of single fields of a JSON header (docs/format.md §6)."""

from typing import Any

from ..errors import CorruptError
from .spec import CHUNK_ELEMENTS_MAX


def entries(values: dict[str, Any], *names: str) -> list[list[dict[str, Any]]]:
    """Return the lists of objects that some keys have to have."""
    found = []
    for key in names:
        listed = values.get(key)
        if not isinstance(listed, list) or not set(map(type, listed)) <= {dict}:
            raise CorruptError(f"{key!r} of its JSON header is not a list of objects")
        found.append(listed)
    return found


def scalars(values: dict[str, Any]) -> dict[str, Any]:
    """Check what is one number or text: of a header; the step may be missing."""
    step = values["step"]
    chunk_elements = count(values["chunk_elements"], 1, "chunk_elements")
    if chunk_elements > CHUNK_ELEMENTS_MAX:
        raise CorruptError(
            f"chunk_elements is {chunk_elements}; expected at most {CHUNK_ELEMENTS_MAX}"
        )
    return {
        "save_id": hex_digits(values["save_id"], "save_id"),
        "step": None if step is None else count(step, 0, "step", 1 << 53),
        "world_size": count(values["world_size"], 1, "world_size", 1 << 32),
        "written_by": text(values["written_by"], "written_by"),
        "chunk_elements": chunk_elements,
    }


def keys(entry: dict[str, Any], wanted: set[str], what: str) -> None:
    """Check which keys an object has."""
    if entry.keys() != wanted:
        raise CorruptError(f"a {what} of its JSON header has the keys {sorted(entry)!r:.80}")


def count(value: Any, low: int, what: str, end: int = 1 << 63) -> int:
    """Check an integer from ``low`` below ``end``."""
    if type(value) is not int or not low <= value < end:
        raise CorruptError(f"{what} is {value!r:.40}; expected an integer from {low} below {end}")
    return value


def text(value: Any, what: str) -> str:
    """Check that a value is a text."""
    if not isinstance(value, str):
        raise CorruptError(f"{what} is {value!r:.40}; expected text")
    return value


def hex_digits(value: Any, what: str) -> str:
    """Check that a value is 32 hexadecimal digits."""
    if not isinstance(value, str) or len(value) != 32 or not set(value) <= set("0123456789abcdef"):
        raise CorruptError(f"{what} is {value!r:.40}; expected 32 hexadecimal digits")
    return value
