"""Results of `codecs.py` as Markdown and as a picture.

python benchmarks/codecs_report.py benchmarks/out/codecs.json docs/pictures/codecs.png
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]  # one codec at one restore point of one run
EXACT, COLD = "exact", "cold"
NORMAL_95 = 1.96


def short(result: Result) -> Result:
    """Return what fits on a line."""
    found: Result = {"codec": result["codec"]}
    if result["stored"]:
        found["link_bytes"] = _mean(result["stored"][1:])
    if "after" in result:
        found["divergence"] = round(result["before"]["divergence"], 5)
        found["loss"] = [round(_mean(result[key]["losses"]), 4) for key in ("before", "after")]
        found["trained"] = round(_mean(result["losses"]), 4)
    return found


def report(document: Any) -> str:
    """Return the machine, and a table for each beta2."""
    facts = document["machine"] | {"options": _told(document["options"])}
    parts = [f"- {key}: {value}" for key, value in facts.items()]
    results = document["results"]
    for beta2 in dict.fromkeys(result["beta2"] for result in results):
        chosen = [result for result in results if result["beta2"] == beta2]
        parts += [f"\n**β2 = {beta2}**\n", _table(chosen)]
    return "\n".join(parts)


def _told(options: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items() if key != "json")


def _table(results: Sequence[Result]) -> str:
    points = sorted({result["point"] for result in results})
    names = list(dict.fromkeys(result["codec"] for result in results))
    heads = ["", "a delta is smaller by", "the run", "KL", "cloze", "choice"]
    heads += [f"regret at {point}" for point in points]
    heads += ["regret, all", "loss of training", "worst step"]
    lines = [" | ".join(["", *heads, ""]).strip(), "|" + "---|" * len(heads)]
    for name in names:
        cells = [name, *_sizes(results, name), *_grades(results, name)]
        if name not in (EXACT,) and _of(results, name)[0].get("after"):
            cells += [f"{_mean(_regrets(results, name, p)):+.4f}" for p in points]
            cells += [_interval(_regrets(results, name)), _interval(_excess(results, name))]
            cells += [f"{max(_excess(results, name)):+.2f}"]
        cells += [""] * (len(heads) - len(cells))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(results: Sequence[Result], name: str) -> list[Result]:
    return [result for result in results if result["codec"] == name]


def _pairs(results: Sequence[Result], name: str) -> list[tuple[Result, Result]]:
    """Return what a codec gave beside the exact run that it stands for."""
    place = ("seed", "point")
    exact = {tuple(r[key] for key in place): r for r in _of(results, EXACT)}
    return [(r, exact[tuple(r[key] for key in place)]) for r in _of(results, name)]


def ratios(results: Sequence[Result], name: str) -> tuple[float, float]:
    """Return how much smaller links are, and a run with the checkpoint that they start from."""
    pairs = [(r["stored"], e["stored"]) for r, e in _pairs(results, name)]
    link = sum(sum(e[1:]) for _, e in pairs) / sum(sum(s[1:]) for s, _ in pairs)
    return link, sum(sum(e) for _, e in pairs) / sum(sum(s) for s, _ in pairs)


def _sizes(results: Sequence[Result], name: str) -> list[str]:
    if not _of(results, name)[0]["stored"]:
        return ["", ""]
    return [f"{ratio:.{3 if ratio < 10 else 1}f}x" for ratio in ratios(results, name)]


def _grades(results: Sequence[Result], name: str) -> list[str]:
    grades = [result["before"] for result in _of(results, name) if "before" in result]
    if not grades:
        return ["", "", ""]
    means = {key: _mean([g[key] for g in grades]) for key in ("divergence", "cloze", "choice")}
    shares = (f"{100 * means[key]:.2f} %" for key in ("cloze", "choice"))
    return [f"{means['divergence']:.4f}", *shares]


def _regrets(results: Sequence[Result], name: str, point: int | None = None) -> list[float]:
    """Return, by held-out sequence, the loss after training on, minus that of the exact run."""
    pairs = [pair for pair in _pairs(results, name) if point in (None, pair[0]["point"])]
    found = [
        [a - b for a, b in zip(r["after"]["losses"], e["after"]["losses"], strict=True)]
        for r, e in pairs
    ]
    return [_mean(values) for values in zip(*found, strict=True)]


def _excess(results: Sequence[Result], name: str) -> list[float]:
    """Return, by step, the loss of training on, minus that of the exact run."""
    found = [
        [a - b for a, b in zip(r["losses"], e["losses"], strict=True)]
        for r, e in _pairs(results, name)
    ]
    return [_mean(values) for values in zip(*found, strict=True)]


def _interval(values: Sequence[float]) -> str:
    """Write a mean, and how far it may be from that of many more: 95 %."""
    half = NORMAL_95 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{_mean(values):+.4f} ± {half:.4f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def draw(document: Any, picture: Path) -> None:
    """Draw sizes over a run, and what they cost."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    results = [r for r in document["results"] if r["beta2"] == document["results"][0]["beta2"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = [n for n in dict.fromkeys(r["codec"] for r in results) if n not in (EXACT, COLD)]
    for name in names:
        result, exact = _pairs(results, name)[0]
        over = [a / b for a, b in zip(exact["stored"], result["stored"], strict=True)]
        line = left.plot(range(len(over)), over, marker="o", markersize=3, label=name)
        if "after" in result:
            ratio, regret = ratios(results, name)[0], _mean(_regrets(results, name))
            right.plot(ratio, regret, "o", color=line[0].get_color())
    cold = _mean(_regrets(results, COLD))
    right.axhline(cold, color="#c0392b", linestyle="--", label="exact weights, new optimizer")
    right.legend(fontsize=7)
    left.set(yscale="log", xlabel="checkpoint of the run", ylabel="times smaller than raw")
    right.set(xscale="log", xlabel="times smaller, a link", ylabel="held-out loss over exact")
    left.set_title("size over a run", fontsize=10)
    right.set_title("what training on from the last link costs", fontsize=10)
    left.legend(fontsize=7)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Print the tables of a JSON file, and draw its picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="JSON of codecs.py")
    parser.add_argument("picture", type=Path, nargs="?", help="PNG to write")
    options = parser.parse_args()
    document = json.loads(options.result.read_text())
    print(report(document))
    if options.picture:
        draw(document, options.picture)


if __name__ == "__main__":
    main()
