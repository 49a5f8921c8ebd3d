"""One state loaded into another layout by several ranks: bytes read in the whole job, seconds.

Real ranks with gloo on one machine. A state is saved in one layout and loaded, in place, into
another; every load fills the whole state somewhere, so the bytes that have to be read are those of
the state, once. What is read is what the kernel counts for all ranks (/proc/self/io): what they ask
for (rchar), and what came from the disk (read_bytes, caches dropped before; ranks of one machine
share a page cache, those of several do not). Beside DCP; and ByteCheckpoint, where it is installed,
for replicas (its other checkpointers want a model of their own framework). Shuffled rounds, the
first of which does not count; what was loaded is compared bit by bit, outside the clock.

    python benchmarks/reshard.py --gib 0.5 --rounds 11
"""

import argparse
import json
import random
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import machine
import quiet
from reshard_ranks import CONTENDERS, LAYOUTS, Measured, Ranks

OUT = Path(__file__).parent / "out"
CASES = (
    ("4 replicas", "4 replicas"),
    ("2 shards", "3 shards"),
    ("4 shards", "2 shards"),
    ("4 shards", "2 x 2 HSDP"),
    ("2 x 2 by rows and columns", "3 shards"),
)


@dataclass(slots=True)
class Row:
    """A contender in one case, and what was measured."""

    who: str
    saved: str
    loaded: str
    path: Path
    rounds: list[Measured] = field(default_factory=list)


def main() -> None:
    """Save every case once, load it in shuffled rounds, print the table, write the JSON."""
    options = _arguments()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="reshard-", dir=options.directory) as made:
        facts = machine.describe(Path(made))
        ranks = Ranks(int(options.gib * 2**30), options.seed)
        rows = _rows(ranks, Path(made))
        order = random.Random(options.seed)
        for number in range(options.rounds + 1):
            for row in order.sample(rows, len(rows)):
                quiet.prepare(Path(made), int(0.5 * ranks.state_bytes))
                measured = ranks.load(row.who, row.loaded, row.path)
                row.rounds += [measured] * (number > 0)
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
        result = _result(options, facts, ranks, rows)
        ranks.stop()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.5, help="size of the state")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=OUT / "reshard.json", help="result file")
    parser.add_argument("--seed", type=int, default=20240614, help="of the values and the order")
    return parser.parse_args()


def _rows(ranks: Ranks, scratch: Path) -> list[Row]:
    """Save every case once with each contender."""
    rows = []
    for number, (saved, loaded) in enumerate(CASES):
        for who, contender in CONTENDERS.items():
            if contender.replicas_only and "replicas" not in saved:
                continue
            path = scratch / f"{number}-{who.replace(' ', '-')}"
            ranks.save(who, saved, path)
            rows.append(Row(who, saved, loaded, path))
    free = shutil.disk_usage(scratch).free
    print(f"{len(rows)} checkpoints, {free / 1e9:.0f} GB left", file=sys.stderr, flush=True)
    return rows


def _result(
    options: argparse.Namespace, facts: dict[str, str], ranks: Ranks, rows: list[Row]
) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "benchmarks/reshard.py", *sys.argv[1:]]),
        "machine": facts,
        "state_bytes": ranks.state_bytes,
        "rounds": options.rounds,
        "layouts": {name: layout.ranks for name, layout in LAYOUTS.items()},
        "rows": [
            {
                "who": row.who,
                "saved": row.saved,
                "loaded": row.loaded,
                "asked_bytes": [one.asked_bytes for one in row.rounds],
                "disk_bytes": [one.disk_bytes for one in row.rounds],
                "seconds": [one.seconds for one in row.rounds],
            }
            for row in rows
        ],
    }


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown: the machine, and a table."""
    size = result["state_bytes"]
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        f"- state: {size / 1e9:.3f} GB; {result['rounds']} rounds",
        "",
        "| saved by | loaded by | | read by all ranks, of the state | from the disk "
        "| s (quartiles) |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        asked, disk = (median(row[key]) / size for key in ("asked_bytes", "disk_bytes"))
        several = row["seconds"] * (2 if len(row["seconds"]) == 1 else 1)
        low, _, high = quantiles(several, n=4, method="inclusive")
        cells = [row["saved"], row["loaded"], row["who"], f"{asked:.3f}", f"{disk:.3f}"]
        cells.append(f"{median(row['seconds']):.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
