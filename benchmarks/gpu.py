"""Saves and loads of a model that trains on a CUDA device, beside what the machine and DCP can do.

    python benchmarks/gpu.py stall    # a call, beside one copy of the same bytes to pinned memory
    python benchmarks/gpu.py train    # steps while a save is in flight, beside steps alone
    python benchmarks/gpu.py disk     # durable saves and cold loads, beside fio and peers
    python benchmarks/gpu.py codecs   # the same saves, encoded on the host's processors

The state is that of a GPT-NeoX under bf16 autocast: f32 weights and both f32 moments of AdamW of
1.5 billion parameters, 18 GB. Rounds are shuffled. Each part ends within three minutes and writes
its figures as JSON. Without a CUDA device nothing is measured; `--device cpu` tries the program.
"""

import argparse
import json
import random
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import machine
import quiet
import torch
import torch.distributed.checkpoint as dcp
from compare import fio
from durable import sync_all
from neox import NeoX, Recipe, Shape, loss_of, make_optimizer
from ratios import quartiles
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import holdfast

OUT = Path(__file__).parent / "out"
Figures = dict[str, list[float]]
Verbs = tuple[Callable[[], object], Callable[[], object]]  # save, load


class Training:
    """The model, its optimizer, and batches of random tokens, all on the device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = options.device
        shape = Shape(options.layers, options.width, options.width // 128, 50304, options.context)
        with torch.device(self.device):
            self.model = NeoX(shape)
            size = (options.batch, options.context + 1)
            self.batches = torch.randint(0, 50304, (4, *size))
        self.optimizer = make_optimizer(self.model, Recipe(rate=1e-4))
        self.gathered = options.gathered
        self.step()
        self.state = {"model": self.model, "optimizer": self.optimizer}
        moments = [v for part in self.optimizer.state.values() for v in part.values()]
        self.tensors = [t.detach() for t in (*self.model.parameters(), *moments)]
        self.size_bytes = sum(t.nbytes for t in self.tensors)

    def step(self) -> float:
        """Take a step, of several batches; return its seconds."""
        started = time.perf_counter()
        for number in range(self.gathered):
            loss_of(self.model, self.batches[number % 4]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.settle()
        return time.perf_counter() - started

    def settle(self) -> None:
        """Wait until the device has done everything."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def flat(self) -> dict[str, Any]:
        """Return the state by DCP's names."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def part(self, size_bytes: float) -> dict[str, torch.Tensor]:
        """Return tensors of about so many bytes, each by a name."""
        found, total = {}, 0
        for number, tensor in enumerate(self.tensors):
            if total < size_bytes and tensor.device.type == self.device:
                found[f"t{number:04d}"], total = tensor, total + tensor.nbytes
        return found


def stall(training: Training, options: argparse.Namespace, scratch: Path) -> Figures:
    """How long a call holds up the loop. What was staged is not written: the save is cancelled."""
    memory = torch.empty(training.size_bytes, dtype=torch.uint8, pin_memory=options.pin)
    pairs, at = [], 0
    for tensor in training.tensors:
        pairs.append((memory[at : at + tensor.nbytes].view(tensor.dtype), tensor.view(-1)))
        at += tensor.nbytes

    def copied() -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        training.settle()

    staged: Figures = {}

    def saved(stage: Any) -> Callable[[], Callable[[], object]]:
        def call() -> Callable[[], object]:
            handle = holdfast.save_async(training.state, scratch / "stall", stage=stage)
            took = sum(
                end - began for part, began, end, _ in handle.ledger.spans if part == "stage"
            )
            staged.setdefault(f"holdfast, {stage}: of that, copies", []).append(took)
            return lambda: (handle.cancel(), handle.exception())

        return call

    ways: dict[str, Callable[[], Any]] = {
        "one copy of each tensor to pinned memory": copied,
        "holdfast, eager": saved("eager"),
        "holdfast, lazy": saved("lazy"),
    }
    for name, shared in {"DCP, pinned": False, "DCP, pinned and shared": True}.items():
        if options.pin and not options.thin:
            stager = DefaultStager(StagingOptions(True, shared, False, True))
            ways[name] = lambda stager=stager: stager.stage(training.flat()) and None
    found = _shuffled(ways, options, training.settle)
    return found | {name: values[1:] for name, values in staged.items()}


def _shuffled(
    ways: dict[str, Callable[[], Any]], options: argparse.Namespace, settle: Callable[[], None]
) -> Figures:
    """Call each once a round; the first round fills pools, and does not count."""
    order, found = random.Random(options.seed), {name: list[float]() for name in ways}
    for number in range(options.rounds + 1):
        for name in order.sample(list(ways), len(ways)):
            if name not in found:
                continue
            settle()
            started = time.perf_counter()
            try:
                after = ways[name]()
            except Exception as error:  # a peer's; the others go on
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                del found[name]
                continue
            took = time.perf_counter() - started
            if after is not None:
                after()
            if number:
                found[name].append(took)
            print(f"{number} {name}: {took:.4f} s", file=sys.stderr, flush=True)
    return found


def train(training: Training, options: argparse.Namespace, scratch: Path) -> Figures:
    """Steps alone; then a save, and steps until it is committed, again and again."""
    found: Figures = {"step alone": [training.step() for _ in range(options.steps)][2:]}

    def with_save(name: str, start: Callable[[Path], Callable[[], bool]]) -> None:
        path = scratch / "train"
        began = time.perf_counter()
        done = start(path)
        found.setdefault(f"{name}: call", []).append(time.perf_counter() - began)
        steps = found.setdefault(f"{name}: steps", [])
        first = len(steps)
        while not done():
            steps.append(training.step())
        found.setdefault(f"{name}: count", []).append(len(steps) - first)
        found.setdefault(f"{name}: first step", []).append(steps[first])
        shutil.rmtree(path)

    def holdfast_as(stage: Any) -> Callable[[Path], Callable[[], bool]]:
        def start(path: Path) -> Callable[[], bool]:
            handle = holdfast.save_async(training.state, path, stage=stage)
            return lambda: handle.done() and handle.result() is not None

        return start

    def with_dcp(path: Path) -> Callable[[], bool]:
        writer = dcp.FileSystemWriter(path, thread_count=4, sync_files=True)
        future = dcp.async_save(training.flat(), storage_writer=writer, async_stager=stager)
        future = getattr(future, "upload_completion", future)
        return lambda: future.done() and future.result() is not None

    ways = {"holdfast, lazy": holdfast_as("lazy"), "holdfast, eager": holdfast_as("eager")}
    if options.pin and not options.thin:
        stager = DefaultStager(StagingOptions(True, False, False, True))
        ways["DCP, pinned"] = with_dcp
    order = random.Random(options.seed)
    holdfast.save_async(training.part(1e6), scratch / "warm").result()
    for number in range(options.saves):
        for name in order.sample(list(ways), len(ways)):
            if number and name.startswith("DCP"):
                continue
            try:
                with_save(name, ways[name])
            except Exception as error:  # a peer's; the others go on
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                shutil.rmtree(scratch / "train", ignore_errors=True)
                if not name.startswith("DCP"):
                    raise
            found["step alone"] += [training.step() for _ in range(3)]
    return found


def disk(training: Training, options: argparse.Namespace, scratch: Path) -> Figures:
    """Durable saves from the device and cold loads to it, beside fio on the same disk."""
    state = training.part(options.disk_gb * 1e9)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    found: Figures = {"bytes": [sum(tensor.nbytes for tensor in state.values())]}

    def timed(name: str, call: Callable[[], object], number: int) -> None:
        quiet.prepare(scratch, 0)
        training.settle()
        started = time.perf_counter()
        result = call()
        training.settle()
        took = result if isinstance(result, float) else time.perf_counter() - started
        if number:
            found.setdefault(name, []).append(took)
        print(f"{number} {name}: {took:.3f} s", file=sys.stderr, flush=True)

    pairs = _verbs(state, target, options, scratch)
    order = random.Random(options.seed)
    for number in range(options.rounds + 1):
        for name in order.sample(list(pairs), len(pairs)):
            if name not in ("holdfast", "fio") and number > 1:
                continue
            save, load = pairs[name]
            try:
                timed(f"{name}: save", save, number)
                for tensor in target.values():
                    tensor.zero_()
                timed(f"{name}: load", load, number)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            if name == "holdfast":
                same = all(torch.equal(target[key], value) for key, value in state.items())
                found.setdefault("loads that differ", []).append(0 if same else 1)
            _clear(scratch)
    return found


def _verbs(
    state: dict[str, torch.Tensor],
    target: dict[str, torch.Tensor],
    options: argparse.Namespace,
    scratch: Path,
) -> dict[str, Verbs]:
    """Return how each saves and loads; fio's seconds are by its own clock."""
    file, size = scratch / "fio", sum(tensor.nbytes for tensor in state.values())
    (setting,) = [each for each in fio.SETTINGS if each.name == "fio 4M qd8"]

    def torch_save() -> None:
        torch.save(state, scratch / "torch.pt")
        sync_all(scratch / "torch.pt")

    def torch_load() -> None:
        loaded = torch.load(scratch / "torch.pt", map_location=options.device, mmap=True)
        for name, tensor in loaded.items():
            target[name].copy_(tensor)

    def dcp_save() -> None:
        writer = dcp.FileSystemWriter(scratch / "dcp", thread_count=4, sync_files=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
        sync_all(scratch / "dcp")

    def dcp_load() -> None:
        reader = dcp.FileSystemReader(scratch / "dcp")
        dcp.load(target, storage_reader=reader, no_dist=True)

    pairs: dict[str, Verbs] = {
        "holdfast": (
            lambda: holdfast.save(state, scratch / "holdfast"),
            lambda: holdfast.load(scratch / "holdfast", into=target),
        ),
        "fio": (
            lambda: fio.run(setting, "write", file, fio.file_bytes(size)),
            lambda: fio.run(setting, "read", file, fio.file_bytes(size)),
        ),
    }
    if not options.thin:
        pairs |= {"torch.save": (torch_save, torch_load), "DCP, 4 threads": (dcp_save, dcp_load)}
    return pairs


def codecs(training: Training, options: argparse.Namespace, scratch: Path) -> Figures:
    """Saves of the whole state under each codec: bytes, seconds, and of a delta after a step."""
    found: Figures = {}
    kinds = ["raw", "lossless", "delta:replay", "compact:balanced"]
    for kind in kinds[:2] if options.thin else kinds:
        run = scratch / "run"
        for number in (1, 2) if kind not in ("raw", "lossless") else (1,):
            path = run / f"step-{number:08d}"
            handle = holdfast.save_async(training.state, path, codec=kind)
            began = time.perf_counter()
            handle.result()
            took = time.perf_counter() - began
            size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            key = kind if number == 1 else f"{kind}, one step later"
            found[f"{key}: seconds after the copy"] = [took]
            found[f"{key}: share of the bytes"] = [size / training.size_bytes]
            print(f"{key}: {took:.2f} s, {size / training.size_bytes:.4f}", file=sys.stderr)
            training.step()
        target = {"model": training.model, "optimizer": training.optimizer}
        began = time.perf_counter()
        holdfast.load(run / f"step-{number:08d}", into=target)
        found[f"{kind}: load seconds"] = [time.perf_counter() - began]
        _clear(scratch)
    return found


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _scratch(options: argparse.Namespace) -> Iterator[Path]:
    scratch: Path = options.directory / "gpu"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


PARTS = {"stall": stall, "train": train, "disk": disk, "codecs": codecs}


def main() -> int:
    """Measure, print a table, write the JSON."""
    options = _arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        return 2
    options.pin = options.device == "cuda"
    training = Training(options)
    name = torch.cuda.get_device_name() if options.pin else "no device"
    with _scratch(options) as scratch:
        facts = machine.describe(scratch) | {"device": name}
        for part in options.parts:
            began = time.perf_counter()
            figures = PARTS[part](training, options, scratch)
            result = {
                "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
                "machine": facts,
                "state_bytes": training.size_bytes,
                "figures": figures,
            }
            options.json.mkdir(parents=True, exist_ok=True)
            (options.json / f"gpu-{part}.json").write_text(json.dumps(result, indent=1) + "\n")
            print(report(part, result), f"\n{time.perf_counter() - began:.0f} s\n", flush=True)
            _clear(scratch)
    return 0


def report(part: str, result: dict[str, Any]) -> str:
    """Return a part's figures as Markdown."""
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [f"- {part}: a state of {result['state_bytes'] / 1e9:.2f} GB", ""]
    lines += ["| | median | quartiles | n |", "|---|---|---|---|"]
    for name, values in result["figures"].items():
        low, high = quartiles(values)
        lines.append(f"| {name} | {median(values):.4f} | {low:.4f} to {high:.4f} | {len(values)} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--width", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8, help="sequences at a time")
    parser.add_argument("--gathered", type=int, default=4, help="batches of a step")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--saves", type=int, default=2, help="of each way, in the part `train`")
    parser.add_argument("--steps", type=int, default=12, help="alone, before the first save")
    parser.add_argument("--disk-gb", type=float, default=6.0, help="of the part `disk`")
    parser.add_argument("--thin", action="store_true", help="without peers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to write to")
    parser.add_argument("--json", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--seed", type=int, default=20240614, help="of the order")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
