"""A durable save and a verified load under a codec, beside the same state stored as it is.

    python benchmarks/encoded.py

The state is a real one: bf16 weights, f32 masters and moments of a GPT-NeoX of 17 million
parameters after some training (as in `lossless.py`), as often as it takes to make `--gib`: each
tensor behind its copies, as large as those of a model of that size; or `--apart`, as many small
models. Rounds are shuffled, ratios paired round by round. Needs `pip install tokenizers`.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import machine
import quiet
import torch
from lossless import trained
from ratios import quartiles
from save_load import OUT

import holdfast

RAW = "raw"
SAVE, LOAD = "save", "load"


def make_state(size_bytes: int, steps: int, *, apart: bool) -> dict[str, Any]:
    """Train; return the model and its optimizer as often as comes to about so many bytes."""
    groups, state = trained(steps, 1), dict[str, Any]()
    one = sum(group[role].nbytes for group in groups for role in ("master", "weight"))
    one += sum(group[role].nbytes for group in groups for role in ("exp_avg", "exp_avg_sq"))
    copies = max(1, round(size_bytes / one))
    models, behind = (copies, 1) if apart else (1, copies)
    for number in range(models):
        state[f"part{number}"] = parts = {"model": {}, "master": {}, "optimizer": {}}
        for layer, group in enumerate(groups):
            many = {role: torch.cat([values] * behind) for role, values in group.items()}
            parts["model"][f"layer{layer}"] = many["weight"]
            parts["master"][f"layer{layer}"] = many["master"]
            moments = {role: many[role] for role in ("exp_avg", "exp_avg_sq")}
            parts["optimizer"][f"layer{layer}"] = moments
    return state


def zeros_like(state: Any) -> Any:
    """Return the same with other memory, which has been touched."""
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return torch.zeros_like(state).fill_(1)


def bytes_of(state: Any) -> int:
    """Return the bytes of all tensors."""
    if isinstance(state, dict):
        return sum(map(bytes_of, state.values()))
    return int(state.nbytes)


def report(seconds: dict[tuple[str, str], list[float]], stored: dict[str, int], size: int) -> str:
    """Return medians, and ratios to raw, as Markdown."""
    lines = ["| | save s | of raw's (quartiles) | load s | of raw's (quartiles) | on disk |"]
    lines.append("|---|---|---|---|---|---|")
    for codec, held in stored.items():
        cells = [codec]
        for what in (SAVE, LOAD):
            taken, raw = seconds[codec, what], seconds[RAW, what]
            paired = [mine / other for mine, other in zip(taken, raw, strict=True)]
            low, high = quartiles(paired)
            cells += [f"{median(taken):.3f}", f"{median(paired):.3f} ({low:.3f} to {high:.3f})"]
        lines.append(f"| {' | '.join(cells)} | {100 * held / size:.1f} % |")
    return "\n".join(lines)


def main() -> None:
    """Train, measure in shuffled rounds, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state, about")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--apart", action="store_true", help="many small models, not a large one")
    parser.add_argument("--codecs", nargs="+", default=["lossless"])
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to write to")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    state = make_state(int(options.gib * 2**30), options.steps, apart=options.apart)
    into, size, order = zeros_like(state), bytes_of(state), random.Random(20240614)
    codecs = [RAW, *options.codecs]
    seconds: dict[tuple[str, str], list[float]] = {(c, w): [] for c in codecs for w in (SAVE, LOAD)}
    stored: dict[str, int] = dict.fromkeys(codecs, 0)
    with tempfile.TemporaryDirectory(prefix="encoded-", dir=options.directory) as made:
        facts = machine.describe(Path(made))
        for number in range(options.rounds + 1):
            for codec in order.sample(codecs, len(codecs)):
                path = Path(made) / f"{codec}-{number}"
                quiet.prepare(Path(made), 0)
                started = time.perf_counter()
                holdfast.save(state, path, codec=codec)
                saved = time.perf_counter()
                quiet.prepare(Path(made), 0)
                opened = time.perf_counter()
                holdfast.load(path, into=into)
                loaded = time.perf_counter()
                if number:  # the first round fills the pool, and does not count
                    seconds[codec, SAVE].append(saved - started)
                    seconds[codec, LOAD].append(loaded - opened)
                files = (file for file in path.rglob("*") if file.is_file())
                stored[codec] = sum(file.stat().st_size for file in files)
                shutil.rmtree(path)
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
    facts = facts | {"state": f"{size / 1e9:.3f} GB, {options.rounds} rounds"}
    print("".join(f"- {key}: {value}\n" for key, value in facts.items()))
    print(report(seconds, stored, size))


if __name__ == "__main__":
    main()
