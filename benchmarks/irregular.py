"""Flat shards, as ZeRO and FSDP1 cut them, against regular ones: time to plan and to save.

Real ranks with gloo, one process each, each with its part of one state in one piece of memory. The
layouts are views of it: regular (a box of rows of each tensor, as FSDP2), flat (all tensors behind
each other, cut once for each rank, as ZeRO-1 and -2 and FSDP1), flat tensors (each tensor cut by
itself, in the middle of a row, as ZeRO-3: three boxes a tensor). In one run, shuffled rounds, each
layout once a round, and the plan made anew every time; a first round does not count. A save takes
from the barrier before it to the last rank's return.

    python benchmarks/irregular.py --gib 1 --ranks 2 --rounds 11
"""

import argparse
import json
import multiprocessing
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import machine
import quiet
import ratios
import torch
import torch.distributed as dist
from training_state import COPIES, parameter_shapes

import holdfast
from holdfast.group.torch import find_group
from holdfast.plan import cached_plans
from holdfast.saving.request import Wanted
from holdfast.saving.save import save_now

OUT = Path(__file__).parent / "out"
REGULAR = "regular"
LAYOUTS = (REGULAR, "flat", "flat tensors")
TARGET = 1.05  # of the regular save's time
Shapes = dict[str, tuple[int, ...]]
State = dict[str, holdfast.Shard]


def main() -> None:
    """Measure all rounds, print a table, write the JSON."""
    options = _arguments()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="irregular-", dir=options.directory) as made:
        scratch = Path(made)
        facts = machine.describe(scratch)
        ranks = _start(options.ranks, int(options.gib * 2**30))
        seconds, plans = _run(ranks, options, scratch)
    result = {"machine": facts, "ranks": options.ranks, "gib": options.gib}
    result |= {"seconds": seconds, "plan_s": plans}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))
    print(f"\n{options.json}")


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown: the machine, and a table with ratios paired by round."""
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        f"- {result['gib']} GiB on {result['ranks']} ranks; target: {TARGET} x regular",
        "",
        "| layout | plan, median ms | save with it, median s (quartiles) | x regular (quartiles) |",
        "|---|---|---|---|",
    ]
    for layout, seconds in result["seconds"].items():
        pairs = zip(seconds, result["seconds"][REGULAR], strict=True)
        paired = [mine / other for mine, other in pairs]
        spans = [ratios.quartiles(values) for values in (seconds, paired)]
        lines.append(
            f"| {layout} | {1000 * median(result['plan_s'][layout]):.0f} | {median(seconds):.3f} "
            f"({spans[0][0]:.3f} to {spans[0][1]:.3f}) | {median(paired):.3f} "
            f"({spans[1][0]:.3f} to {spans[1][1]:.3f}) |"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=OUT / "irregular.json", help="result file")
    parser.add_argument("--seed", type=int, default=20240614, help="of the order")
    return parser.parse_args()


def _run(
    ranks: "list[Connection[Any, Any]]", options: argparse.Namespace, scratch: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of every save, and of its plan on the slowest rank, by layout."""
    chance = random.Random(options.seed)
    seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    plans: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for number in range(options.rounds + 1):
        for layout in chance.sample(LAYOUTS, len(LAYOUTS)):
            path = scratch / layout.replace(" ", "-")
            quiet.prepare(scratch, 0)
            for rank in ranks:
                rank.send((layout, path))
            found = [rank.recv() for rank in ranks]
            shutil.rmtree(path)
            if number:
                seconds[layout].append(max(f[1] for f in found) - min(f[0] for f in found))
                plans[layout].append(max(found[0][2]))
        print(f"round {number} of {options.rounds}", flush=True)
    for rank in ranks:
        rank.send(None)
    return seconds, plans


def _start(count: int, size_bytes: int) -> "list[Connection[Any, Any]]":
    context, pipes = multiprocessing.get_context("spawn"), []
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for rank in range(count):
        here, there = context.Pipe()
        arguments = (rank, count, port, size_bytes, there)
        # A daemon ends with this process, whatever happens here.
        context.Process(target=_serve, args=arguments, daemon=True).start()
        there.close()
        pipes.append(here)
    return pipes


def _serve(rank: int, count: int, port: int, size_bytes: int, pipe: "Connection[Any, Any]") -> None:
    torch.set_num_threads(1)  # as torchrun does
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=count)
    shapes = {
        f"{room}.{name}": shape
        for room in range(COPIES)
        for name, shape in parameter_shapes(size_bytes // (4 * COPIES)).items()
    }
    layouts = {layout: dict(_runs(shapes, layout, rank, count)) for layout in LAYOUTS}
    most = max(sum(end - first for first, end in runs.values()) for runs in layouts.values())
    memory = torch.randn(most, generator=torch.Generator().manual_seed(rank))
    states = {layout: _state(shapes, layout, layouts[layout], memory) for layout in LAYOUTS}
    group, options = find_group(None, writing=True), holdfast.Options()
    while (task := pipe.recv()) is not None:
        layout, path = task
        cached_plans.forget_all()
        dist.barrier()
        started = time.perf_counter()  # one clock for all processes of a machine
        records = save_now(states[layout], Wanted(path, None, None, "raw", options), group)
        pipe.send((started, time.perf_counter(), [r["seconds"]["plan"] for r in records]))
    dist.destroy_process_group()


def _runs(
    shapes: Shapes, layout: str, rank: int, count: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the elements of each tensor that a rank has: from the first to behind the last."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    length, position = -(-sum(sizes.values()) // count), 0
    for name, size in sizes.items():
        row = size // shapes[name][0]

        def cut(at: int, size: int = size, row: int = row, before: int = position) -> int:
            if layout == "flat":
                return min(max(at * length - before, 0), size)
            if layout == REGULAR:
                return min(at * -(-size // row // count) * row, size)
            inside = row // 3 if 0 < at < count else 0  # of a row
            return min(at * size // count + inside, size)

        yield name, (cut(rank), cut(rank + 1))
        position += size


def _state(
    shapes: Shapes, layout: str, runs: dict[str, tuple[int, int]], memory: torch.Tensor
) -> State:
    state, used = {}, 0
    for name, (first, end) in runs.items():
        part, shape = memory[used : used + end - first], shapes[name]
        used += end - first
        if layout == REGULAR:
            row = torch.Size(shape[1:]).numel()
            box, offset = (-1, *shape[1:]), (first // row, *(0 for _ in shape[1:]))
            state[name] = holdfast.Shard(part.view(box), shape, offset=offset)
        else:
            state[name] = holdfast.Shard(part, shape, start=first)
    return state


if __name__ == "__main__":
    main()
