"""What `excp` makes of a trained model's state, and how fast, beside the public algorithm and LZMA.

    python benchmarks/excp.py --steps 100

Trains a small model of `neox.py`; a link is from step --steps to twice that. Both codecs take its
f32 weights and both moments of AdamW, on one core, in CPU time. The public algorithm (sampled
k-means, two indices a byte) is the port that the tests compare with; LZMA is Python's, preset 9, on
all of it at once, as 7-zip does by default. Needs `pip install tokenizers`.
"""

import argparse
import json
import lzma
import sys
import time
from pathlib import Path

import numpy as np
import torch
from machine import describe
from neox import Recipe, Shape, read_text, start, tokenize
from numpy.typing import NDArray
from save_load import OUT

from holdfast.codecs import excp
from holdfast.codecs.base import Block

sys.path.append(str(Path(__file__).parent.parent / "tests" / "unit"))
import excp_port as port  # found above

Floats = NDArray[np.float32]
Unit = tuple[Floats, Floats, Floats, Floats]  # weight, base, exp_avg, exp_avg_sq
ROLES = ("weight", "exp_avg", "exp_avg_sq")
CHUNK_ELEMENTS = 1 << 20
# The paper's; and one so large that all tensors come to the cap, as larger models' do by it.
ALPHAS = {"": 5e-5, ", at the cap": 1.0}


def trained(steps: int, shape: Shape) -> list[Unit]:
    """Train twice as many steps; return each parameter, with what it was in the middle."""
    training = start(tokenize(read_text(), shape.vocabulary), shape, Recipe())
    training.run(steps, shown_every=20)
    bases = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.run(steps, shown_every=20)
    units = []
    for parameter, base in zip(training.model.parameters(), bases, strict=True):
        state = training.optimizer.state[parameter]
        tensors = (parameter.detach(), base, state["exp_avg"], state["exp_avg_sq"])
        units.append(tuple(t.flatten().numpy() for t in tensors))
    return units


def measure(units: list[Unit], options: excp.Excp) -> dict[str, float]:
    """Return bytes, seconds and loss of the codec."""
    found = {"bytes": 0.0, "survey_s": 0.0, "in_s": 0.0, "out_s": 0.0, "error": 0.0}
    for unit in units:
        for key, value in _measure_one(unit, options).items():
            found[key] += value
    return found


def _measure_one(unit: Unit, options: excp.Excp) -> dict[str, float]:
    weight, base, *moments = unit
    tensors = dict(zip(ROLES, (weight, *moments), strict=True))
    size, stored, in_s, out_s = len(weight), 0, 0.0, 0.0
    starts = range(0, size, CHUNK_ELEMENTS)
    decoded = {role: np.empty(size, "f4") for role in ROLES}
    out, back = np.empty(8 * CHUNK_ELEMENTS, "u1"), np.empty(CHUNK_ELEMENTS, "f4")

    def at(tensor: Floats, first: int) -> int:
        return tensor.ctypes.data + 4 * first

    started = time.thread_time()
    parts = [
        excp.Part(min(CHUNK_ELEMENTS, size - first), *(at(tensor, first) for tensor in unit))
        for first in starts
    ]
    survey = excp.survey(parts, options)
    survey_s = time.thread_time() - started
    for first, part in zip(starts, parts, strict=True):
        count, below = min(CHUNK_ELEMENTS, size - first), at(base, first)
        near = {"base": below, "other_base": below}
        for role in ROLES:
            block = Block(at(tensors[role], first), count, "f32", 1, 0)
            place = at(decoded[role], first)
            started = time.thread_time()
            payload = excp.encode(block, role, survey, part, near, out.ctypes.data, place)
            between = time.thread_time()
            target = Block(back.ctypes.data, count, "f32", 1, 0)
            good = not payload.mode or excp.decode(payload, target, near)
            in_s, out_s = in_s + between - started, out_s + time.thread_time() - between
            if not good:
                raise RuntimeError(f"{role} does not come back")
            near[role], stored = place, stored + payload.size_bytes
    error = float(np.square(decoded["weight"] - weight, dtype="f8").sum())
    return {"bytes": stored, "survey_s": survey_s, "in_s": in_s, "out_s": out_s, "error": error}


def measure_port(units: list[Unit], alpha: float) -> dict[str, float]:
    """Return bytes and seconds of the public algorithm, and of LZMA after it."""
    started = time.thread_time()
    pruned = [port.prune(*unit, alpha) for unit in units]
    indices = b"".join(port.packed(kept, 0) for kepts in pruned for kept in kepts)
    between = time.thread_time()
    stored = len(lzma.compress(indices, preset=9))
    ended = time.thread_time()
    error = 0.0
    for (weight, base, *_), (kept, *_) in zip(units, pruned, strict=True):
        found = kept[kept != 0]
        if len(found) > port.CENTRES:
            centres = port.k_means(found, 0)
            kept = np.where(kept != 0, centres[port.nearest(kept, centres)], 0)
        error += float(np.square(base + kept - weight, dtype="f8").sum())
    return {
        "bytes": stored,
        "survey_s": between - started,
        "in_s": ended - between,
        "out_s": 0.0,
        "error": error,
    }


def main() -> None:
    """Train, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="of a link; trains twice as many")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=OUT / "excp.json", help="result file")
    options = parser.parse_args()
    shape = Shape(layers=options.layers, width=options.width, heads=options.width // 64)
    units, machine = trained(options.steps, shape), describe(OUT.parent)
    torch.set_num_threads(1)
    numbers = sum(len(weight) for weight, *_ in units)
    moved = sum(float(np.square(w - b, dtype="f8").sum()) for w, b, *_ in units)
    found = {}
    for named, alpha in ALPHAS.items():
        kinds = {
            "excp": excp.Excp(alpha=alpha),
            "excp, optimal centres": excp.Excp(alpha=alpha, kmeans="optimal"),
        }
        for name, kind in kinds.items():
            found[name + named] = min(
                (measure(units, kind) for _ in range(options.rounds)),
                key=lambda sums: sums["survey_s"] + sums["in_s"],
            )
        found["the public algorithm, LZMA" + named] = measure_port(units, alpha)
    print("".join(f"- {key}: {value}\n" for key, value in machine.items()))
    print(f"{numbers / 1e6:.1f} million parameters, {len(units)} tensors; 96 bits each\n")
    print("| | bits | ratio | lost of what moved | MB/s in | MB/s out | survey or k-means s | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, sums in found.items():
        seconds = sums["survey_s"] + sums["in_s"]
        out = f"{12 * numbers / sums['out_s'] / 1e6:.0f}" if sums["out_s"] else ""
        print(
            f"| {name} | {8 * sums['bytes'] / numbers:.3f} | {12 * numbers / sums['bytes']:.1f} "
            f"| {sums['error'] / moved:.3f} | {12 * numbers / seconds / 1e6:.1f} | {out} "
            f"| {sums['survey_s']:.2f} | {seconds:.2f} |"
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine, "found": found}))


if __name__ == "__main__":
    main()
