"""Checks of single fields of a JSON header (docs/format.md §6)."""

from typing import Any

from ..errors import CorruptError


def entries(values: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a list of objects, which a key has to have."""
    entries = values.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CorruptError(f"{key!r} of its JSON header is not a list of objects")
    return entries


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
