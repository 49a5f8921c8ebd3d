"""How fast one build of the core is beside another: a wheel's beside that of the machine's GCC.

    python benchmarks/compilers.py build/wheels/golden/bin/python

The other Python, as `make wheels-check` leaves it, has the wheel installed. Both try every codec
on the same two checkpoints (`holdfast.try_codecs`, one thread) and take checksums. Processes of
the two alternate in an order drawn at random. Prints how many times the other's speed is that of
this Python's build, by the least seconds of the processor: the kernel takes up to 70 ms to find
and clear memory for a codec, in some processes and not in others.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from machine import describe

import holdfast
from holdfast import _core

ELEMENTS = 4 << 20  # of each of the tensors
CHUNK_BYTES = 4 << 20
Seconds = dict[str, float]


def write_checkpoints(folder: Path, steps: int) -> list[Path]:
    """Train a matrix with AdamW; return two checkpoints of it, one step apart."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = torch.nn.Linear(2048, ELEMENTS // 2048, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scale = torch.logspace(-6, -2, 2048)
    paths = []
    for step in range(steps + 1):
        model.weight.grad = torch.randn_like(model.weight) * scale
        optimizer.step()
        if step >= steps - 1:
            paths.append(folder / f"step-{step}")
            holdfast.save({"model": model, "optimizer": optimizer}, paths[-1])
    return paths


def measure(base: str, checkpoint: str) -> Seconds:
    """Return seconds of everything, in this process."""
    found: Seconds = {}
    for trial in holdfast.try_codecs(checkpoint, base, sample_bytes=3 * 4 * ELEMENTS).trials:
        found[f"{trial.codec}, in"] = trial.encode_s
        found[f"{trial.codec}, out"] = trial.decode_s
    data = np.random.default_rng(5).integers(0, 256, 2 * CHUNK_BYTES, dtype=np.uint8)
    source = data.ctypes.data + -data.ctypes.data % 64
    target = np.zeros(2 * CHUNK_BYTES, dtype=np.uint8)
    place = target.ctypes.data + -target.ctypes.data % 64
    calls = {
        "checksum": lambda: _core.checksum(source, CHUNK_BYTES, 7),
        "both checksums": lambda: _core.hash_chunk(source, CHUNK_BYTES, 7),
        "copy and checksums": lambda: _core.copy_and_hash_chunk(place, source, CHUNK_BYTES, 7),
    }
    for name, call in calls.items():
        started = time.thread_time()
        for _ in range(100):
            call()
        found[name] = time.thread_time() - started
    return found


def compare(pythons: list[str], paths: list[Path], rounds: int) -> list[tuple[str, float]]:
    """Return own seconds over the other's, the least of all rounds, by what was measured."""
    taken: dict[str, list[list[float]]] = {}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        order = [0, 1]
        random.shuffle(order)
        for which in order:
            words = [pythons[which], __file__, "--measure", *map(str, paths)]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            answer = subprocess.run(words, check=True, stdout=subprocess.PIPE, env=env).stdout
            for name, seconds in json.loads(answer).items():
                taken.setdefault(name, [[], []])[which].append(seconds)
    return [
        (name, min(own) / min(other)) for name, (own, other) in taken.items() if min(own) > 0.001
    ]


def main() -> None:
    """Measure in processes of both, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", nargs="?", help="a Python with another build of holdfast")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="of training")
    parser.add_argument("--measure", nargs=2, metavar="CHECKPOINT", help="in this process alone")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    machine = describe(Path.cwd())
    with tempfile.TemporaryDirectory() as folder:
        paths = write_checkpoints(Path(folder), options.steps)
        ratios = compare([sys.executable, options.other], paths, options.rounds)
    print("".join(f"- {key}: {value}\n" for key, value in machine.items()))
    print(f"{_core.instruction_set()}, {options.rounds} rounds\n")
    print("| | speed beside this build |\n|---|---|")
    print("".join(f"| {name} | {ratio:.2f} |\n" for name, ratio in ratios), end="")


if __name__ == "__main__":
    main()
