"""Encoding and decoding in threads of their own, some chunks ahead of who writes or reads.

Knows which chunks need each other, and in which order they are made; no files.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType

import torch

from ..codecs.base import Codec, Payload
from ..codecs.groups import Unit
from ..errors import CorruptError
from ..format import spec
from ..format.manifest import Manifest
from ..format.names import dotted
from ..format.references import NONE
from ..format.rows import Place
from ..format.spec import LARGE_ALIGN_BYTES
from ..layout import Shard, chunks_of
from ..plan.runs import ChunkRead, Run
from .basis import Basis
from .decode import decode
from .task import Find, Made, Seed, Work, encode_task, survey
from .workspace import Threads, Workspace, block_at, borrow, bytes_at, give_back, room_of

AHEAD = 2  # tasks encoded, and waiting to be written, besides what the threads are at
TASK_BYTES = 8 << 20  # chunks make a task together up to so many: threads are not woken for less

# Gives shards their places. None: only when what is ahead of them, of at most so many bytes, has
# been written is it known whether they go into the same file.
Begin = Callable[[Sequence[Shard], int], Sequence[Place] | None]


class _Tasks:
    """Chunks of units, gathered to tasks; what threads make of them, in order.

    Attributes:
        pending_bytes: what is still to be taken has so many at most.
    """

    def __init__(self, seed: Seed) -> None:
        self.threads = Threads()
        self.pending_bytes = 0
        self._seed = seed
        self._gathered: list[tuple[Work, int]] = []
        self._gathered_bytes = 0
        self._made: deque[tuple[int, Future[Made]]] = deque()

    def add(self, work: Work, number: int) -> None:
        """Add a chunk of each shard of a unit."""
        more = sum(room_of(column[number].size_bytes) for column in work.columns)
        if self._gathered and self._gathered_bytes + more > TASK_BYTES:
            self.submit()
        if not self._gathered:
            more += 2 * LARGE_ALIGN_BYTES  # what a segment may leave of a page, before and behind
        self._gathered.append((work, number))
        self._gathered_bytes += more
        self.pending_bytes += more

    def submit(self) -> None:
        """Let threads have what was gathered."""
        if self._gathered:
            made = self.threads.submit(encode_task, self._gathered, self._seed)
            self._made.append((self._gathered_bytes, made))
            self._gathered, self._gathered_bytes = [], 0

    def take(self, ahead: int) -> Iterator[Made]:
        """Yield what comes of the first ones, until so many are ahead."""
        while len(self._made) > ahead:
            size_bytes, made = self._made.popleft()
            self.pending_bytes -= size_bytes
            yield made.result()

    def close(self) -> None:
        """Wait for the threads, and drop what was not taken."""
        self.threads.close(drop=True)


def encode_ahead(
    units: Sequence[Unit],
    begin: Begin,
    seed: Seed,
    find: Find,
    codec: Codec,
    chunk_elements: int,
    basis: Basis | None,
) -> Generator[Made]:
    """Stage and encode all chunks of units; yield them in order, some in each segment.

    Who gets a segment closes it.

    Args:
        begin: when it has returned None, it is called again after all before has been yielded.
        basis: what is known of the base; it becomes what is known of these.
    """
    tasks = _Tasks(seed)
    is_surveyed = codec.is_lossy and basis is not None and basis.is_base
    try:
        for unit in units:
            shards = [shard for _, shard in unit]
            places = begin(shards, tasks.pending_bytes)
            if places is None:
                tasks.submit()
                yield from tasks.take(0)
                places = begin(shards, 0)
            assert places is not None  # nothing is ahead of them
            columns = [list(chunks_of(shard, chunk_elements)) for shard in shards]
            digests = [[b""] * len(column) for column in columns]
            parts = [find(shard) for shard in shards]
            work = Work(unit, columns, parts, places, digests, codec, basis)
            if is_surveyed:
                work = replace(work, survey=tasks.threads.submit(survey, work))
            for number in range(len(columns[0])):
                tasks.add(work, number)
                yield from tasks.take(tasks.threads.count + AHEAD)
        tasks.submit()
        yield from tasks.take(0)
    finally:
        tasks.close()


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
            for row in (row for r in run.reads.rows.tolist() for row in self._needed(r)):
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
        relatives = self._relatives(read.row, spec.MODES[codec].get(payload.mode, ()))
        if not decode(payload, block_at(chunk, target), codec, relatives):
            raise CorruptError(
                f"a payload of {dotted(chunk.shard.tensor.path)}, elements {chunk.first} to "
                f"{chunk.first + chunk.elements} of the shard {chunk.shard.box}, is of mode "
                f"{payload.mode} of {codec}, and cannot be decoded; its checksum is right, so it "
                "was written so. Use another checkpoint"
            )
        return bytes_at(target, chunk.size_bytes)

    def _relatives(self, row: int, roles: Sequence[str]) -> dict[str, int]:
        """Return what a payload refers to."""
        relatives, others = {}, [role for role in roles if role not in spec.FURTHER]
        if row in self._bases:
            relatives[spec.BASE] = self._bases[row]
        needed = self._needed(row) if others else []
        for role, other in zip([*others[:1], spec.REPLAYED], needed, strict=False):
            relatives[role] = self._known[other]
        if needed and needed[0] in self._bases:
            relatives[spec.OTHER_BASE] = self._bases[needed[0]]
        for other in needed:
            self._pending[other] -= 1
            if not self._pending[other]:
                del self._known[other]
        return relatives

    def _needed(self, row: int) -> list[int]:
        """Return the row that one refers to, and where it needs that too, the next."""
        references, modes = self._manifest.references, self._manifest.table.chunk_size_mode
        other = int(references[row])
        if other == NONE:
            return []
        further = int(references[other])
        # Of one that is of no mode to refer to it lacks what it needs: it cannot be decoded.
        is_replay = int(modes[row]) >> 24 == spec.MODE_REPLAY_WEIGHT
        if is_replay and int(modes[other]) >> 24 == spec.MODE_REPLAY_MOMENT:
            return [other, further]
        return [other]


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

    def is_clear(self, slot: int) -> bool:
        """Whether a slot is free."""
        return slot not in self._tasks or self._tasks[slot].done()

    def clear(self, slot: int) -> None:
        """Wait until a slot is free; raise what its task failed with."""
        if task := self._tasks.pop(slot, None):
            task.result()
