"""Time durable saves of one state, side by side: holdfast, torch.save, DCP.

Started by the demo under torchrun. Every save goes to a new directory and is on the disk (fsync)
when its time ends. What the rivals need before they can begin is not counted against them: the
gather of the full state for torch.save, the naming of the state for DCP. holdfast is timed from the
model and the optimizer themselves.
"""

import argparse
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

import holdfast

from .demo_results import Timing
from .demo_train import SIZES, build

Saver = Callable[[Path], None]


def make_savers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Saver]:
    """Return what saves the state, by name; each is called on all ranks with a path."""
    sharded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_state_dict(model, optimizer, options=gather)

    def save_holdfast(path: Path) -> None:
        holdfast.save({"model": model, "optimizer": optimizer}, path)

    def save_torch(path: Path) -> None:
        if dist.get_rank() == 0:
            path.mkdir()
            with (path / "state.pt").open("wb") as file:
                torch.save(full, file)
                file.flush()
                os.fsync(file.fileno())
            _sync_directory(path)

    def save_dcp(path: Path, threads: int) -> None:
        save_sharded(sharded, storage_writer=FileSystemWriter(path, thread_count=threads))

    return {
        "holdfast.save": save_holdfast,
        "DCP, 1 thread": lambda path: save_dcp(path, 1),
        "DCP, 4 threads": lambda path: save_dcp(path, 4),
        "torch.save + fsync": save_torch,
    }


def time_savers(savers: dict[str, Saver], scratch: Path, rounds: int) -> list[Timing]:
    """Call all savers in each round, in another order; the first round only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in savers}
    disk_bytes: dict[str, int] = {}
    for number in range(rounds + 1):
        # The same seed on all ranks: they have to save the same thing at the same time.
        for name in random.Random(number).sample(sorted(savers), len(savers)):
            path = scratch / f"round-{number}"
            dist.barrier()
            started = time.perf_counter()
            savers[name](path)
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
            disk_bytes[name] = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
    return [Timing(name, seconds[name][1:], disk_bytes[name]) for name in savers]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def main() -> None:
    """Restore a run's newest checkpoint, time the saves of its state, write them as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    model, optimizer = build(arguments.size)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    with holdfast.Checkpointer(arguments.root) as checkpointer:
        checkpointer.restore(state)
    timings = time_savers(make_savers(model, optimizer), arguments.scratch, arguments.rounds)
    if dist.get_rank() == 0:
        rows = [
            {"name": timing.name, "seconds": timing.seconds, "disk_bytes": timing.disk_bytes}
            for timing in timings
        ]
        arguments.record.write_text(json.dumps(rows))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may hold a tensor yet, and abort in the end of Python


if __name__ == "__main__":
    main()
