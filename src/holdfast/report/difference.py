"""Two checkpoints compared, as a map of layers and kinds of change: which layer exploded?

Knows the document of `holdfast diff`; reads nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..format.stragglers import robust
from .charts import tip
from .data import Finding
from .panels import facts, panel
from .words import short, shown

LAYERS_MAX = 400
EXPLODED_SIGMAS = 6.0
SPREAD_MIN = 0.15  # of powers of ten: layers differ by as much in any training
ALIKE_POWERS = 0.05  # of ten: cells of a column that differ by less have one colour
FEW_LAYERS = 4
FEW_CHANGE_MIN = 1.0  # among few layers: it changed by more than its own norm
NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Layer:
    """How one layer changed.

    Attributes:
        change: norm of the difference, as a share of the norm before.
        cosine: of the angle between before and after; NaN where it is not known.
        differing: share of its elements.
        not_finite: elements whose difference is not finite.
    """

    name: str
    elements: int
    change: float
    max_abs: float
    mean_abs: float
    cosine: float
    differing: float
    not_finite: int


def layer_of(name: str) -> str:
    """Return the layer of a tensor: all up to its first number, else all but the last key."""
    keys = name.split(".")
    numbered = next((n for n, key in enumerate(keys) if key.isdecimal()), None)
    if numbered is not None and numbered < len(keys) - 1:
        return ".".join(keys[: numbered + 1])
    return ".".join(keys[:-1]) or name


def layers_of(tensors: Sequence[Mapping[str, Any]]) -> list[Layer]:
    """Join the figures of the tensors of each layer, in the order of the names."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in tensors:
        groups.setdefault(layer_of(entry["name"]), []).append(entry)
    return [_layer(name, entries) for name, entries in groups.items()]


def _layer(name: str, entries: Sequence[Mapping[str, Any]]) -> Layer:
    elements = sum(entry["elements"] for entry in entries)
    squares = [sum(e["squares"][n] for e in entries if "squares" in e) for n in range(4)]
    a, b, both, difference = squares
    known = any("squares" in e and any(e["squares"]) for e in entries)
    change = math.sqrt(difference / a) if a else math.inf if difference else 0.0
    cosine = math.nan
    if known:
        cosine = both / math.sqrt(a) / math.sqrt(b) if a and b else float(a == b)
    return Layer(
        name=name,
        elements=elements,
        change=change if known else math.nan,
        max_abs=max((entry["max_abs"] for entry in entries), default=0.0),
        mean_abs=sum(e["mean_abs"] * e["elements"] for e in entries) / max(elements, 1),
        cosine=min(max(cosine, -1.0), 1.0) if known else math.nan,
        differing=sum(entry["differing"] for entry in entries) / max(elements, 1),
        not_finite=sum(entry["not_finite"] for entry in entries),
    )


def exploded(layers: Sequence[Layer]) -> list[Layer]:
    """Return layers that changed far more than the others, the worst first.

    Changes are compared as powers of ten, by their median and the median distance from it.
    """
    known = [layer for layer in layers if layer.change > 0]
    powers = [math.log10(min(layer.change, 1e30)) for layer in known]
    found = {layer.name: layer for layer in layers if layer.not_finite}
    if powers:
        middle, spread = robust(powers)
        least = middle + EXPLODED_SIGMAS * max(spread, SPREAD_MIN)
        few = len(known) < FEW_LAYERS
        for layer, power in zip(known, powers, strict=True):
            if power > least or (few and layer.change > FEW_CHANGE_MIN):
                found[layer.name] = layer
    return sorted(found.values(), key=lambda layer: (-(layer.not_finite > 0), -layer.change))


def difference_findings(document: Mapping[str, Any], layers: Sequence[Layer]) -> list[Finding]:
    """Say what stands out between two checkpoints."""
    found = list(_explosions(layers))
    counts = document["summary"]
    for key, side in (("only_in_a", "A"), ("only_in_b", "B")):
        if names := document[key]:
            some = ", ".join(names[:NAMED_MAX]) + (" …" if len(names) > NAMED_MAX else "")
            found.append(Finding("warn", "names", f"{len(names):,} names only in {side}", some))
    if changed := counts["changed"]:
        names = [entry["name"] for entry in document["changed"][:NAMED_MAX]]
        title = f"{changed:,} names have another dtype or shape"
        found.append(Finding("warn", "form", title, ", ".join(names)))
    if document["same"]:
        found.append(Finding("good", "same", "The two checkpoints are the same", ""))
    elif not found:
        text = f"{counts['tensors_differing']:,} of {counts['tensors_compared']:,} tensors differ."
        found.append(Finding("good", "well", "No layer stands out", text))
    return found


def _explosions(layers: Sequence[Layer]) -> Iterator[Finding]:
    found = exploded(layers)
    rest = sorted(layer.change for layer in layers if layer.change > 0 and layer not in found)
    usual = ""
    if rest:
        usual = f" The median of the other layers changed by {_percent(rest[len(rest) // 2])}."
    for layer in found[:NAMED_MAX]:
        if layer.not_finite:
            title = f"{layer.name} has numbers that are not finite"
            text = f"{layer.not_finite:,} of its {layer.elements:,} elements became so, or were."
        else:
            title = f"{layer.name} exploded: it changed by {_percent(layer.change)}"
            text = f"The norm of its change is compared with its norm before.{usual}"
        yield Finding("bad", "explosion", title, text)
    if len(found) > NAMED_MAX:
        names = ", ".join(layer.name for layer in found[NAMED_MAX : NAMED_MAX + 5])
        title = f"{len(found) - NAMED_MAX:,} more layers stand out"
        yield Finding("bad", "explosion", title, names)


def _percent(share: float) -> str:
    if math.isinf(share):
        return "an infinite share"
    return f"{100 * share:.3g} %" if share < 9.995 else f"{share:.3g} times its norm"


def difference_panels(
    document: Mapping[str, Any], layers: Sequence[Layer]
) -> list[tuple[str, str, str]]:
    """Return the panels of the page."""
    counts = document["summary"]
    pairs = [
        ("A", _side(document["a"])),
        ("B", _side(document["b"])),
        (
            "Tensors that differ",
            f"{counts['tensors_differing']:,} of {counts['tensors_compared']:,}",
        ),
        (
            "Values that differ",
            f"{counts['objects_differing']:,} of {counts['objects_compared']:,}",
        ),
        ("Only in A, only in B", f"{counts['only_in_a']:,}, {counts['only_in_b']:,}"),
        ("Largest difference", f"{counts['max_abs']:.4g}"),
    ]
    return [
        ("overview", "Overview", panel("overview", "Overview", facts(pairs))),
        ("layers", "Layers", _map(layers)),
    ]


def _side(side: Mapping[str, Any]) -> str:
    return f"{side['path']}" + (f" (step {side['step']})" if side["step"] is not None else "")


_COLUMNS: tuple[tuple[str, Callable[[Layer], float], Callable[[float], str]], ...] = (
    ("relative change", lambda layer: layer.change, _percent),
    ("largest", lambda layer: layer.max_abs, lambda v: f"{v:.3g}"),
    ("mean", lambda layer: layer.mean_abs, lambda v: f"{v:.3g}"),
    ("1 - cosine", lambda layer: 1 - layer.cosine, lambda v: f"{max(v, 0):.3g}"),
    ("elements changed", lambda layer: layer.differing, _percent),
    ("not finite", lambda layer: float(layer.not_finite), lambda v: f"{v:,.0f}"),
)


def _map(layers: Sequence[Layer]) -> str:
    """Draw a table whose cells are the darker, the more a layer changed among all."""
    if not layers:
        return panel("layers", "Layers", '<p class="empty">No tensors are in both.</p>')
    drawn = list(layers)
    if len(drawn) > LAYERS_MAX:
        most = sorted(range(len(drawn)), key=lambda n: -_rank(drawn[n]))[:LAYERS_MAX]
        drawn = [drawn[n] for n in sorted(most)]
    bad = {layer.name for layer in exploded(layers)}
    scales = [_scale([value(layer) for layer in layers]) for _, value, _ in _COLUMNS]
    rows = []
    for layer in drawn:
        cells = []
        for (title, value, form), scale in zip(_COLUMNS, scales, strict=True):
            number = value(layer)
            text = "" if math.isnan(number) else form(number)
            share = scale(number)
            about = f"{layer.name}\n{title} {text}\n{layer.elements:,} elements"
            cells.append(f'<td class="heat h-{round(share * 10)}" {tip(about)}>{shown(text)}</td>')
        css = ' class="exploded"' if layer.name in bad else ""
        rows.append(f"<tr{css}><th>{shown(short(layer.name, 70))}</th>{''.join(cells)}</tr>")
    head = "".join(f'<th class="end">{shown(title)}</th>' for title, *_ in _COLUMNS)
    lead = "A darker cell changed more than the others in its column."
    if len(drawn) < len(layers):
        lead += f" The {len(drawn)} of {len(layers):,} layers that changed most are listed."
    table = f'<table class="map"><tr><th>layer</th>{head}</tr>{"".join(rows)}</table>'
    return panel("layers", "Layers", f'<div class="scroll">{table}</div>', lead)


def _rank(layer: Layer) -> float:
    return math.inf if layer.not_finite else layer.change if layer.change > 0 else layer.max_abs


def _scale(values: Sequence[float]) -> Any:
    """Return a function from values to 0 … 1, by powers of ten."""
    powers = [math.log10(v) for v in values if v > 0 and math.isfinite(v)]
    low, high = min(powers, default=0.0), max(powers, default=0.0)
    differs = high - low > ALIKE_POWERS

    def share(value: float) -> float:
        if not value > 0:
            return 0.0
        if not math.isfinite(value):
            return 1.0
        return 0.15 + 0.85 * (math.log10(value) - low) / (high - low) if differs else 0.3

    return share
