"""The result of `save_load.py` as a picture: bars for each contender, the limit as a line."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as pyplot
import ratios
from matplotlib.axes import Axes
from save_load import VERBS, rows_of

TITLES = {"save": "durable save", "load": "cold load into place"}
OURS, OTHERS, LIMIT = "#1f6f8b", "#b8c4cc", "#c0392b"
DOTS_PER_INCH = 110  # small enough to keep under version control


def main() -> None:
    """Draw one picture from one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="JSON of save_load.py")
    parser.add_argument("picture", type=Path, help="PNG to write")
    options = parser.parse_args()
    draw(json.loads(options.result.read_text()), options.picture)


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draw both directions beside each other."""
    figure, axes = pyplot.subplots(1, len(VERBS), figsize=(9, 3.4), layout="constrained")
    for axis, verb in zip(axes, VERBS, strict=True):
        _bars(axis, rows_of(result, verb), result["limits"], result["state_bytes"])
        axis.set_title(TITLES[verb], fontsize=10)
    facts, size = result["machine"], result["state_bytes"] / 1e9
    figure.suptitle(
        f"{size:.2f} GB of fp32 parameters and AdamW moments, one process, median of "
        f"{result['rounds']} shuffled rounds\n{facts['processor']}, {facts['memory']}, "
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
    colours = [OURS if row.name.startswith("holdfast") else OTHERS for row in peers]
    axis.barh(
        [row.name for row in peers],
        rates,
        xerr=[below, above],
        color=colours,
        error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": "#555555"},
    )
    for place, row in enumerate(peers):
        share = "" if row.ratio is None else f" ({row.ratio.paired:.0%})"
        right = row.gbps + above[place] + 0.02 * max(rates)
        axis.text(right, place, f"{row.gbps:.2f}{share}", va="center", fontsize=8)
    if limit := ratios.limit_of(found, limits):
        axis.axvline(limit.gbps, color=LIMIT, linewidth=1.2)
        axis.plot([], [], color=LIMIT, label=f"limit: {limit.name}, {limit.gbps:.2f}")
        axis.legend(fontsize=7, loc="upper right", bbox_to_anchor=(1, -0.09), frameon=False)
        axis.set_xlim(0, 1.25 * max(limit.gbps, *rates))
    axis.set_xlabel("GB/s (of the limit, paired)", fontsize=8, loc="left")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
