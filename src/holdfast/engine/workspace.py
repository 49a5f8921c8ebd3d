"""Memory and threads for codecs: made once, used again by every save and load.

Knows chunks and addresses; no tensors, no files.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import addressof, c_uint8
from math import prod
from typing import TypeVar

import torch

from .. import worker
from .._core import Pool, checksum, copy, copy_and_hash_chunk
from ..codecs.base import Block, Payload
from ..errors import StoreError
from ..format import spec
from ..format.data_file import align_payload
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
_of_segments: deque[Workspace] = deque()  # all about as large
os.register_at_fork(after_in_child=_kept.clear)  # a child has not got the memory
os.register_at_fork(after_in_child=_of_segments.clear)


def borrow() -> Workspace:
    """Take memory for one task; `give_back` ends that."""
    return _take_from(_kept)


def give_back(room: Workspace) -> None:
    """Let another task have the memory."""
    _kept.append(room)


def _take_from(kept: deque[Workspace]) -> Workspace:
    try:
        room = kept.pop()
    except IndexError:
        room = Workspace()
    room.clear()
    return room


class Segment:
    """Payloads in memory as they will stand in a data file, one behind the other.

    It begins where a page of the file does. `close` it when nobody reads the payloads any more.

    Attributes:
        address: of its first byte, where a page begins.
        size_bytes: up to the end of the last payload.
        raw_bytes: of the largest payload of mode 0.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Take memory for payloads of so many bytes, `room_of` each."""
        self._room = _take_from(_of_segments)
        self.address = self._room.take(capacity_bytes + spec.LARGE_ALIGN_BYTES)
        self.size_bytes = self.raw_bytes = 0

    def add(self, payload: Payload, seed: int) -> tuple[int, int]:
        """Copy a payload to where it may start; return its offset and checksum."""
        size = payload.size_bytes
        if not size:
            return 0, checksum(0, 0, seed)
        start = align_payload(self.size_bytes, size, payload.mode)
        self._fill(start)
        found, _ = copy_and_hash_chunk(self.address + start, payload.address, size, seed)
        self.size_bytes = start + size
        if payload.mode == spec.MODE_RAW:
            self.raw_bytes = max(self.raw_bytes, size)
        return start, found

    def take_up(self, size_bytes: int, raw_bytes: int) -> None:
        """Take up payloads that stand in their places already, up to so many bytes.

        Args:
            raw_bytes: of the largest of mode 0.
        """
        self.size_bytes, self.raw_bytes = size_bytes, raw_bytes

    def fill_page(self) -> int:
        """Zero what is left of the last page; return the bytes of all pages."""
        self._fill(align_payload(self.size_bytes, spec.LARGE_PAYLOAD_BYTES))
        return self.size_bytes

    def close(self) -> None:
        """Let another one have the memory."""
        _of_segments.append(self._room)

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it when the block that fills it fails."""
        if kind is not None:
            self.close()

    def _fill(self, end: int) -> None:
        copy(self.address + self.size_bytes, _ZEROS, end - self.size_bytes)
        self.size_bytes = end


_zeros = (c_uint8 * spec.LARGE_ALIGN_BYTES)()
_ZEROS = addressof(_zeros)


def room_of(payload_bytes_max: int) -> int:
    """Return what a payload takes of a segment, at most."""
    return payload_bytes_max + spec.LARGE_ALIGN_BYTES


def block_at(chunk: Chunk, address: int) -> Block:
    """Return a chunk's elements at an address."""
    shape = chunk.shard.box.shape
    row = prod(shape[1:])
    return Block(address, chunk.elements, chunk.shard.tensor.dtype, row, chunk.first % row)


class Threads:
    """Threads that encode or decode, as nice as the one that made them."""

    def __init__(self) -> None:
        cores, niceness = os.cpu_count() or 1, 0
        with contextlib.suppress(OSError):  # a sandbox may not let us ask
            cores = len(os.sched_getaffinity(0))
            niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.count = min(THREADS_MAX, cores)
        self._pool = ThreadPoolExecutor(self.count, "holdfast-codec", _be_nice, (niceness,))

    def submit(self, call: Callable[..., Made], *values: object) -> "Future[Made]":
        """Call it in one of them; right here when Python has ended all threads."""
        if worker.threads_ended.is_set():
            return _called(call, *values)
        try:
            return self._pool.submit(call, *values)
        except RuntimeError as error:
            raise StoreError(
                f"start a thread that encodes or decodes: {error}. Allow this user more processes "
                "(ulimit -u)"
            ) from error

    def close(self, *, drop: bool) -> None:
        """Wait for what was begun, and for the rest unless that is to be dropped."""
        self._pool.shutdown(wait=True, cancel_futures=drop)


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until this thread's CUDA streams have done all that concerns tensors.

    Threads of codecs copy on streams of their own, which wait for no other stream.
    """
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _called(call: Callable[..., Made], *values: object) -> "Future[Made]":
    """Return what a thread would have made."""
    future: Future[Made] = Future()
    try:
        future.set_result(call(*values))
    except BaseException as error:
        future.set_exception(error)
    return future


def _be_nice(niceness: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
