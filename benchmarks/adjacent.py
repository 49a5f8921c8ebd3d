"""What a checkpoint of every step takes, when links are one step of the optimizer apart.

    python benchmarks/adjacent.py

Trains a model of `neox.py` on English text, and then saves each of a few steps as a chain of
`Delta()` and as one of `Delta(replay=True)`; every link is read back and compared. Prints bits of a
parameter (96 in f32: weight, first and second moment), of payloads by kind, and of all files.
Needs `pip install tokenizers`.
"""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import describe
from neox import Recipe, Shape, Training, read_text, start, tokenize
from save_load import OUT

import holdfast
from holdfast.codecs import Delta

KINDS = ("weight", "exp_avg", "exp_avg_sq")


def links(training: Training, codec: Delta, root: Path, count: int) -> Iterator[Path]:
    """Save a step, and each of the next; yield the links."""
    shutil.rmtree(root, ignore_errors=True)
    for number in range(count + 1):
        path = root / f"step-{training.step:08d}"
        state = {"model": training.model, "optimizer": training.optimizer}
        holdfast.save(state, path, codec=codec)
        check(path, training)
        if number:
            yield path
        training.run(1)
    shutil.rmtree(root)


def check(path: Path, training: Training) -> None:
    """Compare what stands there with what was saved, bit for bit."""
    with holdfast.open(path) as checkpoint:
        state: Any = checkpoint.state()
    for name, parameter in training.model.named_parameters():
        moments = training.optimizer.state[parameter]
        pairs = [(state["model"][name], parameter.detach())]
        found = state["optimizer"]["state"][name]
        pairs += [(found[key], moments[key]) for key in KINDS[1:]]
        if not all(torch.equal(one, other) for one, other in pairs):
            raise RuntimeError(f"{name} of {path} is not what was saved")


def bits(path: Path, parameters: int) -> list[float]:
    """Return the bits of a parameter: by kind, and of all files."""
    stored = dict.fromkeys(KINDS, 0)
    with holdfast.open(path) as checkpoint:
        for name in checkpoint.names():
            kind = name.rsplit(".", 1)[-1] if name.startswith("optimizer") else KINDS[0]
            stored[kind] = stored.get(kind, 0) + checkpoint.info(name).stored_bytes
    files = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    sizes = [*(stored[kind] for kind in KINDS), files]
    return [8 * size / parameters for size in sizes]


def main() -> None:
    """Train, save, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, nargs="+", default=[100, 500], help="steps")
    parser.add_argument("--links", type=int, default=4, help="at each of them")
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.95, 0.999])
    options = parser.parse_args()
    shape = Shape(layers=4, width=256, heads=4, vocabulary=4096, context=128)
    tokens = tokenize(read_text(), shape.vocabulary)
    print("".join(f"- {key}: {value}\n" for key, value in describe(OUT.parent).items()))
    print(f"| bits of a parameter | {' | '.join(KINDS)} | files |\n|---|---|---|---|---|")
    for beta2 in options.beta2:
        training = start(tokens, shape, Recipe(steps=max(options.points) * 2, beta2=beta2))
        parameters = sum(each.numel() for each in training.model.parameters())
        for point in sorted(options.points):
            training.run(point - training.step)
            for name, codec in (("delta", Delta()), ("replay", Delta(replay=True))):
                each = [
                    bits(path, parameters)
                    for path in links(training, codec, OUT / "adjacent", options.links)
                ]
                means = [sum(column) / len(column) for column in zip(*each, strict=True)]
                label = f"{name}, β2 {beta2}, from step {point}"
                print(f"| {label} | {' | '.join(f'{mean:.2f}' for mean in means)} |", flush=True)


if __name__ == "__main__":
    main()
