"""Numbers and names as text for people, harmless wherever they are shown. Knows no run."""

from html import escape

from ..tools.text import printable, show_bytes

__all__ = ["short", "show_age", "show_bytes", "show_seconds", "shown"]


def shown(text: object) -> str:
    """Return text as HTML: markup is shown, and so are control characters."""
    return escape(printable(str(text)), quote=True)


def short(text: str, width: int) -> str:
    """Shorten a text by leaving out its middle."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[-(width - 1 - head) :]}"


def show_seconds(seconds: float) -> str:
    """Show a duration: 0.0123 → ``12 ms``, 75 → ``1 min 15 s``."""
    if seconds < 0.0005:
        return "0 ms" if seconds < 5e-7 else f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    return show_age(seconds)


def show_age(seconds: float) -> str:
    """Show how long ago something was: 4000 → ``1 h 6 min``."""
    left = max(int(seconds), 0)
    for unit, size, lower, divisor in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if left >= size:
            rest = left % size // divisor
            return f"{left // size:,} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{left} s"
