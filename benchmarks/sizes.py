"""What codecs make of the samples in `benchmarks/samples`: a change of any size shows in the diff.

    python benchmarks/sizes.py          # writes benchmarks/sizes.csv; a test holds it to be so
    python benchmarks/sizes.py --make   # trains the samples anew: all sizes change

The samples are two steps of the training of a small model of `neox.py`: an embedding, most rows of
which are rare, a matrix and a bias, with their moments, bf16 weights and f32 masters; and one more
weight of bf16 without master.
"""

import argparse
import csv
import io
import shutil
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.codecs import Compact, Excp

HERE = Path(__file__).parent
SAMPLES, TABLE = HERE / "samples", HERE / "sizes.csv"
STEPS = (400, 450)
PARTS = {"embed_in.weight": 160, "layers.0.qkv.weight": 128, "layers.0.qkv.bias": 128}  # rows
ALONE = "layers.0.up.weight"
CODECS: dict[str, Any] = {
    **{name: name for name in ("lossless", "delta", "excp")},
    "excp, at the cap": Excp(alpha=1.0),
    "excp, optimal centres": Excp(kmeans="optimal"),
    **{f"compact:{q}": f"compact:{q}" for q in ("high", "balanced", "small", "tiny")},
    "compact, residual": Compact(residual=True),
    "compact, bf16_exact": Compact(bf16_exact=True),
}
HEADS = ("codec", "role", "bytes", "stored", "ratio", "lost")


def table() -> str:
    """Return sizes as CSV: for each codec, of all and by role."""
    link, base = (SAMPLES / f"step-{step:08d}" for step in reversed(STEPS))
    found = holdfast.try_codecs(link, base, codecs=list(CODECS.values()))
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(HEADS)
    for name, trial in zip(CODECS, found.trials, strict=True):
        lost = f"{trial.squared_error / trial.energy:.4f}" if trial.energy else "0"
        sizes = {"all": (trial.size_bytes, trial.stored_bytes), **trial.roles}
        for role, (size, stored) in sizes.items():
            cells = (size, stored, f"{size / stored:.2f}" if stored else "", lost)
            rows.writerow((name, role or "alone", *(cells if role == "all" else cells[:3]), "")[:6])
    return lines.getvalue()


def make() -> None:
    """Train, and save the samples."""
    from neox import Recipe, Shape, read_text, start, tokenize

    shape = Shape(layers=1, width=64, heads=1, vocabulary=1024, context=128)
    training = start(tokenize(read_text(), shape.vocabulary), shape, Recipe(steps=1000))
    shutil.rmtree(SAMPLES, ignore_errors=True)
    for step in STEPS:
        training.run(step - training.step, shown_every=50)
        codec = "lossless" if step == STEPS[0] else "delta"
        state = sample(training.model, training.optimizer)
        if step == STEPS[0]:
            del state["optimizer"]  # nothing is coded from moments of the base
        holdfast.save(state, SAMPLES / f"step-{step:08d}", step=step, codec=codec)


def sample(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the rows that are shipped: the last of the embedding, of pieces that are rare."""
    found: dict[str, Any] = {"model": {}, "master": {}, "optimizer": {}}
    parameters = dict(model.named_parameters())
    for name, rows in PARTS.items():
        parameter = parameters[name]
        found["model"][name] = parameter.detach()[-rows:].bfloat16()
        found["master"][name] = parameter.detach()[-rows:].clone()
        moments = optimizer.state[parameter]
        kept = {key: moments[key][-rows:].clone() for key in ("exp_avg", "exp_avg_sq")}
        found["optimizer"][name] = kept
    found["half"] = {ALONE: parameters[ALONE].detach().bfloat16()}
    return found


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make", action="store_true", help="train the samples anew")
    if parser.parse_args().make:
        make()
    TABLE.write_text(table())
    print(TABLE.read_text(), end="")


if __name__ == "__main__":
    main()
