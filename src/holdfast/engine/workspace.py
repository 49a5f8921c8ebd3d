"""Memory and threads for codecs: made once, used again by every save and load.

Knows chunks and addresses; no tensors, no files.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_uint8
from math import prod
from typing import TypeVar

import torch

from .._core import Pool
from ..codecs.base import Block
from ..layout import Chunk

THREADS_MAX = 8  # more of them than that write more than a disk takes
ALIGN_BYTES = 64
PIECE_BYTES = 16 << 20  # memory grows by so much, or by a larger piece

Made = TypeVar("Made")


class Workspace:
    """Memory in huge pages that one task after the other takes from; each begins with `clear`."""

    def __init__(self) -> None:
        self._pieces: list[Pool] = []
        self.clear()

    def clear(self) -> None:
        """Let all of it be taken again."""
        self._next = self._at = self._end = 0  # the piece after this one; what is free of this one

    def take(self, size_bytes: int) -> int:
        """Return the address of so many bytes, aligned for vectors, which stay until `clear`."""
        while self._at + size_bytes > self._end:
            if self._next == len(self._pieces):
                self._pieces.append(Pool(max(PIECE_BYTES, size_bytes), 1))
            piece = self._pieces[self._next]
            self._next, self._at = self._next + 1, piece.address(0)
            self._end = self._at + piece.slot_bytes
        taken = self._at
        self._at += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return taken


def bytes_at(address: int, size_bytes: int) -> torch.Tensor:
    """Return memory as a tensor of bytes; whoever has it keeps the memory there."""
    return torch.frombuffer((c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)


_kept: deque[Workspace] = deque()
os.register_at_fork(after_in_child=_kept.clear)  # a child has not got the memory


def borrow() -> Workspace:
    """Take memory for one task; `give_back` ends that."""
    try:
        room = _kept.pop()
    except IndexError:
        room = Workspace()
    room.clear()
    return room


def give_back(room: Workspace) -> None:
    """Let another task have the memory."""
    _kept.append(room)


def block_at(chunk: Chunk, address: int) -> Block:
    """Return a chunk's elements at an address."""
    shape = chunk.shard.box.shape
    row = prod(shape[1:])
    return Block(address, chunk.elements, chunk.shard.tensor.dtype, row, chunk.first % row)


class Threads:
    """Threads that encode or decode, as nice as the one that made them."""

    def __init__(self) -> None:
        self.count = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self._pool = ThreadPoolExecutor(self.count, "holdfast-codec", _be_nice, (niceness,))

    def submit(self, call: Callable[..., Made], *values: object) -> "Future[Made]":
        """Call it in one of them."""
        return self._pool.submit(call, *values)

    def close(self, *, drop: bool) -> None:
        """Wait for what was begun, and for the rest unless that is to be dropped."""
        self._pool.shutdown(wait=True, cancel_futures=drop)


def _be_nice(niceness: int) -> None:
    if os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < niceness:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
