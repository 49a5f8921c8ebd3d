"""The result of `parallel.py` as a picture: seconds against ranks, and the bytes of each rank."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as pyplot
from matplotlib.axes import Axes
from parallel import OUT, best_rows

COLOURS = {"holdfast": "#1f6f8b", "DCP": "#7f8c8d", "torch.save": "#b8c4cc", "fio": "#c0392b"}
DOTS_PER_INCH = 110  # small enough to keep under version control


def main() -> None:
    """Draw one picture from one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, nargs="?", default=OUT / "parallel.json")
    parser.add_argument("picture", type=Path, nargs="?", default=OUT / "parallel.png")
    options = parser.parse_args()
    draw(json.loads(options.result.read_text()), options.picture)


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draw seconds and shares beside each other."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    _seconds(left, result)
    _shares(right, result)
    for axis in (left, right):
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    facts = result["machine"]
    figure.suptitle(
        f"one replicated state of {result['state_bytes'] / 1e9:.2f} GB, saved durably; median of "
        f"{result['rounds']} shuffled rounds\n{facts['processor']}, {facts['memory']}, "
        f"{facts['file system'].split()[0]} on {facts['disk'].split(', write')[0]}",
        fontsize=8,
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=DOTS_PER_INCH)


def _seconds(axis: Axes, result: dict[str, Any]) -> None:
    rows = {
        kind: [row for row in best_rows(result) if row.name.startswith(kind)] for kind in COLOURS
    }
    for kind, found in rows.items():
        if kind == "fio":
            for row in found:
                axis.axhline(row.seconds, color=COLOURS[kind], linewidth=1.2, label=row.name)
            continue
        ranks = [result["contenders"][row.name]["ranks"] for row in found]
        medians = [row.seconds for row in found]
        spread = [
            [row.seconds - row.quartiles[0] for row in found],
            [row.quartiles[1] - row.seconds for row in found],
        ]
        axis.errorbar(
            ranks, medians, yerr=spread, color=COLOURS[kind], marker="o", capsize=2, label=kind
        )
        axis.set_xticks(ranks)
    axis.set_ylim(bottom=0)
    axis.set_title("seconds of a save", fontsize=10)
    axis.set_xlabel("ranks", fontsize=8)
    axis.legend(fontsize=7, frameon=False)


def _shares(axis: Axes, result: dict[str, Any]) -> None:
    """Draw a bar for each rank, side by side, for the largest number of ranks."""
    most = max(found["ranks"] for found in result["contenders"].values())
    rows = [row for row in best_rows(result) if result["contenders"][row.name]["ranks"] == most]
    for place, row in enumerate(rows):
        found = result["contenders"][row.name]
        kind = next(kind for kind in COLOURS if row.name.startswith(kind))
        at = [place + (rank - (most - 1) / 2) * 0.8 / most for rank in range(most)]
        sizes = [size / 1e9 for size in found["bytes_by_rank"]]
        axis.bar(at, sizes, width=0.7 / most, color=COLOURS[kind])
        uneven = max(sizes) * len(sizes) / sum(sizes)
        axis.text(place, max(sizes), f"max/mean {uneven:.2f}", ha="center", va="bottom", fontsize=7)
    axis.set_xticks(range(len(rows)), [result["contenders"][row.name]["who"] for row in rows])
    axis.set_title(f"GB written by each of {most} ranks", fontsize=10)


if __name__ == "__main__":
    main()
