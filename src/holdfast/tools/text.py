"""Text for a terminal: made harmless, cut to width, laid out in columns. Knows no checkpoints.

Names, values and error texts come out of files that anybody may have written. None of them may
move the cursor, break a line or turn the direction of writing, so all go through `printable`.
"""

import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from ..brief import show_bytes as show_bytes
from ..errors import StoreError

FALLBACK_SIZE = (100, 40)  # columns and lines where nothing says how large the screen is
COLUMNS_MIN = 40  # narrower ones cannot hold a name beside its figures
_SAVE_ID = re.compile(r"(/data/[0-9a-f]{8})[0-9a-f]{24}(/[0-9]{5})")  # in a path of a data file
_CHECKSUM = re.compile(r"(\b(?:checksum|says) [0-9a-f]{8})[0-9a-f]{8}\b")
_PIECES = re.compile(r"[^ /]*/+|[^ /]* +|[^ /]+")  # where a line may be broken


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


class Heads(str):
    """A line of column heads, which a terminal shows in bold."""

    __slots__ = ()


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


def cut_name(name: str, width: int) -> str:
    """Shorten a dotted name; more of its end is left, where names of one model differ.

    ``cut_name("model.layers.0.weight", 14)`` → ``"mode….0.weight"``
    """
    if width_of(name) <= width:
        return name
    room = max(width - 1, 0)
    tail = _fitting(name[::-1], room - room // 3)[::-1]
    return f"{_fitting(name, room // 3).rstrip('…')}…{tail.lstrip('…')}"


def clip(text: str, width: int) -> str:
    """Shorten a printable text to ``width`` columns by leaving out its last words."""
    if width_of(text) <= width:
        return text
    head = _fitting(text, max(width - 2, 0))
    whole = head if text[len(head) : len(head) + 1] == " " else head.rpartition(" ")[0]
    return f"{whole.rstrip()} …" if whole.strip() else cut(text, width)


def join_fitting(parts: Sequence[str], width: int, between: str) -> str:
    """Join parts as far as they fit into ``width`` columns; none of them is cut but the first."""
    if width_of(whole := between.join(parts)) <= width:
        return whole
    count = next(n for n in range(len(parts) - 1, -1, -1) if _fits(parts[:n], width, between))
    return between.join([*parts[:count], "…"]) if count else clip(parts[0], width)


def _fits(parts: Sequence[str], width: int, between: str) -> bool:
    return width_of(between.join([*parts, "…"])) <= width


def columns(rows: Sequence[Sequence[str]], right: Sequence[int], width: int | None) -> list[str]:
    """Lay out rows of printable cells; the first column gives way when they are too wide.

    Not by a table of rich, which takes a minute for 20,000 rows.

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
        cells = [cut_name(row[0], widths[0]), *row[1:]]
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


def show_count(count: int, what: str) -> str:
    """Show a number of things: (1, "file") → ``1 file``, (2000, "file") → ``2,000 files``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def fit(lines: Sequence[str], width: int) -> list[str]:
    """Break lines between words where they are too long for a screen, and shorten ids in them."""
    found: list[str] = []
    for line in lines:
        short = _SAVE_ID.sub(r"\1…\2", _CHECKSUM.sub(r"\1…", line))
        parts = [line] if width_of(line) <= width else list(_broken(short, width))
        found += [Heads(part) if isinstance(line, Heads) else part for part in parts]
    return found


def _broken(line: str, width: int) -> Iterator[str]:
    """Break a line at spaces, or in a long path after a slash; further parts are indented."""
    indent = len(line) - len(line.lstrip(" "))
    hang = " " * min(indent + 2, width // 4)
    part, is_empty = " " * indent, True
    for piece in _PIECES.findall(line[indent:]):
        while width_of(part) + width_of(piece.rstrip(" ")) > width:
            if is_empty:  # it is longer than a line
                head = _fitting(piece, width - width_of(part))
                part, piece = part + head, piece[len(head) :]
            yield part.rstrip(" ")
            part, is_empty = hang, True
        part, is_empty = part + piece, False
    yield part.rstrip(" ")


def repaired_advice(place: str) -> str:
    """Say of a repaired checkpoint who does not take it, and which call does."""
    return (
        "repaired, with parts left out: restore() skips it; "
        f'holdfast.load("{place}", into=state, strict=False) loads what is there'
    )


def is_colourful(stream: TextIO) -> bool:
    """Whether colours are shown: on a terminal that has them, unless NO_COLOR is set."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in (None, "", "dumb")
    return stream.isatty() and not is_plain


def write_lines(lines: Sequence[str]) -> None:
    """Write lines to the standard output, escaped where its encoding lacks a character.

    On a terminal they are made to fit; elsewhere a line stays whole, for who searches in it.
    """
    if sys.stdout.isatty():
        lines = fit(lines, screen_size()[0])
    if is_colourful(sys.stdout):
        from .colours import in_colour

        lines = [in_colour(line, "bold" * isinstance(line, Heads)) for line in lines]
    write(sys.stdout, "".join(f"{line}\n" for line in lines))


def write_json(document: dict[str, Any]) -> None:
    """Write a document to the standard output as strict JSON: ASCII, no control characters."""
    write(sys.stdout, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write(stream: TextIO, text: str) -> None:
    """Write a text whatever the encoding of the stream, and flush.

    Raises:
        StoreError: it cannot be written, such as to a file on a full disk.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # The interpreter flushes at its end, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise StoreError(f"cannot write the answer: {error.strerror or error}") from error
