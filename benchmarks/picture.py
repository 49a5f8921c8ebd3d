"""Results of `save_load.py` as a picture: bars for one size, lines over several; and the limit."""

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as pyplot
import ratios
from matplotlib.axes import Axes
from report import VERBS, Result, rows_of

TITLES = {"save": "durable save", "load": "cold load into place"}
OURS, OTHERS, LIMIT = "#1f6f8b", "#b8c4cc", "#c0392b"
SHADES = (
    "#7a8b99",
    "#a08a5b",
    "#8a7aa0",
    "#6b9a7c",
    "#b08a84",
    "#5f7fa8",
    "#9a9a4f",
)  # of others, in turn
DOTS_PER_INCH = 110  # small enough to keep under version control
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # the limit's line, behind a label
LABEL_GAP = 0.05  # between names at the right end of lines, of the axis' height


def main() -> None:
    """Draw one picture from one or more JSON files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, nargs="+", help="JSON of save_load.py")
    parser.add_argument("picture", type=Path, help="PNG to write")
    options = parser.parse_args()
    draw(read(options.result), options.picture)


def read(paths: Sequence[Path]) -> list[Result]:
    """Return the results of these files, smallest state first."""
    results: list[Result] = [json.loads(path.read_text()) for path in paths]
    return sorted(results, key=lambda result: int(result["state_bytes"]))


def draw(results: Sequence[Result], picture: Path) -> None:
    """Draw both directions beside each other."""
    last = results[-1]
    height = 0.8 + 0.3 * len(last["contenders"])
    figure, axes = pyplot.subplots(1, len(VERBS), figsize=(9, height), layout="constrained")
    for axis, verb in zip(axes, VERBS, strict=True):
        if len(results) == 1:
            _bars(axis, rows_of(last, verb), last["limits"], last["state_bytes"])
        else:
            _lines(axis, results, verb)
        axis.set_title(TITLES[verb], fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    facts, sizes = last["machine"], [f"{result['state_bytes'] / 1e9:.2f}" for result in results]
    figure.suptitle(
        f"{', '.join(sizes)} GB of fp32 parameters and AdamW moments, one process, median of "
        f"{last['rounds']} shuffled rounds\n{facts['processor']}, {facts['memory']}, "
        f"{facts['file system'].split()[0]} on {facts['disk'].split(', write')[0]}",
        fontsize=8,
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=DOTS_PER_INCH)


def _bars(axis: Axes, found: list[ratios.Row], limits: list[str], size_bytes: int) -> None:
    """Draw the peers' median rates, whiskers to the quartiles, and the limit across."""
    peers = [row for row in found if row.name not in limits][::-1]
    rates = [row.gbps for row in peers]
    below = [row.gbps - size_bytes / row.quartiles[1] / 1e9 for row in peers]
    above = [size_bytes / row.quartiles[0] / 1e9 - row.gbps for row in peers]
    axis.barh(
        [row.name for row in peers],
        rates,
        xerr=[below, above],
        color=[OURS if _is_ours(row.name) else OTHERS for row in peers],
        error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": "#555555"},
    )
    for place, row in enumerate(peers):
        share = "" if row.ratio is None else f" ({row.ratio.paired:.0%})"
        right = row.gbps + above[place] + 0.02 * max(rates)
        text = f"{row.gbps:.2f}{share}"
        axis.text(right, place, text, va="center", fontsize=8, bbox=CLEAR)
    if limit := ratios.limit_of(found, limits):
        axis.axvline(limit.gbps, color=LIMIT, linewidth=1.2)
        # The median of other moments than a bar's: on a shared disk that is no ceiling.
        label = f"{limit.name}: {limit.gbps:.2f}, median of its rounds; a bar may pass it"
        axis.plot([], [], color=LIMIT, label=label)
        axis.legend(fontsize=7, loc="upper right", bbox_to_anchor=(1, -0.09), frameon=False)
        axis.set_xlim(0, 1.25 * max(limit.gbps, *rates))
    axis.set_xlabel("GB/s (of fio's in the same round)", fontsize=8, loc="left")


def _lines(axis: Axes, results: Sequence[Result], verb: str) -> None:
    """Draw median rates against the size of the state, names at the right end."""
    lines: dict[str, list[tuple[float, float]]] = {}  # name → (GB, GB/s) of each size
    for result in results:
        found, limits = rows_of(result, verb), result["limits"]
        limit = ratios.limit_of(found, limits)
        for row in found:
            if row is limit or row.name not in limits:
                name = "limit (fio)" if row is limit else row.name
                lines.setdefault(name, []).append((result["state_bytes"] / 1e9, row.gbps))
    top = max(rate for points in lines.values() for _, rate in points)
    at = -math.inf
    shades = dict(zip(results[-1]["contenders"], itertools.cycle(SHADES), strict=False))
    for name, points in sorted(lines.items(), key=lambda line: line[1][-1][1]):
        colour = OURS if _is_ours(name) else shades.get(name, LIMIT)
        width = 2.0 if colour in (OURS, LIMIT) else 1.0
        sizes, rates = zip(*points, strict=True)
        axis.plot(sizes, rates, color=colour, linewidth=width, marker="o", markersize=3)
        at = max(rates[-1], at + LABEL_GAP * top)
        axis.annotate(
            f"{name}, {rates[-1]:.2f}",
            xy=points[-1],
            xytext=(1.06, at),
            textcoords=("axes fraction", "data"),
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5},
            color=colour,
            fontsize=7,
            va="center",
        )
    axis.set_ylim(0, 1.05 * max(at, top))
    axis.set_xticks([result["state_bytes"] / 1e9 for result in results])
    axis.xaxis.set_major_formatter("{x:.2f}")
    axis.set_xlabel("size of the state, GB", fontsize=8)
    axis.set_ylabel("GB/s", fontsize=8)


def _is_ours(name: str) -> bool:
    return name.startswith("holdfast")


if __name__ == "__main__":
    main()
