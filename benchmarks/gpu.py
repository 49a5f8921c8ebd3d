"""A save in the background beside a real training step on a CUDA device.

What is measured: how long a call holds up the host, how much slower the steps are while the save is
in flight, and what pinned memory gives. Ways come in shuffled rounds. Needs a CUDA device; without
one it says so and ends with 2.
"""

import argparse
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import machine
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ratios import quartiles
from torch import nn

import holdfast
from holdfast.engine import pool

OUT = Path(__file__).parent / "out"
ALONE = "no checkpoint"


@dataclass(slots=True)
class Way:
    """One way to save; seconds that the call held up the host, and of every step after it."""

    start: Callable[[Path], Callable[[], object]]
    around: Callable[[], Any] = nullcontext
    called_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)


def main() -> int:
    """Train and save in shuffled rounds, print a table, write the JSON."""
    options = _arguments()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        return 2
    options.directory.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(options.width, 16, 4 * options.width, batch_first=True),
        options.layers,
        enable_nested_tensor=False,
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = torch.randn(options.batch, 512, options.width, device="cuda")
    step = _step(model, optimizer, batch)
    for _ in range(5):
        step()
    state = {"model": model, "optimizer": optimizer}
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=options.directory) as made:
        ways, scratch = _ways(state), Path(made)
        facts = machine.describe(scratch) | {"device": torch.cuda.get_device_name()}
        _run(ways, step, scratch, options)
    moments = [value for part in optimizer.state.values() for value in part.values()]
    result = {
        "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "machine": facts,
        "state_bytes": sum(tensor.nbytes for tensor in [*model.parameters(), *moments]),
        "rounds": options.rounds,
        "steps": options.steps,
        "ways": {
            name: {"called_s": way.called_s, "step_s": way.step_s, "whole_s": way.whole_s}
            for name, way in ways.items()
        },
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))
    dist.destroy_process_group()
    return 0


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    alone = median(result["ways"][ALONE]["step_s"])
    size = result["state_bytes"]
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        f"- state: {size / 1e9:.3f} GB; {result['rounds']} rounds of {result['steps']} steps",
        "",
        "| | call, median ms (quartiles) | step after it, median ms | of a step alone "
        "| until committed s |",
        "|---|---|---|---|---|",
    ]
    for name, way in result["ways"].items():
        low, high = quartiles(way["called_s"])
        called, step = median(way["called_s"]), median(way["step_s"])
        lines.append(
            f"| {name} | {called * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f}) "
            f"| {step * 1e3:.1f} | {step / alone:.3f} | {median(way['whole_s']):.2f} |"
        )
    return "\n".join(lines)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


def _ways(state: dict[str, Any]) -> dict[str, Way]:
    def holdfast_as(stage: Any) -> Callable[[Path], Callable[[], object]]:
        return lambda path: holdfast.save_async(state, path, stage=stage).result

    def with_dcp(path: Path) -> Callable[[], object]:
        writer = dcp.FileSystemWriter(path, thread_count=4, sync_files=True)
        flat = {
            "model": state["model"].state_dict(),
            "optimizer": state["optimizer"].state_dict(),
        }
        future = dcp.async_save(flat, storage_writer=writer)
        return getattr(future, "upload_completion", future).result

    return {
        ALONE: Way(lambda _path: lambda: None),
        "holdfast, lazy, pinned": Way(holdfast_as("lazy")),
        "holdfast, eager, pinned": Way(holdfast_as("eager")),
        "holdfast, eager, pageable": Way(holdfast_as("eager"), _pageable),
        "DCP async_save": Way(with_dcp),
    }


@contextmanager
def _pageable() -> Iterator[None]:
    """Use a pool of its own that is not pinned."""
    with (
        patch.object(pool, "_pin", lambda *_: None),
        patch.object(pool, "_staging", _pageable_pools),
    ):
        yield


_pageable_pools: dict[int, Any] = {}


def _run(
    ways: dict[str, Way], step: Callable[[], None], scratch: Path, options: argparse.Namespace
) -> None:
    order = random.Random(options.seed)
    for number in range(options.rounds + 1):
        for name in order.sample(list(ways), len(ways)):
            way, path = ways[name], scratch / "checkpoint"
            shutil.rmtree(path, ignore_errors=True)
            with way.around():
                started = time.perf_counter()
                result = way.start(path)
                called = time.perf_counter() - started
                steps = []
                for _ in range(options.steps):
                    before = time.perf_counter()
                    step()
                    steps.append(time.perf_counter() - before)
                result()
                whole = time.perf_counter() - started
            if number:  # the first round fills pools and pins them, and does not count
                way.called_s.append(called)
                way.step_s += steps
                way.whole_s.append(whole)
        print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help="of the model")
    parser.add_argument("--layers", type=int, default=16, help="of the model")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 512")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--steps", type=int, default=10, help="after each call")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to write to")
    parser.add_argument("--json", type=Path, default=OUT / "gpu.json", help="result file")
    parser.add_argument("--seed", type=int, default=20240614, help="of the order")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
