"""The ranks of `small.py`: processes of one gloo group, each with tensors that no other has."""

import gc
import multiprocessing
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from small_peers import peers
from small_states import measure, of_rank, same, spoil


@dataclass(frozen=True, slots=True)
class Task:
    """One thing for all ranks to do."""

    verb: Literal["save", "load", "syncs"]
    who: str
    path: Path


class Ranks:
    """Processes that stay alive over the rounds."""

    def __init__(self, count: int, seed: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["small_ranks"])
        self._pipes: list[Connection[Task | None, Any]] = []
        self._processes = []
        port = _free_port()
        for rank in range(count):
            here, there = context.Pipe()
            # A daemon ends with this process, whatever happens here.
            process = context.Process(
                target=_serve, args=(rank, count, port, seed, there), daemon=True
            )
            process.start()
            there.close()  # so that the end of a rank is the end of its pipe
            self._pipes.append(here)
            self._processes.append(process)
        sizes = [pipe.recv() for pipe in self._pipes]
        self.tensors, self.bytes = (sum(column) for column in zip(*sizes, strict=True))

    def seconds(self, verb: Literal["save", "load"], who: str, path: Path) -> float:
        """Save or load; return the seconds from the first rank's start to the last one's return."""
        times = self._run(Task(verb, who, path))
        return float(max(end for _, end in times) - min(start for start, _ in times))

    def syncs(self, who: str, path: Path) -> int:
        """Save; return the most fsyncs that one rank made: ranks make theirs side by side."""
        return int(max(self._run(Task("syncs", who, path))))

    def stop(self) -> None:
        """Let the processes end."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()

    def _run(self, task: Task) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(task)
        return [pipe.recv() for pipe in self._pipes]


def _serve(
    rank: int, count: int, port: int, seed: int, pipe: "Connection[Any, Task | None]"
) -> None:
    torch.set_num_threads(1)  # as torchrun does
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=count)
    sample, target, known = of_rank(rank, seed), of_rank(rank, seed + 1), peers()
    pipe.send(measure(sample.tensors()))
    while (task := pipe.recv()) is not None:
        peer = known[task.who]
        if task.verb == "syncs":
            pipe.send(peer.syncs(sample, task.path))
            continue
        spoil(target.tensors())
        gc.collect()
        dist.barrier()
        started = time.perf_counter()  # one clock for all processes of a machine
        if task.verb == "save":
            peer.save(sample, task.path)
        else:
            peer.load(task.path, target)
        ended = time.perf_counter()
        if task.verb == "load" and not same(target.tensors(), sample.tensors()):
            raise SystemExit(f"{task.who} loaded other values than it saved on rank {rank}")
        pipe.send((started, ended))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
