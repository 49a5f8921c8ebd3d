"""Small charts as SVG text: lines, bars, stacked bars, boxes. Knows numbers and labels; no run.

Every text comes in as data and goes out escaped. Colours are classes of the page's style.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .words import short, shown

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 66, 10, 10, 28
BARS_MAX = 400

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """A series over the same places; values that are not finite leave a gap."""

    name: str
    css: str
    values: Sequence[float]


def svg(width: float, height: float, body: str, label: str, css: str = "chart") -> str:
    """Wrap a body as one picture with a name."""
    return (
        f'<svg class="{css}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{shown(label)}">{body}</svg>'
    )


def tip(text: str) -> str:
    """Return the attribute that the page's script shows on hover."""
    return f'data-tip="{shown(text)}"'


def drawable(value: float) -> bool:
    """Whether a number has a place on an axis; sums of larger ones overflow."""
    return math.isfinite(value) and abs(value) < 1e300


def nice_ticks(low: float, top: float, count: int = 4) -> list[float]:
    """Return round numbers from ``low`` to ``top``."""
    if not (top > low and math.isfinite(top) and math.isfinite(low)):
        return [low] if math.isfinite(low) else []
    raw = (top - low) / count
    if raw < 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999), raw)
    first, last = math.ceil(low / unit - 1e-9), math.floor(top / unit + 1e-9)
    return [unit * n for n in range(first, min(last, first + 20) + 1)]


def line_chart(
    places: Sequence[str],
    lines: Sequence[Line],
    form: Format,
    label: str,
    mark: int | None = None,
    *,
    from_zero: bool = True,
) -> str:
    """Draw series over places, such as steps.

    Args:
        places: names of the places along the x-axis.
        mark: place to mark with a line from top to bottom.
        from_zero: whether the y-axis begins at 0.
    """
    finite = [v for line in lines for v in line.values if drawable(v)]
    top, low = max(finite, default=1.0), min(finite, default=0.0)
    low = min(low, 0.0) if from_zero else low
    if top <= low:
        top = low + (abs(low) or 1.0)
    high = HEIGHT - TOP - BOTTOM
    wide = (WIDTH - LEFT - RIGHT) / max(len(places) - 1, 1)
    x = [
        LEFT + (n * wide if len(places) > 1 else (WIDTH - LEFT - RIGHT) / 2)
        for n in range(len(places))
    ]

    def y(value: float) -> float:
        return TOP + high * (1 - (value - low) / (top - low))

    parts = [_grid(top, low, y, form), _places(places, x)]
    if mark is not None:
        parts.append(
            f'<line class="mark" x1="{x[mark]:.1f}" x2="{x[mark]:.1f}" y1="{TOP}" '
            f'y2="{TOP + high}"/>'
        )
    for line in lines:
        points, last = [], False
        for place, value in enumerate(line.values):
            good = drawable(value)
            if good:
                points.append(f"{'L' if last else 'M'}{x[place]:.1f} {y(value):.1f}")
            last = good
        parts.append(f'<path class="line {line.css}" d="{"".join(points)}"/>')
        if len(places) <= BARS_MAX:
            parts += [
                f'<circle class="dot {line.css}" cx="{x[n]:.1f}" cy="{y(v):.1f}" r="3.5" '
                f"{tip(f'{places[n]}: {line.name} {form(v)}')}/>"
                for n, v in enumerate(line.values)
                if drawable(v)
            ]
    return svg(WIDTH, HEIGHT, "".join(parts), label)


def _grid(top: float, low: float, y: Callable[[float], float], form: Format) -> str:
    ticks = nice_ticks(low, top)
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        f'<text class="axis end" x="{LEFT - 7}" y="{y(t) + 4:.1f}">{shown(form(t))}</text>'
        for t in ticks
    )


def _places(places: Sequence[str], x: Sequence[float]) -> str:
    """Name the first, the last and some places between."""
    if not places:
        return ""
    chosen = sorted({round(n * (len(places) - 1) / 4) for n in range(5)})
    parts = []
    for n in chosen:
        css = "axis" if n == 0 else "axis end" if n == len(places) - 1 else "axis middle"
        css = "axis middle" if len(places) == 1 else css
        css += " between" if n in chosen[1::2] and len(chosen) > 3 else ""
        parts.append(
            f'<text class="{css}" x="{x[n]:.1f}" y="{HEIGHT - 8}">'
            f"{shown(short(places[n], 14))}</text>"
        )
    return "".join(parts)


def bar_chart(
    places: Sequence[str],
    values: Sequence[float],
    form: Format,
    label: str,
    css: Callable[[int], str] = lambda _: "bar",
) -> str:
    """Draw one bar for each place; very many are joined, the largest of each group."""
    if len(values) > BARS_MAX:
        size = -(-len(values) // BARS_MAX)
        groups = range(0, len(values), size)
        best = [max(range(g, min(g + size, len(values))), key=values.__getitem__) for g in groups]
        places, values = [places[n] for n in best], [values[n] for n in best]
        classes = [css(n) for n in best]
    else:
        classes = [css(n) for n in range(len(values))]
    top, high = max(max(values, default=0.0), 1e-12), HEIGHT - TOP - BOTTOM
    wide = (WIDTH - LEFT - RIGHT) / max(len(values), 1)
    gap = min(wide * 0.2, 3)
    wide_bar = min(wide - gap, 48)
    x = [LEFT + n * wide + (wide - wide_bar) / 2 for n in range(len(values))]

    def y(value: float) -> float:
        return TOP + high * (1 - value / top)

    bars = [
        f'<rect class="{classes[n]}" x="{x[n]:.1f}" y="{y(v):.1f}" '
        f'width="{max(wide_bar, 0.4):.1f}" height="{max(TOP + high - y(v), 0):.1f}" '
        f"{tip(f'{places[n]}: {form(v)}')}/>"
        for n, v in enumerate(values)
    ]
    middles = [left + wide_bar / 2 for left in x]
    return svg(
        WIDTH, HEIGHT, _grid(top, 0.0, y, form) + "".join(bars) + _places(places, middles), label
    )


def stacked_columns(
    places: Sequence[str],
    parts: Sequence[tuple[str, str, Sequence[float]]],
    form: Format,
    label: str,
) -> str:
    """Draw a column of parts for each place: (name, css, value at each place)."""
    sums = [sum(values[n] for *_, values in parts) for n in range(len(places))]
    top, high = max(max(sums, default=0.0), 1e-12), HEIGHT - TOP - BOTTOM
    wide = (WIDTH - LEFT - RIGHT) / max(len(places), 1)
    wide_bar = min(wide - min(wide * 0.2, 3), 48)
    x = [LEFT + n * wide + (wide - wide_bar) / 2 for n in range(len(places))]

    def y(value: float) -> float:
        return TOP + high * (1 - value / top)

    bars = []
    below = [0.0] * len(places)
    for name, css, values in parts:
        for n, value in enumerate(values):
            if value > 0:
                about = f"{places[n]}: {name} {form(value)}, {100 * value / sums[n]:.0f} %"
                bars.append(
                    f'<rect class="{css}" x="{x[n]:.1f}" y="{y(below[n] + value):.1f}" '
                    f'width="{wide_bar:.1f}" height="{high * value / top:.1f}" {tip(about)}/>'
                )
            below[n] += value
    middles = [left + wide_bar / 2 for left in x]
    body = _grid(top, 0.0, y, form) + "".join(bars) + _places(places, middles)
    return svg(WIDTH, HEIGHT, body, label)


def stacked_bar(parts: Sequence[tuple[str, str, float]], form: Format, label: str) -> str:
    """Draw one bar of parts: (name, css, value)."""
    total = sum(value for *_, value in parts) or 1.0
    at, body = 0.0, []
    for name, css, value in parts:
        wide = 1100 * value / total
        body.append(
            f'<rect class="{css}" x="{at:.1f}" y="0" width="{wide:.1f}" height="30" '
            f"{tip(f'{name}: {form(value)}, {100 * value / total:.0f} %')}/>"
        )
        at += wide
    return (
        f'<svg class="stack" viewBox="0 0 1100 30" preserveAspectRatio="none" role="img" '
        f'aria-label="{shown(label)}">{"".join(body)}</svg>'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Say which colour means what: (name, css)."""
    return (
        '<p class="legend">'
        + "".join(f'<span><i class="{css}"></i>{shown(name)}</span>' for name, css in entries)
        + "</p>"
    )
