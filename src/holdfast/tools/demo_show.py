"""What the demo says on the terminal: headings, sentences, lines, and how far it is."""

import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from .text import screen_size, write

WIDTH_MAX = 100  # longer lines are hard to read
SECTION_INDENT = 3  # of what stands under a heading


class Screen:
    """Writes to one stream; the moving line is drawn on terminals only."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._width = min(screen_size()[0], WIDTH_MAX)
        self._moving = self._stream.isatty()
        self._indent = ""

    def heading(self, text: str) -> None:
        """Begin a section."""
        write(self._stream, f"\n{text}\n")
        self._indent = " " * SECTION_INDENT

    def say(self, text: str, hanging: int = 0, lines_max: int | None = None) -> None:
        """Write a sentence, wrapped, with paths left whole; later lines may hang further in.

        Args:
            lines_max: what does not fit into so many lines is left out, and shown as "…".
        """
        lines = textwrap.wrap(
            text,
            self._width - len(self._indent),
            subsequent_indent=" " * hanging,
            break_on_hyphens=False,
            break_long_words=False,
            max_lines=lines_max,
            placeholder=" …",
        )
        self.lines(lines)

    def lines(self, lines: Sequence[str]) -> None:
        """Write lines as they are, under their heading."""
        write(self._stream, "".join(f"{self._indent}{line}".rstrip() + "\n" for line in lines))

    def progress(self, text: str) -> None:
        """Show how far it is, in place of what was shown last."""
        if self._moving:
            write(self._stream, f"\r\x1b[K  {text}"[: self._width])

    def clear(self) -> None:
        """Take the moving line away."""
        if self._moving:
            write(self._stream, "\r\x1b[K")
