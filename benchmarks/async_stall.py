"""How long the training loop is held up by a save in the background.

Beside one memcpy of the state, and DCP's async_save. The memory every contender copies to is warm:
each saves twice before the first round. Between two measurements the save is waited for, so that
what is measured is the call alone. With --fixed only that of tensors of one element is measured.
"""

import argparse
import gc
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ratios import quartiles
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from training_state import State, empty_like, flat, make_state, state_bytes

import holdfast

OUT = Path(__file__).parent / "out"
MEMCPY = "memcpy"
WARM_UP = 3  # calls of holdfast, after which plan and pool are there

warnings.filterwarnings("ignore")  # of DCP, at every call


@dataclass(slots=True)
class Contender:
    """Something that holds up the caller: returns the seconds it did, and the seconds in all."""

    name: str
    settings: str
    measure: Callable[[], tuple[float, float]]
    blocked_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)


def main() -> None:
    """Measure in shuffled rounds, print a table, write the JSON."""
    options = _arguments()
    torch.set_num_threads(options.threads)
    if options.fixed:
        print(_report_fixed(options.fixed, options.rounds))
        return
    state = make_state(int(options.gib * 2**30), options.seed)
    options.directory.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="async_stall-", dir=options.directory) as made:
        scratch = Path(made)
        result = {
            "command": shlex.join(["python", "benchmarks/async_stall.py", *sys.argv[1:]]),
            "machine": machine.describe(scratch),
            "state_bytes": state_bytes(state),
            "tensors": len(flat(state)),
            "threads": options.threads,
            "rounds": options.rounds,
        }
        contenders = _contenders(state, scratch)
        _run(contenders, options.rounds, random.Random(options.seed))
    result["contenders"] = {
        c.name: {"settings": c.settings, "blocked_s": c.blocked_s, "whole_s": c.whole_s}
        for c in contenders
    }
    result["fixed_s"] = _fixed_cost(options.directory, len(flat(state)))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))
    dist.destroy_process_group()


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    base = result["contenders"][MEMCPY]["blocked_s"]
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        f"- state: {result['state_bytes'] / 1e9:.3f} GB in {result['tensors']} tensors, "
        f"{result['threads']} threads, {result['rounds']} rounds",
        "",
        "| | blocked, median s (quartiles) | of one memcpy (quartiles) | until committed s | |",
        "|---|---|---|---|---|",
    ]
    for name, found in result["contenders"].items():
        blocked = found["blocked_s"]
        paired = [mine / copy for mine, copy in zip(blocked, base, strict=True)]
        (low, high), (few, many) = quartiles(blocked), quartiles(paired)
        lines.append(
            f"| {name} | {median(blocked):.3f} ({low:.3f} to {high:.3f}) "
            f"| {median(paired):.2f} ({few:.2f} to {many:.2f}) | {median(found['whole_s']):.2f} "
            f"| {found['settings']} |"
        )
    fixed = result["fixed_s"]
    lines += ["", f"Fixed cost of a call (as many tensors of one element): {fixed * 1e3:.1f} ms."]
    return "\n".join(lines)


def _contenders(state: State, scratch: Path) -> list[Contender]:
    target = empty_like(state)
    copies = [(target[room][name], t) for room, part in state.items() for name, t in part.items()]

    def memcpy() -> tuple[float, float]:
        started = time.perf_counter()
        for to, source in copies:
            to.copy_(source)
        taken = time.perf_counter() - started
        return taken, taken

    return [
        Contender(MEMCPY, "tensor.copy_ of each tensor, warm memory", memcpy),
        Contender("holdfast, eager", "save_async", _holdfast(state, scratch / "eager", "eager")),
        Contender("DCP, thread", "async_save, thread", _dcp(state, scratch / "thread")),
        Contender(
            "DCP, process", "async_save, process", _dcp(state, scratch / "process", process=True)
        ),
        Contender(
            "DCP, defaults", "async_save as it comes", _dcp(state, scratch / "plain", kept=False)
        ),
    ]


def _holdfast(state: State, path: Path, stage: Any) -> Callable[[], tuple[float, float]]:
    def measure() -> tuple[float, float]:
        shutil.rmtree(path, ignore_errors=True)
        started = time.perf_counter()
        handle = holdfast.save_async(state, path, stage=stage)
        blocked = time.perf_counter() - started
        handle.result()
        return blocked, time.perf_counter() - started

    return measure


def _dcp(
    state: State, path: Path, *, process: bool = False, kept: bool = True
) -> Callable[[], tuple[float, float]]:
    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    # Kept for all saves, so that it copies to memory it has already; nothing to pin on a CPU.
    settings = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=process,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(settings) if kept else None

    def measure() -> tuple[float, float]:
        shutil.rmtree(path, ignore_errors=True)
        writer = dcp.FileSystemWriter(path, thread_count=4, sync_files=True)
        started = time.perf_counter()
        future = dcp.async_save(
            state, storage_writer=writer, async_checkpointer_type=kind, async_stager=stager
        )
        blocked = time.perf_counter() - started
        getattr(future, "upload_completion", future).result()
        return blocked, time.perf_counter() - started

    return measure


def _run(contenders: list[Contender], rounds: int, order: random.Random) -> None:
    for contender in contenders * 2:
        contender.measure()
    for number in range(1, rounds + 1):
        for contender in order.sample(contenders, len(contenders)):
            gc.collect()
            blocked, whole = contender.measure()
            contender.blocked_s.append(blocked)
            contender.whole_s.append(whole)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)


def _fixed_cost(directory: Path, tensors: int) -> float:
    """Return the median seconds of a call with nothing to copy."""
    return median(_fixed_calls(directory, _ones(tensors), "eager", 11))


def _fixed_calls(directory: Path, state: Any, stage: Any, rounds: int) -> list[float]:
    """Return the seconds of calls with nothing to copy, after a few that do not count."""
    with tempfile.TemporaryDirectory(prefix="async_stall-", dir=directory) as scratch:
        measure = _holdfast(state, Path(scratch) / "fixed", stage)
        return [measure()[0] for _ in range(WARM_UP + rounds)][WARM_UP:]


def _report_fixed(tensors: int, rounds: int) -> str:
    """Measure calls in memory, with states of so many tensors of one element; return Markdown."""
    states = {"plain tensors": _ones(tensors), "AdamW and its parameters": _adamw(tensors // 4)}
    lines = ["| call | median ms (quartiles) | least ms |", "|---|---|---|"]
    for name, state in states.items():
        for stage in ("eager", "lazy"):
            taken = [1e3 * s for s in _fixed_calls(Path("/dev/shm"), state, stage, rounds)]
            low, high = quartiles(taken)
            lines.append(
                f"| {tensors} {name}, {stage} | {median(taken):.2f} ({low:.2f} to {high:.2f}) "
                f"| {min(taken):.2f} |"
            )
    return "\n".join(lines)


def _ones(tensors: int) -> dict[str, Any]:
    return {"t": {f"layer.{i}.weight": torch.ones(1) for i in range(tensors)}}


def _adamw(parameters: int) -> dict[str, Any]:
    """Return parameters of one element and their optimizer: four tensors for each."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(parameters)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--fixed", type=int, default=0, metavar="TENSORS", help="only that")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to write to")
    parser.add_argument("--json", type=Path, default=OUT / "async_stall.json", help="result file")
    parser.add_argument("--seed", type=int, default=20240614, help="of the values and the order")
    return parser.parse_args()


if __name__ == "__main__":
    main()
