"""What `codec="lossless"` makes of a trained model's state, and how fast, on one core.

    python benchmarks/lossless.py --steps 300

Trains the model of `neox.py`; then codes its weights as f32 and bf16 and both moments of AdamW,
chunk by chunk as a save does, in one thread. Needs `pip install tokenizers`.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from machine import describe
from neox import NeoX, Recipe, Shape, batches, make_optimizer, read_text, tokenize, train_step
from save_load import OUT

from holdfast.codecs import lossless
from holdfast.codecs.base import Block

CHUNK_ELEMENTS = 1 << 20
DTYPES = {"exp_avg_sq": "f32", "exp_avg": "f32", "master": "f32", "weight": "bf16"}
Group = dict[str, torch.Tensor]  # by role


def trained(steps: int) -> list[Group]:
    """Train, and return the tensors of each parameter."""
    torch.manual_seed(0)
    shape, recipe = Shape(), Recipe()
    tokens = tokenize(read_text(), shape.vocabulary)
    model = NeoX(shape)
    optimizer = make_optimizer(model, recipe)
    coming = batches(tokens, shape, recipe, 0)
    for step in range(steps):
        loss = train_step(model, optimizer, next(coming), recipe, step)
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    groups = []
    for parameter in model.parameters():
        moments = optimizer.state[parameter]
        master = parameter.detach()
        group = {role: moments[role] for role in ("exp_avg_sq", "exp_avg")}
        groups.append(group | {"master": master, "weight": master.bfloat16()})
    return groups


def measure(groups: list[Group], rounds: int) -> dict[str, dict[str, float]]:
    """Return bytes, stored bytes, and the least seconds of encoding and decoding, by role."""
    most = max(t.numel() for group in groups for t in group.values())
    room = torch.empty(6 * most + (1 << 20), dtype=torch.uint8)
    back = torch.empty(4 * most, dtype=torch.uint8)
    found = {role: {"bytes": 0.0, "stored": 0.0, "in_s": 0.0, "out_s": 0.0} for role in DTYPES}
    for group in groups:
        for role in DTYPES:
            sums = _measure_one(group, role, room, back, rounds)
            for key, value in sums.items():
                found[role][key] += value
    return found


def _measure_one(
    group: Group, role: str, room: torch.Tensor, back: torch.Tensor, rounds: int
) -> dict[str, float]:
    tensor = group[role]
    row, item = tensor[0].numel() if tensor.ndim > 1 else 1, tensor.element_size()
    sums = {"bytes": float(tensor.nbytes), "stored": 0.0, "in_s": 0.0, "out_s": 0.0}
    for first in range(0, tensor.numel(), CHUNK_ELEMENTS):
        count = min(CHUNK_ELEMENTS, tensor.numel() - first)

        def block(address: int, of: str, first: int = first, count: int = count) -> Block:
            return Block(address, count, DTYPES[of], row, first % row)

        near = {r: t.data_ptr() + first * t.element_size() for r, t in group.items() if r != role}
        source, target = block(near_of(tensor, first), role), block(back.data_ptr(), role)
        in_s, out_s = [], []
        for _ in range(rounds):
            started = time.perf_counter()
            payload = lossless.encode(source, near, room.data_ptr())
            in_s.append(time.perf_counter() - started)
            if payload.mode:
                started = time.perf_counter()
                good = lossless.decode(payload, target, near)
                out_s.append(time.perf_counter() - started)
                coded = tensor.view(-1)[first : first + count].view(torch.uint8)
                if not good or not torch.equal(back[: count * item], coded):
                    raise RuntimeError(f"{role} does not come back")
        sums["stored"] += payload.size_bytes
        sums["in_s"] += min(in_s)
        sums["out_s"] += min(out_s, default=0.0)
    return sums


def near_of(tensor: torch.Tensor, first: int) -> int:
    """Return the address of an element."""
    return tensor.data_ptr() + first * tensor.element_size()


def main() -> None:
    """Train, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=OUT / "lossless.json", help="result file")
    options = parser.parse_args()
    machine = describe(OUT.parent)
    found = measure(trained(options.steps), options.rounds)
    total = {key: sum(sums[key] for sums in found.values()) for key in next(iter(found.values()))}
    print("".join(f"- {key}: {value}\n" for key, value in machine.items()))
    print("| | % left | GB/s in | GB/s out |\n|---|---|---|---|")
    for name, sums in (found | {"all, 14 bytes a parameter": total}).items():
        left, rates = sums["stored"] / sums["bytes"], (sums["in_s"], sums["out_s"])
        shown = (f"{sums['bytes'] / s / 1e9:.2f}" if s else "" for s in rates)
        print(f"| {name} | {100 * left:.2f} | {' | '.join(shown)} |")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine, "found": found}))


if __name__ == "__main__":
    main()
