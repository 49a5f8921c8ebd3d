"""Ways to write a state durably and to read it back: holdfast's, plain system calls, fio.

Each is timed from call to return. None knows of the others, or of rounds.
"""

import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from .. import load, save
from ..errors import StoreError
from ..options import STREAM_BYTES, Options
from .bench_disk import remove

State = dict[str, torch.Tensor]

BACKENDS = ("io_uring", "direct", "buffered")  # in the order in which "auto" tries them
BLOCKS_BYTES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
DEPTHS = (8, 16, 32)
BLOCK_BYTES = 8 << 20  # of a plain write; states are multiples of it, so all move the same bytes
TENSOR_BYTES = 64 << 20
FIO_SETTINGS = ((1 << 20, 8), (4 << 20, 8), (4 << 20, 32))  # those of benchmarks/compare/fio.py
FIO_COMMON = (
    "--name=bench",
    "--ioengine=io_uring",
    "--direct=1",
    "--fallocate=posix",
    "--end_fsync=1",
    "--invalidate=1",
    "--output-format=json",
)


class Contender(Protocol):
    """A way to save and load."""

    @property
    def name(self) -> str:
        """As shown."""

    @property
    def cached(self) -> bool:
        """Whether what it moves goes through the page cache."""

    def save(self, path: Path, state: State) -> float:
        """Write to a path where nothing is, durably; return the seconds it took."""

    def load(self, path: Path, state: State) -> float:
        """Read it all back; return the seconds it took."""


@dataclass(frozen=True, slots=True)
class Holdfast:
    """`holdfast.save`, and a verified `holdfast.load` into the same memory."""

    options: Options

    @property
    def name(self) -> str:
        """See `Contender`."""
        options = self.options
        return f"holdfast {options.io}, {_show(options.block_bytes, options.queue_depth)}"

    @property
    def cached(self) -> bool:
        """See `Contender`."""
        return self.options.io == "buffered"

    def save(self, path: Path, state: State) -> float:
        """See `Contender`."""
        # Its queue and threads are made by the first save with these options, and then kept.
        small = path.with_name("small")
        save({}, small, group="alone", options=self.options)
        remove(small)
        return _seconds(lambda: save(state, path, group="alone", options=self.options))

    def load(self, path: Path, state: State) -> float:
        """See `Contender`."""

        def load_all() -> None:
            load(path, into=state, group="alone", options=self.options)

        return _seconds(load_all)


@dataclass(frozen=True, slots=True)
class Plain:
    """One thread that makes one system call after the other, from one buffer.

    With ``direct``, into a preallocated file past the page cache; otherwise write and fsync, as
    most programs do.
    """

    direct: bool

    @property
    def name(self) -> str:
        """See `Contender`."""
        how = "pwrite, O_DIRECT" if self.direct else "write, page cache"
        return f"plain {how}, {_show(BLOCK_BYTES, 1)}"

    @property
    def cached(self) -> bool:
        """See `Contender`."""
        return not self.direct

    def save(self, path: Path, state: State) -> float:
        """See `Contender`."""
        size_bytes = state_bytes(state)

        def write(descriptor: int, buffer: mmap.mmap) -> None:
            if self.direct:
                os.posix_fallocate(descriptor, 0, size_bytes)
            done = 0
            while done < size_bytes:
                done += os.pwrite(descriptor, buffer, done)
            os.fsync(descriptor)

        return self._timed(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, write)

    def load(self, path: Path, state: State) -> float:
        """See `Contender`."""
        size_bytes = state_bytes(state)

        def read(descriptor: int, buffer: mmap.mmap) -> None:
            done = 0
            while done < size_bytes:
                count = os.preadv(descriptor, [buffer], done)
                if not count:
                    raise StoreError(f"{path} ends at byte {done}; expected {size_bytes} bytes")
                done += count

        return self._timed(path, os.O_RDONLY, read)

    def _timed(self, path: Path, flags: int, move: Callable[[int, mmap.mmap], None]) -> float:
        flags |= os.O_DIRECT if self.direct else 0
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:  # page-aligned, as O_DIRECT needs it
            buffer[:] = os.urandom(BLOCK_BYTES)

            def open_and_move() -> None:
                descriptor = os.open(path, flags, 0o600)
                try:
                    move(descriptor, buffer)
                finally:
                    os.close(descriptor)

            return _seconds(open_and_move)


@dataclass(frozen=True, slots=True)
class Fio:
    """fio, by its own clock: operations and fsync, without its start and without fallocate."""

    block_bytes: int
    depth: int

    @property
    def name(self) -> str:
        """See `Contender`."""
        return f"fio io_uring, {_show(self.block_bytes, self.depth)}"

    @property
    def cached(self) -> bool:
        """See `Contender`."""
        return False

    def save(self, path: Path, state: State) -> float:
        """See `Contender`."""
        return self._run("write", path, state_bytes(state))

    def load(self, path: Path, state: State) -> float:
        """See `Contender`."""
        return self._run("read", path, state_bytes(state))

    def _run(self, verb: str, path: Path, size_bytes: int) -> float:
        own = (f"--bs={self.block_bytes}", f"--iodepth={self.depth}", f"--size={size_bytes}")
        name = str(path).replace(":", "\\:")  # which otherwise ends a name, and begins another
        command = ["fio", *FIO_COMMON, f"--rw={verb}", *own, f"--filename={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise StoreError(f"fio: {said[0] if said else f'exit code {done.returncode}'}")
        # fio puts warnings before its JSON.
        result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][verb]
        if result["io_bytes"] != size_bytes:
            raise StoreError(f"fio: {verb} moved {result['io_bytes']} bytes of {size_bytes}")
        return float(max(result["runtime"], 1)) / 1000


def make_state(size_bytes: int) -> State:
    """Return tensors of random bytes, which nothing below can shrink, with every page touched.

    Args:
        size_bytes: of all of them; a multiple of `BLOCK_BYTES`.
    """
    state = {}
    for start in range(0, size_bytes, TENSOR_BYTES):
        elements = min(TENSOR_BYTES, size_bytes - start) // 8
        values = torch.empty(elements, dtype=torch.int64, device="cpu").random_()
        state[f"weight-{start // TENSOR_BYTES}"] = values.view(torch.float32)
    return state


def state_bytes(state: State) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.nbytes for tensor in state.values())


def grid(io: str) -> list[Holdfast]:
    """Return one backend with all blocks and depths that differ within the pool."""
    return [
        Holdfast(Options(io=io, block_bytes=block, queue_depth=depth))
        for block in BLOCKS_BYTES
        for depth in DEPTHS
        if block * depth <= STREAM_BYTES  # more than the pool is never in flight
    ]


def fio_is_installed() -> bool:
    """Return whether there is a fio."""
    return shutil.which("fio") is not None


def _show(block_bytes: int, depth: int) -> str:
    return f"{block_bytes >> 20} MiB x {depth}"


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
