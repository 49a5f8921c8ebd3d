"""Text for a terminal: made harmless, cut to width, laid out in columns. Knows no checkpoints.

Names, values and error texts come out of files that anybody may have written. None of them may
move the cursor, break a line or turn the direction of writing, so all go through `printable`.
"""

import json
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

FALLBACK_SIZE = (100, 40)  # columns and lines where nothing says how large the screen is
COLUMNS_MIN = 40  # narrower ones cannot hold a name beside its figures
_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


def printable(text: str) -> str:
    r"""Escape control and format characters, bidirectional ones, line breaks and lone surrogates.

    ``"a\x1b[2J"`` → ``"a\\x1b[2J"``
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def width_of(text: str) -> int:
    """Return how many columns of a terminal a printable text takes."""
    return len(text) if text.isascii() else sum(map(_character_width, text))


def _character_width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0  # drawn over the character before
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Shorten a printable text to ``width`` columns by leaving out its middle.

    ``cut("model.layers.0.weight", 11)`` → ``"model…eight"``
    """
    if width_of(text) <= width:
        return text
    room = max(width - 1, 0)
    head = _fitting(text, room - room // 2)
    tail = _fitting(text[::-1], room // 2)[::-1]
    return f"{head}…{tail}"


def _fitting(text: str, width: int) -> str:
    """Return the longest beginning of a text that fits."""
    for end, character in enumerate(text):
        width -= _character_width(character)
        if width < 0:
            return text[:end]
    return text


def columns(rows: Sequence[Sequence[str]], right: Sequence[int], width: int | None) -> list[str]:
    """Lay out rows of printable cells; the first column gives way when they are too wide.

    Args:
        right: the columns that are aligned to the right.
        width: of the screen, in columns; None: nothing is shortened.
    """
    if not rows:
        return []
    widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        room = width - sum(widths[1:]) - 2 * (len(widths) - 1)
        widths[0] = min(widths[0], max(room, 12))
    lines = []
    for row in rows:
        cells = [cut(row[0], widths[0]), *row[1:]]
        padding = [" " * (n - width_of(cell)) for cell, n in zip(cells, widths, strict=True)]
        parts = [
            pad + cell if i in right else cell + pad
            for i, (cell, pad) in enumerate(zip(cells, padding, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return lines


def screen_size() -> tuple[int, int]:
    """Return columns and lines of the terminal; COLUMNS and LINES in the environment come first."""
    size = shutil.get_terminal_size(FALLBACK_SIZE)
    return max(size.columns, COLUMNS_MIN), size.lines


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


def show_count(count: int, what: str) -> str:
    """Show a number of things: (1, "file") → ``1 file``, (2000, "file") → ``2,000 files``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def repaired_advice(place: str) -> str:
    """Say of a repaired checkpoint who does not take it, and which call does."""
    return (
        "repaired, with parts left out: restore() skips it; "
        f'holdfast.load("{place}", into=state, strict=False) loads what is there'
    )


def write_lines(lines: Sequence[str]) -> None:
    """Write lines to the standard output, escaped where its encoding lacks a character."""
    write(sys.stdout, "".join(f"{line}\n" for line in lines))


def write_json(document: dict[str, Any]) -> None:
    """Write a document to the standard output as strict JSON: ASCII, no control characters."""
    write(sys.stdout, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write(stream: TextIO, text: str) -> None:
    """Write a text whatever the encoding of the stream, and flush."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
