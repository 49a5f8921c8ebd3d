"""A checkpoint at every step of a real training loop: what it costs beside a control.

Two ranks train one replicated model on the CPU. Each block of steps is saved in one way; blocks
come in shuffled rounds. The control only copies and writes the same bytes in the background, which
nobody can do without; what holdfast costs above it is the price of a checkpoint that can be used.
Rows are compared by the median seconds of a step, paired round by round.
"""

import argparse
import json
import random
import shlex
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import machine
import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as pyplot
import quiet
from lazy_ranks import WAYS, Ranks, Size
from ratios import quartiles

OUT = Path(__file__).parent / "out"
CONTROL = "control"
COLOURS = {
    "no checkpoint": "#b8c4cc",
    CONTROL: "#c0392b",
    "holdfast, lazy": "#1f6f8b",
    "holdfast, eager": "#d99a2b",
}
DOTS_PER_INCH = 110


def main() -> None:
    """Train, print a table, write the JSON and the picture."""
    options = _arguments()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lazy-", dir=options.directory) as made:
        scratch = Path(made)
        facts = machine.describe(scratch)
        size = Size(options.width, options.layers, options.batch, options.idle)
        ranks = Ranks(size, scratch)
        result = _run(ranks, options, scratch)
        ranks.stop()
    result |= {
        "command": shlex.join(["python", "benchmarks/lazy.py", *sys.argv[1:]]),
        "machine": facts,
        "state_bytes": ranks.state_bytes,
        "rounds": options.rounds,
        "steps": options.steps,
        "model": f"{options.layers} layers of {options.width}, "
        + ("which compute nothing" if options.idle else f"batch {options.batch}"),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))
    if options.picture:
        draw(result, options.picture)


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    control = [median(block["seconds"]) for block in result["blocks"][CONTROL]]
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        f"- two ranks, DDP, {result['model']}; {result['state_bytes'] / 1e9:.3f} GB of parameters "
        f"and moments, half of it written by each rank; {result['rounds']} rounds of "
        f"{result['steps']} steps, a checkpoint at each",
        "",
        "| | step, median s | of the control (quartiles) | held up per step, median ms "
        "| processor time of a step beyond the control's, median ms (quartiles) |",
        "|---|---|---|---|---|",
    ]
    processor = [block["processor_s"] for block in result["blocks"][CONTROL]]
    for name, blocks in result["blocks"].items():
        steps = [median(block["seconds"]) for block in blocks]
        paired = [mine / other for mine, other in zip(steps, control, strict=True)]
        low, high = quartiles(paired)
        pairs = zip(blocks, processor, strict=True)
        more = [1e3 * (block["processor_s"] - other) / result["steps"] for block, other in pairs]
        least, most = quartiles(more)
        stall = median(stall for block in blocks for stall in block["stalls"])
        lines.append(
            f"| {name} | {median(steps):.3f} | {median(paired):.3f} ({low:.3f} to {high:.3f}) "
            f"| {stall * 1e3:.1f} | {median(more):.0f} ({least:.0f} to {most:.0f}) |"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draw the stall of every step, one line for each way."""
    figure, axis = pyplot.subplots(figsize=(9, 3), layout="constrained")
    for name, blocks in result["blocks"].items():
        stalls = [1e3 * stall for block in blocks for stall in block["stalls"]]
        axis.plot(stalls, label=name, linewidth=1, color=COLOURS.get(name))
    axis.set_yscale("symlog", linthresh=1)
    axis.set_xlabel("step (a checkpoint at each)", fontsize=8)
    axis.set_ylabel("training held up, ms", fontsize=8)
    axis.tick_params(labelsize=8)
    figure.legend(
        fontsize=7, frameon=False, loc="outside upper center", ncols=len(result["blocks"])
    )
    axis.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=DOTS_PER_INCH)


def _run(ranks: Ranks, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    order = random.Random(options.seed)
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for name in WAYS:  # fills pools; does not count
        ranks.run(name, 2)
    for number in range(1, options.rounds + 1):
        for name in order.sample(list(WAYS), len(WAYS)):
            quiet.prepare(scratch, 0)
            block = ranks.run(name, options.steps)
            blocks[name].append(asdict(block))
        print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
    return {"blocks": blocks}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1536, help="of each layer")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--batch", type=int, default=1024, help="rows of each rank's batch")
    parser.add_argument("--idle", action="store_true", help="sleep instead of computing")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--steps", type=int, default=6, help="of a block")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to write to")
    parser.add_argument("--json", type=Path, default=OUT / "lazy.json", help="result file")
    parser.add_argument("--picture", type=Path, help="PNG to write: the stall of every step")
    parser.add_argument("--seed", type=int, default=20240614, help="of the order")
    return parser.parse_args()


if __name__ == "__main__":
    main()
