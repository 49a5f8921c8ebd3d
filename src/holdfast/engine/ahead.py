"""Encoding and decoding in threads of their own, some chunks ahead of who writes or reads.

Knows which chunks need each other, and in which order they are made; no files.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

import torch

from ..codecs.base import Codec, Payload
from ..codecs.groups import Unit
from ..errors import CorruptError
from ..format import spec
from ..format.manifest import Manifest
from ..format.names import dotted
from ..layout import Chunk, Shard, chunks_of
from ..plan.runs import ChunkRead, Run
from .basis import Basis
from .decode import decode
from .encode import Task, encode
from .stage import Part, seal, stage
from .workspace import Threads, Workspace, block_at, borrow, give_back

AHEAD = 2  # encoded, and waiting to be written, besides what the threads are at

# What is held of a shard; or the addresses where its chunks have been staged.
Find = Callable[[Shard], Part | list[int]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Chunk ``number`` of each shard of a unit: payloads, and digests of the elements."""

    shards: tuple[Shard, ...]
    number: int
    is_last: bool
    payloads: list[Payload]
    digests: list[bytes]
    decoded_bytes: int
    stage_s: float
    encode_s: float


def encode_ahead(
    units: Sequence[Unit], find: Find, codec: Codec, chunk_elements: int, basis: Basis | None
) -> Iterator[Encoded]:
    """Stage and encode all chunks of units; yield them in order.

    The payloads stay in memory until the next ones are asked for.

    Args:
        basis: what is known of the base; it becomes what is known of these.
    """
    threads = Threads()
    ahead: deque[tuple[Workspace, Future[Encoded]]] = deque()
    try:
        for unit in units:
            parts = [find(shard) for _, shard in unit]
            columns = [list(chunks_of(shard, chunk_elements)) for _, shard in unit]
            for number, chunks in enumerate(zip(*columns, strict=True)):
                room, is_last = borrow(), number + 1 == len(columns[0])
                task = threads.submit(
                    _encode_chunks, unit, number, is_last, chunks, parts, codec, room, basis
                )
                ahead.append((room, task))
                if len(ahead) > threads.count + AHEAD:
                    yield from _first(ahead)
        while ahead:
            yield from _first(ahead)
    finally:
        threads.close(drop=True)
        for room, _ in ahead:
            give_back(room)


def _first(ahead: deque[tuple[Workspace, "Future[Encoded]"]]) -> Iterator[Encoded]:
    yield ahead[0][1].result()
    give_back(ahead.popleft()[0])


def _encode_chunks(
    unit: Unit,
    number: int,
    is_last: bool,
    chunks: Sequence[Chunk],
    parts: Sequence[Part | list[int]],
    codec: Codec,
    room: Workspace,
    basis: Basis | None,
) -> Encoded:
    started = time.perf_counter()
    tasks: list[Task] = []
    for (role, _), chunk, part in zip(unit, chunks, parts, strict=True):
        if isinstance(part, list):
            staged = seal(part[number], chunk.size_bytes, 0)
        else:
            staged = stage(*part, chunk, room.take(chunk.size_bytes), 0)
        base = basis.address(chunk) if basis else 0
        base_digest = basis.digest(chunk, number) if basis else b""
        block = block_at(chunk, staged.address)
        tasks.append(Task(role, block, staged.digest, base, base_digest))
    between = time.perf_counter()
    payloads = encode(tasks, codec, room)
    for chunk, task in zip(chunks, tasks, strict=True):
        if basis:
            basis.replace(chunk, number, task.digest, task.block.address)
    return Encoded(
        tuple(shard for _, shard in unit),
        number,
        is_last,
        payloads,
        [task.digest for task in tasks],
        sum(chunk.size_bytes for chunk in chunks),
        between - started,
        time.perf_counter() - between,
    )


def is_raw(manifest: Manifest) -> bool:
    """Whether every payload is the elements themselves."""
    return all(codec.name == spec.CODEC_RAW for codec in manifest.table.header.codecs)


class Decoder:
    """Decodes the chunks of one run, in order; keeps those that others refer to."""

    def __init__(self, run: Run, manifest: Manifest, bases: Mapping[int, int]) -> None:
        """Prepare.

        Args:
            bases: by row, the address of the elements that a chunk needs of the base.
        """
        self._manifest, self._bases = manifest, bases
        self._room: Workspace | None = None
        self._known: dict[int, int] = {}  # row → address of the decoded elements
        self._pending: dict[int, int] = {}  # row → how many chunks still refer to it
        if len(manifest.references):
            for read in run.chunks:
                row = int(manifest.references[read.row])
                self._pending[row] = self._pending.get(row, 0) + 1

    def close(self) -> None:
        """Let go of the memory."""
        if self._room is not None:
            give_back(self._room)

    def decode(self, payload: Payload, read: ChunkRead, slot: torch.Tensor) -> torch.Tensor:
        """Return the elements as bytes, which stay until the next ones are decoded.

        Args:
            slot: memory that the payload is in.

        Raises:
            CorruptError: the codec writes no such payload.
        """
        if payload.mode == spec.MODE_RAW:
            start = payload.address - slot.data_ptr()
            elements = slot[start : start + payload.size_bytes]
        else:
            elements = self._decode(payload, read)
        if self._pending.get(read.row):
            self._known[read.row] = elements.data_ptr()
        return elements

    def _decode(self, payload: Payload, read: ChunkRead) -> torch.Tensor:
        if self._room is None:
            self._room = borrow()
        if not self._known:
            self._room.clear()
        chunk, codec = read.chunk, self._manifest.codec_at(read.row)
        target = self._room.take(chunk.size_bytes)
        relatives = {}
        for role in spec.MODES[codec].get(payload.mode, ()):
            if role == spec.BASE:
                relatives[role] = self._bases[read.row]
                continue
            row = int(self._manifest.references[read.row])
            relatives[role] = self._known[row]
            self._pending[row] -= 1
            if not self._pending[row]:
                del self._known[row]
        if not decode(payload, block_at(chunk, target.data_ptr()), codec, relatives):
            raise CorruptError(
                f"a payload of {dotted(chunk.shard.tensor.path)}, elements {chunk.first} to "
                f"{chunk.first + chunk.elements} of the shard {chunk.shard.box}, is of mode "
                f"{payload.mode} of {codec}, and cannot be decoded; its checksum is right, so it "
                "was written so. Use another checkpoint"
            )
        return target


class SlotThreads:
    """Threads, each of which has a slot of the pool until its task has ended."""

    def __init__(self) -> None:
        self._threads = Threads()
        self._tasks: dict[int, Future[None]] = {}

    def __enter__(self) -> "SlotThreads":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for all; raise what the first failed with, when nothing else has."""
        self._threads.close(drop=error is not None)
        if error is None:
            for task in self._tasks.values():
                task.result()

    def start(self, slot: int, call: Callable[..., None], *values: object) -> None:
        """Call it in a thread, which has the slot until it returns."""
        self._tasks[slot] = self._threads.submit(call, *values)

    def clear(self, slot: int) -> None:
        """Wait until a slot is free; raise what its task failed with."""
        if task := self._tasks.pop(slot, None):
            task.result()
