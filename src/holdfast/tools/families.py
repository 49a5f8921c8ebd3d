"""Names that differ in numbers alone → one line: the layers of a model move together.

Knows lines and figures; not what is compared.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

Document = dict[str, Any]
Row = tuple[str, str, str]  # name, what of it, details

_NUMBER = re.compile(r"\d+")


def family_of(name: str) -> str:
    """Return what names of a family share: ``layers.3.w`` → ``layers.#.w``."""
    return _NUMBER.sub("#", name)


def label(names: Sequence[str]) -> str:
    """Name a family by the ranges of its numbers: ``layers.0…31.w (x32)``."""
    if len(names) == 1:
        return names[0]
    # Numbers in names may have thousands of digits, so they are compared as text.
    values = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    ranges = []
    for texts in values:
        ordered = sorted(set(texts), key=lambda text: (len(text), text))
        ranges.append(ordered[0] if len(ordered) == 1 else f"{ordered[0]}…{ordered[-1]}")
    between = _NUMBER.split(names[0])
    pairs = zip(between, [*ranges, ""], strict=True)
    return "".join(text + number for text, number in pairs) + f" (x{len(names):,})"


def join_families(rows: Iterable[Row]) -> list[Row]:
    """Join rows of one family that say the same, where the first of them stands."""
    groups: dict[Row, list[str]] = {}
    for name, what, details in rows:
        groups.setdefault((family_of(name), what, details), []).append(name)
    return [(label(names), what, details) for (_, what, details), names in groups.items()]


def join_figures(entries: Iterable[Document]) -> list[Document]:
    """Join the figures of tensors of one family: the largest distance, the mean over all."""
    groups: dict[str, list[Document]] = {}
    for entry in entries:
        groups.setdefault(family_of(entry["name"]), []).append(entry)
    return [_join(group) for group in groups.values()]


def _join(group: list[Document]) -> Document:
    elements = sum(entry["elements"] for entry in group)
    not_finite = sum(entry["not_finite"] for entry in group)
    # Divided before they are added, as the sum of all distances may overflow.
    count = max(elements - not_finite, 1)
    means = (
        entry["mean_abs"] * ((entry["elements"] - entry["not_finite"]) / count) for entry in group
    )
    return {
        "name": label([entry["name"] for entry in group]),
        "elements": elements,
        "differing": sum(entry["differing"] for entry in group),
        "not_finite": not_finite,
        "max_abs": max(entry["max_abs"] for entry in group),
        "mean_abs": sum(means),
    }
