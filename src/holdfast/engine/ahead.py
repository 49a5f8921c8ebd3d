"""Encoding and decoding in threads of their own, some chunks ahead of who writes or reads.

Knows which chunks need each other, and in which order they are made; no files.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType

import torch

from ..codecs.base import Payload
from ..errors import CorruptError
from ..format import spec
from ..format.manifest import Manifest
from ..format.names import dotted
from ..format.references import NONE
from ..format.spec import LARGE_ALIGN_BYTES
from ..plan.reads import ChunkRead, ReadRun
from .decode import decode
from .task import EncodedSegment, Route, Task
from .workspace import Threads, Workspace, block_at, borrow, bytes_at, give_back

AHEAD = 2  # tasks encoded, and waiting to be written, besides what the threads are at
SEGMENT_BYTES = 2 * LARGE_ALIGN_BYTES  # what a segment may leave of a page, before and behind


class Tasks:
    """What threads make of the pieces of a save, in order.

    Attributes:
        pending_bytes: what is still to be taken has so many at most.
        made: what is still to be taken; when there are more than ``most``, some has to be.
    """

    def __init__(self) -> None:
        self.threads = Threads()
        self.pending_bytes = 0
        self.most = self.threads.count + AHEAD
        self.made: deque[tuple[int, Future[EncodedSegment]]] = deque()

    def close(self) -> None:
        """Wait for the threads, and drop what was not taken."""
        self.threads.close(drop=True)

    def submit(self, route: Route, task: Task, size_bytes: int) -> None:
        """Let threads have a task, of which there are so many bytes at most."""
        size_bytes += SEGMENT_BYTES
        self.made.append((size_bytes, self.threads.submit(route.encode, task)))
        self.pending_bytes += size_bytes

    def take(self, *, all_of_them: bool = False) -> Iterator[EncodedSegment]:
        """Yield what comes of the first ones: of all, or until as few are ahead as may be."""
        ahead = 0 if all_of_them else self.most
        while len(self.made) > ahead:
            size_bytes, made = self.made.popleft()
            self.pending_bytes -= size_bytes
            yield made.result()


class Decoder:
    """Decodes the chunks of one run, in order; keeps those that others refer to."""

    def __init__(self, run: ReadRun, manifest: Manifest, bases: Mapping[int, int]) -> None:
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
        elif not self._known:
            self._room.clear()
        chunk, codec = read.chunk, self._manifest.codec_at(read.row)
        size = chunk.size_bytes
        target = self._room.take(size)
        relatives = self._relatives(read.row, spec.MODES[codec].get(payload.mode, ()))
        if not decode(payload, block_at(chunk, target), codec, relatives):
            raise CorruptError(
                f"a payload of {dotted(chunk.shard.tensor.path)}, elements {chunk.first} to "
                f"{chunk.first + chunk.elements} of the shard {chunk.shard.box}, is of mode "
                f"{payload.mode} of {codec}, and cannot be decoded. Its checksum is right, so the "
                "save wrote it so; use another checkpoint"
            )
        return bytes_at(target, size)

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
