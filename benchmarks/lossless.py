"""What `codec="lossless"` and the codecs of others make of a trained model's state, on one core.

    python benchmarks/lossless.py --steps 300

Trains the model of `neox.py`; then codes its weights as f32 and bf16 and both moments of AdamW,
chunk by chunk as a save does, in one thread. "delta" codes the weights after `--between` further
steps by what they were before. Needs `pip install tokenizers`, and for the others what
`codec_peers.py` imports.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from codec_peers import Bytes, Peer, peers
from machine import describe
from neox import Recipe, Shape, read_text, start, tokenize
from save_load import OUT

from holdfast.codecs import lossless
from holdfast.codecs.base import Block, Payload

CHUNK_ELEMENTS = 1 << 20
DTYPES = {"exp_avg_sq": "f32", "exp_avg": "f32", "master": "f32", "weight": "bf16"}
BASES = {"master": "master before", "weight": "weight before"}
SUMS = ("bytes", "stored", "in_s", "out_s")
ALL = "all, 14 bytes a parameter"
Group = dict[str, torch.Tensor]  # by role; and what the weights were before
Sums = dict[str, float]


def trained(steps: int, between: int) -> list[Group]:
    """Train, and return the tensors of each parameter, and its weights some steps before."""
    shape = Shape()
    training = start(tokenize(read_text(), shape.vocabulary), shape, Recipe())
    training.run(steps, shown_every=50)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.run(between, shown_every=50)
    groups = []
    for parameter, old in zip(training.model.parameters(), before, strict=True):
        moments, master = training.optimizer.state[parameter], parameter.detach()
        group = {role: moments[role] for role in ("exp_avg_sq", "exp_avg")}
        group |= {"master": master, "weight": master.bfloat16()}
        groups.append(group | {"master before": old, "weight before": old.bfloat16()})
    return groups


def measure(groups: list[Group], rounds: int) -> dict[str, dict[str, Sums]]:
    """Return, by codec and role: bytes, stored bytes, and the least seconds in and out."""
    most = max(t.numel() for group in groups for t in group.values() if t is not None)
    room = torch.empty(6 * most + (1 << 20), dtype=torch.uint8)
    back = torch.empty(4 * most, dtype=torch.uint8)
    found: dict[str, dict[str, Sums]] = {}
    skipped = set()
    for group in groups:
        for role in DTYPES:
            for first in range(0, group[role].numel(), CHUNK_ELEMENTS):
                for peer in ours(group, role, first, room, back):
                    add(found, peer, role, chunk_of(group[role], first), rounds)
                for other in peers(group[role].element_size()):
                    if isinstance(other, Peer):
                        add(found, other, role, chunk_of(group[role], first), rounds)
                    else:
                        skipped.add(other)
    for name in sorted(skipped):
        print(f"- skipped: {name}")
    return found


def chunk_of(tensor: torch.Tensor, first: int) -> memoryview:
    """Return the bytes of a chunk."""
    part = tensor.reshape(-1)[first : first + CHUNK_ELEMENTS]
    return memoryview(part.view(torch.uint8).numpy())


def add(
    found: dict[str, dict[str, Sums]], peer: Peer, role: str, data: memoryview, rounds: int
) -> None:
    """Code a chunk a few times, and add what it took."""
    in_s, out_s, coded = [], [], b""
    for _ in range(rounds):
        started = time.perf_counter()
        coded = peer.encode(data)
        in_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        decoded = peer.decode(coded)
        out_s.append(time.perf_counter() - started)
        if memoryview(decoded).cast("B") != data:
            raise RuntimeError(f"{role} does not come back from {peer.name}")
    sums = found.setdefault(peer.name, {}).setdefault(role, dict.fromkeys(SUMS, 0.0))
    for key, value in zip(SUMS, (data.nbytes, len(coded), min(in_s), min(out_s)), strict=True):
        sums[key] += value


def ours(
    group: Group, role: str, first: int, room: torch.Tensor, back: torch.Tensor
) -> Iterator[Peer]:
    """Yield our codecs for a chunk, which know its relatives, and the base where it has one."""
    tensor = group[role]
    row = tensor[0].numel() if tensor.ndim > 1 else 1
    count = min(CHUNK_ELEMENTS, tensor.numel() - first)
    near = {r: near_of(group[r], first) for r in DTYPES if r != role}
    bases = {"holdfast lossless": near}
    if role in BASES:
        bases["holdfast delta"] = near | {"base": near_of(group[BASES[role]], first)}
        # Of a bf16 weight that has no master beside it.
        alone = {r: a for r, a in bases["holdfast delta"].items() if r != "master"}
        if role == "weight":
            bases["holdfast delta"] = alone
            bases["holdfast, no master"] = {r: a for r, a in near.items() if r != "master"}
    source = Block(near_of(tensor, first), count, DTYPES[role], row, first % row)
    for name, relatives in bases.items():
        yield our_codec(name, role, source, relatives, room, back)


def our_codec(
    name: str,
    role: str,
    source: Block,
    relatives: dict[str, int],
    room: torch.Tensor,
    back: torch.Tensor,
) -> Peer:
    """Return a codec for just this chunk."""
    held: list[Payload] = []

    def encode(data: Bytes) -> Bytes:
        payload = lossless.encode(role, source, relatives, room.data_ptr())
        held[:] = [payload]
        return memoryview(room[: payload.size_bytes].numpy()) if payload.mode else data

    def decode(coded: Bytes) -> Bytes:
        (payload,) = held
        if payload.mode == 0:
            return coded
        target = replace(source, address=back.data_ptr())
        if not lossless.decode(payload, target, relatives):
            raise RuntimeError(f"{name} cannot decode what it wrote")
        return memoryview(back[: target.size_bytes].numpy())

    return Peer(name, encode, decode)


def near_of(tensor: torch.Tensor, first: int) -> int:
    """Return the address of an element."""
    return tensor.data_ptr() + first * tensor.element_size()


def main() -> None:
    """Train, measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--between", type=int, default=50, help="steps from the base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=OUT / "lossless.json", help="result file")
    options = parser.parse_args()
    machine = describe(OUT.parent)
    found = measure(trained(options.steps, options.between), options.rounds)
    print("".join(f"- {key}: {value}\n" for key, value in machine.items()))
    print(f"% left, GB/s in / out | {' | '.join([*DTYPES, ALL])} |\n|---|{'---|' * 5}")
    for name, by_role in found.items():
        cells = [shown(by_role[role]) if role in by_role else "" for role in DTYPES]
        whole = [shown(total(by_role))] if len(by_role) == len(DTYPES) else [""]
        print(f"| {name} | {' | '.join([*cells, *whole])} |")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine, "found": found}))


def total(by_role: dict[str, Sums]) -> Sums:
    """Add all roles up."""
    return {key: sum(sums[key] for sums in by_role.values()) for key in SUMS}


def shown(sums: Sums) -> str:
    """Write the figures of a cell."""
    rates = (f"{sums['bytes'] / s / 1e9:.2f}" for s in (sums["in_s"], sums["out_s"]))
    return f"{100 * sums['stored'] / sums['bytes']:.2f}, {' / '.join(rates)}"


if __name__ == "__main__":
    main()
