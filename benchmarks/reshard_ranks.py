"""The ranks of `reshard.py`: processes that hold a state in some layout, and load it when told."""

import importlib
import multiprocessing
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from durable import sync_all
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as load_dcp
from torch.distributed.checkpoint import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from training_state import State, make_state, state_bytes

import holdfast

RANKS = 4  # processes; a layout has the first so many
_bytecheckpoint: Any = None


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, and how tensors lie on each of its dimensions; None: plain tensors, replicated."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...] | None

    @property
    def ranks(self) -> int:
        """How many."""
        return int(torch.Size(self.mesh).numel())


LAYOUTS = {
    "4 replicas": Layout((4,), None),
    "2 shards": Layout((2,), (Shard(0),)),
    "3 shards": Layout((3,), (Shard(0),)),
    "4 shards": Layout((4,), (Shard(0),)),
    "2 x 2 HSDP": Layout((2, 2), (Replicate(), Shard(0))),
    "2 x 2 by rows and columns": Layout((2, 2), (Shard(0), Shard(1))),
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A way for several ranks to save and load; loads fill the state in place."""

    save: Callable[[State, Path, dist.ProcessGroup], None]
    load: Callable[[State, Path, dist.ProcessGroup], None]
    replicas_only: bool = False


def _save_holdfast(state: State, path: Path, group: dist.ProcessGroup) -> None:
    holdfast.save(state, path, group=group)


def _load_holdfast(state: State, path: Path, group: dist.ProcessGroup) -> None:
    # Not io_uring, whose reads the kernel does not count for a process.
    holdfast.load(path, into=state, group=group, options=holdfast.Options(io="direct"))


def _save_dcp(state: State, path: Path, group: dist.ProcessGroup) -> None:
    writer = FileSystemWriter(path, thread_count=2, sync_files=True)
    save_dcp(state, storage_writer=writer, process_group=group)


def _load_dcp(state: State, path: Path, group: dist.ProcessGroup) -> None:
    load_dcp(state, storage_reader=FileSystemReader(path), process_group=group)


def _save_bytecheckpoint(state: State, path: Path, group: dist.ProcessGroup) -> None:
    _bytecheckpoint.DDPCheckpointer.save(str(path), {"model": _bytecheckpoint.Model(state)})


def _load_bytecheckpoint(state: State, path: Path, group: dist.ProcessGroup) -> None:
    model = _bytecheckpoint.Model(state)
    _bytecheckpoint.DDPCheckpointer.load(str(path), {"model": model}, fast_loading=True)


CONTENDERS = {
    "holdfast": Contender(_save_holdfast, _load_holdfast),
    "DCP": Contender(_save_dcp, _load_dcp),
}
if importlib.util.find_spec("bytecheckpoint"):
    CONTENDERS["ByteCheckpoint"] = Contender(
        _save_bytecheckpoint, _load_bytecheckpoint, replicas_only=True
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """One load, over all ranks.

    Attributes:
        asked_bytes: that system calls asked the kernel for, and got.
        disk_bytes: that the kernel fetched from a disk for them.
        seconds: from the first rank's start to the last one's return.
    """

    asked_bytes: int
    disk_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Task:
    """One thing for the ranks of a layout to do."""

    verb: Literal["save", "load"]
    who: str
    layout: str
    path: Path


class Ranks:
    """Processes of one gloo group over loopback, each with the same state."""

    def __init__(self, size_bytes: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection[Task | None, Any]] = []
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = int(found.getsockname()[1])
        for rank in range(RANKS):
            here, there = context.Pipe()
            arguments = (rank, port, size_bytes, seed, there)
            # No daemon: ByteCheckpoint starts a process of its own. The end of a pipe ends a rank.
            context.Process(target=_serve, args=arguments).start()
            there.close()  # and the end of a rank is the end of its pipe
            self._pipes.append(here)
        sizes = [pipe.recv() for pipe in self._pipes]
        self.state_bytes = int(sizes[0])

    def save(self, who: str, layout: str, path: Path) -> None:
        """Save, durably."""
        self._run(Task("save", who, layout, path))
        sync_all(path)

    def load(self, who: str, layout: str, path: Path) -> Measured:
        """Load; check every bit."""
        found = self._run(Task("load", who, layout, path))
        if wrong := [name for _, _, _, _, names in found for name in names]:
            raise SystemExit(f"{who} loaded other values than it saved: {', '.join(wrong)}")
        starts, ends, asked, disk, _ = zip(*found, strict=True)
        return Measured(sum(asked), sum(disk), max(ends) - min(starts))

    def stop(self) -> None:
        """Let the processes end."""
        for pipe in self._pipes:
            pipe.send(None)

    def _run(self, task: Task) -> list[Any]:
        pipes = self._pipes[: LAYOUTS[task.layout].ranks]
        for pipe in pipes:
            pipe.send(task)
        return [pipe.recv() for pipe in pipes]


def _serve(
    rank: int, port: int, size_bytes: int, seed: int, pipe: "Connection[Any, Task | None]"
) -> None:
    try:
        _serve_tasks(rank, port, size_bytes, seed, pipe)
    except EOFError:  # whoever gives them is gone
        pass
    finally:
        for child in multiprocessing.active_children():
            child.terminate()


def _serve_tasks(
    rank: int, port: int, size_bytes: int, seed: int, pipe: "Connection[Any, Task | None]"
) -> None:
    global _bytecheckpoint
    torch.set_num_threads(1)  # as torchrun does
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    if "ByteCheckpoint" in CONTENDERS:
        _bytecheckpoint = importlib.import_module("compare.bytecheckpoint")
    meshes = {
        name: DeviceMesh("cpu", torch.arange(layout.ranks).reshape(layout.mesh))
        for name, layout in LAYOUTS.items()
    }
    groups = {n: dist.new_group(list(range(n))) for n in {la.ranks for la in LAYOUTS.values()}}
    whole = make_state(size_bytes, seed)
    pipe.send(state_bytes(whole))
    while (task := pipe.recv()) is not None:
        layout, contender = LAYOUTS[task.layout], CONTENDERS[task.who]
        state, group = _laid_out(whole, layout, meshes[task.layout]), groups[layout.ranks]
        if task.verb == "save":
            contender.save(state, task.path, group)
            pipe.send(None)
            continue
        expected = {name: part.clone() for name, part in _parts(state)}
        for _, part in _parts(state):
            part.fill_(-torch.inf)
        before = _counted()
        dist.barrier(group)
        started = time.perf_counter()  # one clock for all processes of a machine
        contender.load(state, task.path, group)
        ended, after = time.perf_counter(), _counted()
        wrong = [name for name, part in _parts(state) if not torch.equal(part, expected[name])]
        pipe.send((started, ended, after[0] - before[0], after[1] - before[1], wrong))
    dist.destroy_process_group()


def _laid_out(whole: State, layout: Layout, mesh: DeviceMesh) -> State:
    """Return this rank's part of a state, in memory of its own."""

    def lay(tensor: torch.Tensor) -> torch.Tensor:
        if layout.placements is None:
            return tensor.clone()
        fitting = [
            p if p.is_replicate() or p.dim < tensor.ndim else Replicate() for p in layout.placements
        ]
        laid = distribute_tensor(tensor, mesh, fitting, src_data_rank=None)
        return laid.clone()

    return {room: {name: lay(t) for name, t in tensors.items()} for room, tensors in whole.items()}


def _parts(state: State) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{room}.{name}", tensor.to_local() if hasattr(tensor, "to_local") else tensor)
        for room, tensors in state.items()
        for name, tensor in tensors.items()
    ]


def _counted() -> tuple[int, int]:
    """Return what the kernel has counted: bytes asked for, bytes from a disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]), int(counts["read_bytes"])
