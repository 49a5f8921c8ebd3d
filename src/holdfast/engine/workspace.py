"""Memory and threads for codecs: made once, used again by every save and load.

Knows chunks and addresses; no tensors, no files.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._pieces: list[torch.Tensor] = []
        self._piece = self._used = 0

    def clear(self) -> None:
        """Let all of it be taken again."""
        self._piece = self._used = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return so many bytes, aligned as vectors like it, which stay until `clear`."""
        while self._piece < len(self._pieces):
            piece, start = self._pieces[self._piece], -(-self._used // ALIGN_BYTES) * ALIGN_BYTES
            if start + size_bytes <= piece.nbytes:
                self._used = start + size_bytes
                return piece[start : start + size_bytes]
            self._piece, self._used = self._piece + 1, 0
        memory = Pool(max(PIECE_BYTES, size_bytes), 1).memory()
        self._pieces.append(torch.frombuffer(memory, dtype=torch.uint8))
        return self.take(size_bytes)


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
