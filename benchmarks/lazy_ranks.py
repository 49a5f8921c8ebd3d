"""The ranks of `lazy.py`: they train one replicated model on the CPU, and save it at every step."""

import multiprocessing
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast._core import Pool, Queue, Vfs, copy_pieces

BLOCK_BYTES = 16 << 20
IDLE_S = 0.15  # of a step that computes nothing
KEPT = 2  # directories of a run on the disk: the one being written, and the one before


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and its batch: the width decides the bytes, the batch the time of a step.

    With ``idle`` a step sleeps in place of forward and backward: the processor time is the saves'.
    """

    width: int
    layers: int
    batch: int
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps in a row, saved in one way, of one rank.

    Attributes:
        seconds, stalls: of each step.
        processor_s: of all of them, in all threads of the rank, until the last save is committed.
    """

    seconds: list[float]
    stalls: list[float]
    processor_s: float


class Way(Protocol):
    """A way to save: called before each step's forward; returns the seconds it held the loop up."""

    def save(self, path: Path) -> float:
        """Save what is there now."""

    def stalled(self) -> float:
        """Return the seconds that the last save held up the optimizer."""

    def finish(self) -> None:
        """Wait for what is in flight."""


class Nothing:
    """No checkpoint at all."""

    def __init__(self, state: dict[str, Any]) -> None:
        """Take the state, to be made like the others."""

    def save(self, path: Path) -> float:
        """Do nothing."""
        return 0.0

    def stalled(self) -> float:
        """Return 0."""
        return 0.0

    def finish(self) -> None:
        """Do nothing."""


class Control:
    """The least that can be done: a thread copies this rank's half of the bytes, and writes them.

    Without names, checksums or a commit, and without waiting before the optimizer's step: what it
    writes is torn. It writes as holdfast does, through the same queue.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        tensors = [*state["model"].parameters()]
        for moments in state["optimizer"].state.values():
            tensors += [value for value in moments.values() if value.numel() > 1]
        half = sum(tensor.nbytes for tensor in tensors) // 2
        self._pieces, size = [], 0
        for tensor in tensors[dist.get_rank() :: 2] + tensors[1 - dist.get_rank() :: 2]:
            part = min(tensor.nbytes, half - size)
            if part > 0:
                self._pieces.append((size, tensor.data_ptr(), part))
                size += part
        self._slots = -(-size // BLOCK_BYTES)
        self._vfs, self._pool = Vfs.posix(), Pool(BLOCK_BYTES, self._slots)
        self._queue = Queue(self._vfs, "io_uring", self._pool)
        self._thread: threading.Thread | None = None

    def save(self, path: Path) -> float:
        """Start the thread, after the one before."""
        started = time.perf_counter()
        self.finish()
        taken = time.perf_counter() - started
        self._thread = threading.Thread(target=self._write, args=(path,))
        self._thread.start()
        return taken

    def stalled(self) -> float:
        """Return 0: the optimizer is not waited with."""
        return 0.0

    def finish(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, path: Path) -> None:
        table = np.array(self._pieces, np.uint64).T.copy()
        copy_pieces(table[0] + np.uint64(self._pool.address(0)), table[1], table[2], 1)
        path.mkdir(parents=True, exist_ok=True)
        file = self._vfs.create(str(path / f"{dist.get_rank()}.bin"), direct=True)
        self._vfs.allocate(file, self._slots * BLOCK_BYTES)
        for slot in range(self._slots):
            address = self._pool.address(slot)
            self._queue.submit_write(file, address, BLOCK_BYTES, slot * BLOCK_BYTES, slot)
        while self._queue.pending:
            self._queue.wait()
        self._vfs.sync(file)
        self._vfs.close(file)


class Holdfast:
    """`holdfast.save_async`, as ``stage`` says."""

    def __init__(self, state: dict[str, Any], stage: Any) -> None:
        self._state, self._stage = state, stage
        self._handle: holdfast.SaveHandle | None = None
        self._called_s = 0.0

    def save(self, path: Path) -> float:
        """Call it; it waits for the save before."""
        started = time.perf_counter()
        self._handle = holdfast.save_async(self._state, path, stage=self._stage)
        self._called_s = self._handle.ledger.stall_s
        return time.perf_counter() - started

    def stalled(self) -> float:
        """Return what the hook before the optimizer's step has added since the call."""
        assert self._handle is not None
        return self._handle.ledger.stall_s - self._called_s

    def finish(self) -> None:
        """Wait until it is committed."""
        if self._handle is not None:
            self._handle.result()


WAYS: dict[str, Callable[[dict[str, Any]], Way]] = {
    "no checkpoint": Nothing,
    "control": Control,
    "holdfast, lazy": lambda state: Holdfast(state, "lazy"),
    "holdfast, eager": lambda state: Holdfast(state, "eager"),
}


class Ranks:
    """Two processes that train one model under DistributedDataParallel, gloo over loopback."""

    def __init__(self, size: Size, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection[tuple[str, int] | None, Any]] = []
        port = _free_port()
        for rank in range(2):
            here, there = context.Pipe()
            arguments = (rank, port, size, directory, there)
            context.Process(target=_serve, args=arguments, daemon=True).start()
            there.close()
            self._pipes.append(here)
        ready = [pipe.recv() for pipe in self._pipes]
        self.state_bytes: int = ready[0]

    def run(self, way: str, steps: int) -> Block:
        """Train so many steps, saved in that way; rank 0's times."""
        for pipe in self._pipes:
            pipe.send((way, steps))
        found: list[Block] = [pipe.recv() for pipe in self._pipes]
        return found[0]

    def stop(self) -> None:
        """Let the processes end."""
        for pipe in self._pipes:
            pipe.send(None)


def _serve(
    rank: int,
    port: int,
    size: Size,
    directory: Path,
    pipe: "Connection[Any, tuple[str, int] | None]",
) -> None:
    torch.set_num_threads(1)  # as torchrun does
    torch.manual_seed(0)
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    layers = [part for _ in range(size.layers) for part in (_layer(size.width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(size.batch, size.width)
    _train(model, optimizer, batch)
    state = {"model": model, "optimizer": optimizer}
    ways = {name: make(state) for name, make in WAYS.items()}
    moments = [value for part in optimizer.state.values() for value in part.values()]
    pipe.send(sum(tensor.nbytes for tensor in [*model.parameters(), *moments]))
    number = 0
    while (task := pipe.recv()) is not None:
        way, seconds, stalls = ways[task[0]], list[float](), list[float]()
        processor_s = time.process_time()
        for _ in range(task[1]):
            number += 1
            shutil.rmtree(directory / str(number - KEPT), ignore_errors=True)
            started = time.perf_counter()
            called = way.save(directory / str(number))
            if size.idle:
                optimizer.zero_grad()  # so the step changes nothing, and waits for the copy
                time.sleep(IDLE_S)
                optimizer.step()
            else:
                _train(model, optimizer, batch)
            seconds.append(time.perf_counter() - started)
            stalls.append(called + way.stalled())
        way.finish()
        processor_s = time.process_time() - processor_s
        dist.barrier()
        pipe.send(Block(seconds, stalls, processor_s))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort at the end of Python


def _layer(width: int) -> nn.Module:
    return nn.Linear(width, width)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
