"""The ranks of `parallel.py`: processes that hold one state, and save it together when told to."""

import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from compare import dcp, torch_save
from durable import sync_all
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_dcp
from training_state import State, differences, empty_like, flat, make_state, state_bytes

import holdfast

DCP_THREADS = (1, 2, 4)  # which is best differs with the number of ranks
_dcp, _torch_save = dcp.peers()[0], torch_save.peers()[0]


@dataclass(frozen=True, slots=True)
class Saver:
    """A way for several ranks to save one state.

    Attributes:
        save: called on every rank of the group; durable when it has returned on all.
        load: fills a state of the same shapes in place, by one rank alone.
        rank_of: which rank wrote a file, by its name.
    """

    name: str
    save: Callable[[State, Path, dist.ProcessGroup], None]
    load: Callable[[Path, State], None]
    rank_of: Callable[[str], int]


def savers() -> dict[str, Saver]:
    """Return the contenders by name."""
    found = [Saver("holdfast", _save_holdfast, _load_holdfast, _rank_of_holdfast)]
    found += [_dcp_saver(threads) for threads in DCP_THREADS]
    found += [Saver("torch.save", _save_torch, _torch_save.load, lambda name: 0)]
    return {saver.name: saver for saver in found}


def _save_holdfast(state: State, path: Path, group: dist.ProcessGroup) -> None:
    holdfast.save(state, path, group=group)


def _load_holdfast(path: Path, state: State) -> None:
    holdfast.load(path, into=state, group="alone")


def _rank_of_holdfast(name: str) -> int:
    return 0 if name == "MANIFEST" else int(name.partition("-")[0])  # <rank>-<number>.hf


def _dcp_saver(threads: int) -> Saver:
    def save(state: State, path: Path, group: dist.ProcessGroup) -> None:
        writer = FileSystemWriter(path, thread_count=threads, sync_files=True)
        save_dcp(state, storage_writer=writer, process_group=group)
        if dist.get_rank() == 0:  # .metadata and the directories; the data files are durable
            sync_all(path)

    name = f"DCP, {threads} thread{'s' if threads > 1 else ''} a rank"
    return Saver(name, save, _dcp.load, _rank_of_dcp)


def _rank_of_dcp(name: str) -> int:
    return 0 if name == ".metadata" else int(name.split("_")[2])  # __<rank>_<number>.distcp


def _save_torch(state: State, path: Path, group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 0:
        _torch_save.save(state, path)
    dist.barrier(group)


@dataclass(frozen=True, slots=True)
class Task:
    """One thing for the first so many ranks to do."""

    verb: Literal["save", "check"]
    who: str
    ranks: int
    path: Path


class Ranks:
    """Processes of one gloo group over loopback, each with the same state."""

    def __init__(self, counts: Sequence[int], size_bytes: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection[Task | None, Any]] = []
        port = _free_port()
        for rank in range(max(counts)):
            here, there = context.Pipe()
            arguments = (rank, tuple(counts), port, size_bytes, seed, there)
            # A daemon ends with this process, whatever happens here.
            context.Process(target=_serve, args=arguments, daemon=True).start()
            there.close()  # so that the end of a rank is the end of its pipe
            self._pipes.append(here)
        ready = [pipe.recv() for pipe in self._pipes]
        self.state_bytes, self.tensors = ready[0]

    def save(self, who: str, ranks: int, path: Path) -> float:
        """Save; return the seconds from the first rank's start to the last one's return."""
        times = self._run(Task("save", who, ranks, path))
        return float(max(end for _, end in times) - min(start for start, _ in times))

    def check(self, who: str, path: Path) -> None:
        """Load on one rank what was saved, and compare every bit."""
        if wrong := self._run(Task("check", who, 1, path))[0]:
            raise SystemExit(f"{who} loaded other values than it saved: {', '.join(wrong)}")

    def stop(self) -> None:
        """Let the processes end."""
        for pipe in self._pipes:
            pipe.send(None)

    def _run(self, task: Task) -> list[Any]:
        for pipe in self._pipes[: task.ranks]:
            pipe.send(task)
        return [pipe.recv() for pipe in self._pipes[: task.ranks]]


def _serve(
    rank: int,
    counts: tuple[int, ...],
    port: int,
    size_bytes: int,
    seed: int,
    pipe: "Connection[Any, Task | None]",
) -> None:
    torch.set_num_threads(1)  # as torchrun does
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=max(counts))
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    state, known = make_state(size_bytes, seed), savers()
    pipe.send((state_bytes(state), len(flat(state))))
    while (task := pipe.recv()) is not None:
        saver = known[task.who]
        if task.verb == "check":
            target = empty_like(state)
            saver.load(task.path, target)
            pipe.send(differences(target, state))
            continue
        dist.barrier(groups[task.ranks])
        started = time.perf_counter()  # one clock for all processes of a machine
        saver.save(state, task.path, groups[task.ranks])
        pipe.send((started, time.perf_counter()))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
