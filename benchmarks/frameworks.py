"""How long a save holds up the loop of each framework, beside the framework's own checkpoints.

The loops of one framework train the same model, each in a process of its own, on one CPU process.
They save in turn, in another order each round, while the others wait: a step, the save, a step. The
loop is held up by the call, and by what waits before the optimizer's next step. A first turn makes
plans and fills memory; a second one does not count either. What a save takes is until it is whole,
and until it is durable: the frameworks leave fsync out, so the benchmark does it.

    build/frameworks/bin/python benchmarks/frameworks.py
    build/frameworks/bin/python benchmarks/frameworks.py --only lightning --rounds 21
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import machine
import quiet
from ratios import quartiles

HERE = Path(__file__).parent
OUT = HERE / "out"
WARM_UP = 2
LAYERS, PARAMETERS = 8, 41_680_384  # of the Llama that all of them train
STATE_BYTES = 12 * PARAMETERS  # with AdamW's moments, in fp32
EAGER_MAX, LAZY_MAX = 1 / 2, 1 / 3  # of the framework's own save
HOLDFAST = {"sync": "holdfast, sync", "eager": "holdfast, eager", "lazy": "holdfast, lazy"}
TITLES = {
    "own": "its own",
    "own-async": "its own, async",
    "eager-io": "holdfast's CheckpointIO, eager",
} | HOLDFAST
CONTENDERS: dict[str, tuple[str, ...]] = {
    "transformers": ("own", "sync", "eager", "lazy"),
    "accelerate": ("own", "sync", "eager", "lazy"),
    "lightning": ("own", "own-async", "sync", "eager", "lazy", "eager-io"),
    "torchtitan": ("own", "own-async", "sync", "eager"),
    "deepspeed": ("own", "sync", "eager"),
    "megatron-core": ("own", "own-async", "sync", "eager"),
}
Found = dict[str, list[dict[str, float]]]  # by contender: what each turn has told


def main() -> None:
    """Measure each framework, print the tables, write the JSON."""
    options = _arguments()
    options.directory.mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    order = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="frameworks-", dir=options.directory) as made:
        result: dict[str, Any] = {
            "command": shlex.join(["python", "benchmarks/frameworks.py", *sys.argv[1:]]),
            "machine": machine.describe(Path(made)),
            "rounds": options.rounds,
            "frameworks": {},
        }
        for name in options.only.split(","):
            load = os.getloadavg()[0]
            found = _measure(name, Path(made) / name, options.rounds, order)
            result["frameworks"][name] = {
                "version": version(name),
                "load": load,
                "contenders": found,
            }
            # After each: what is measured stays if the run is stopped.
            options.json.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{name}: done", file=sys.stderr, flush=True)
    print(report(result))


class Loop:
    """A training loop in a process of its own."""

    def __init__(self, framework: str, how: str, root: Path) -> None:
        root.mkdir(parents=True)
        self.log = root.with_suffix(".log")
        (asked, ask), (tell, told) = os.pipe(), os.pipe()
        command = [sys.executable, str(HERE / "framework_loops.py"), framework, how, str(root)]
        command += [str(LAYERS), str(asked), str(told)]
        own = {"HF_HUB_OFFLINE": "1", "HOLDFAST_DCP": "0", "DS_ACCELERATOR": "cpu"}
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                pass_fds=(asked, told),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | own,
            )
        os.close(asked)
        os.close(told)
        self._ask, self._tell = os.fdopen(ask, "w"), os.fdopen(tell)

    def turn(self) -> dict[str, float]:
        """Let it save once."""
        try:
            self._ask.write("save\n")
            self._ask.flush()
            told = self._tell.readline()
        except BrokenPipeError:
            told = ""
        if not told:
            sys.exit(f"a loop ended:\n{self.log.read_text()[-4000:]}")
        found: dict[str, float] = json.loads(told)
        return found

    def end(self) -> None:
        """End it."""
        self._ask.close()
        self._process.wait()


def _measure(name: str, scratch: Path, rounds: int, order: random.Random) -> Found:
    """Let all loops of a framework save in shuffled rounds."""
    loops = {how: Loop(name, how, scratch / how) for how in CONTENDERS[name]}
    found: Found = {how: [] for how in loops}
    for number in range(rounds + WARM_UP):
        for how in order.sample([*loops], len(loops)):
            # Nothing is read, and each turn has synced its own files: caches may stay.
            time.sleep(quiet.SETTLE_S)
            quiet.touch_free_memory(2 * STATE_BYTES)
            told = loops[how].turn()
            if number >= WARM_UP:
                found[how].append(told)
        print(f"{name}: round {number + 1 - WARM_UP} of {rounds}", file=sys.stderr, flush=True)
    for loop in loops.values():
        loop.end()
    return found


def stalls(turns: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the seconds for which each turn held up the loop."""
    return [turn["call_s"] + turn["held_s"] for turn in turns]


def report(result: Mapping[str, Any]) -> str:
    """Return a result as Markdown: the machine, and a table for each framework."""
    lines = ["| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in result["machine"].items()]
    lines.append(f"| state | {STATE_BYTES / 1e9:.2f} GB, {result['rounds']} rounds |")
    for name, found in result["frameworks"].items():
        lines += ["", f"**{name} {found['version']}** (load average {found['load']:.2f} before)"]
        lines += ["", *_table(found["contenders"])]
    return "\n".join(lines)


def _table(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "| | held up, median ms (quartiles) | of its own (quartiles) | asked | "
        "next step longer by, ms | whole, s | durable, s |",
        "|---|---|---|---|---|---|---|",
    ]
    own = stalls(found["own"])
    rivals = [how for how in found if how.startswith("own-")]
    for how, turns in found.items():
        mine = stalls(turns)
        paired = [one / other for one, other in zip(mine, own, strict=True)]
        (low, high), (few, many) = quartiles(mine), quartiles(paired)
        longer = median(t["after_s"] - t["held_s"] - t["before_s"] for t in turns)
        cells = [
            TITLES[how],
            f"{median(mine) * 1e3:.0f} ({low * 1e3:.0f} to {high * 1e3:.0f})",
            f"{median(paired):.2f} ({few:.2f} to {many:.2f})",
            _asked(how, found, median(paired), rivals),
            f"{longer * 1e3:.0f}",
            f"{median(t['written_s'] for t in turns):.2f}",
            f"{median(t['durable_s'] for t in turns):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _asked(how: str, found: Mapping[str, Any], ratio: float, rivals: Sequence[str]) -> str:
    """Say whether a contender keeps what is asked of it."""
    stage = how.removesuffix("-io")
    if stage not in ("eager", "lazy"):
        return ""
    limit = EAGER_MAX if stage == "eager" else LAZY_MAX
    mine = median(stalls(found[how]))
    above = [TITLES[r] for r in rivals if mine > median(stalls(found[r]))]
    kept = [f"{limit:.2f}: {'kept' if ratio <= limit else 'missed'}"]
    return "; ".join(kept + [f"above {rival}" for rival in above])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CONTENDERS), help="some frameworks")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to write to")
    parser.add_argument("--json", type=Path, default=OUT / "frameworks.json", help="result file")
    parser.add_argument("--seed", type=int, default=20261125, help="of the order")
    return parser.parse_args()


if __name__ == "__main__":
    main()
