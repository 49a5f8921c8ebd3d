"""Colours of lines on a terminal, by rich. Knows words; not what they are said of."""

import io

from rich.console import Console
from rich.text import Text

# What a reader looks for first. The word stands alone: a part of a name has no colour.
_STYLES = (
    (r"(?<![\w./-])(good|committed|the same|ok|identical)(?![\w./-])", "green"),
    (
        r"(?<![\w./-])(bad|damaged|unreadable|missing|failed|differs?|different|ALERT)"
        r"(?![\w./-])",
        "bold red",
    ),
    (r"(?<![\w./-])(uncommitted|repaired|left out)(?![\w./-])", "yellow"),
    (r"(?<![\w./-])step-[0-9]{8,}(?![\w./-])", "cyan"),
)


def styled(line: str, style: str = "") -> Text:
    """Return a printable line with its styles; what looks like markup in it is text."""
    text = Text(line, style=style)
    for pattern, found in _STYLES:
        text.highlight_regex(pattern, found)
    return text


def in_colour(line: str, style: str = "") -> str:
    """Return a printable line with the escapes of its styles."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=10**6)
    console.print(styled(line, style), end="", soft_wrap=True)
    return stream.getvalue()
