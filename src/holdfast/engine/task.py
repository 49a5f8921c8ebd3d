"""Pieces of a save → payloads in a segment: what a thread does. By a codec, piece by piece.

Knows elements, codecs and memory; no files, and nothing of other threads.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from .._core import xxh3_64
from ..boxes import I64, U64
from ..codecs.base import Codec, Loss, Payload, Piece
from ..format.names import dotted
from ..format.table import U32
from ..layout import ROLES, Chunk, Path, Shard, chunks_of
from ..plan.shard_table import ShardTable
from .basis import Basis
from .encode import Coded, encode
from .file_plan import Pieces
from .origin import Origin
from .stage import Part, Staged, seal, stage, whole_of
from .workspace import Segment, Workspace, block_at, borrow, give_back, room_of


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Pieces that make a segment together.

    Attributes:
        first, end: of the pieces.
        head: what the seeds of their file begin with (`format.data_file.seed_head`).
        first_chunk: of the file, among all chunks.
        prepared: what the route has prepared for it.
    """

    first: int
    end: int
    head: bytes
    first_chunk: int
    prepared: Any


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSegment:
    """What comes of a task.

    Attributes:
        rows: the chunks; all columns are in their order.
        size_modes: bytes and mode of each payload, as a checkpoint's table has them.
        offsets: of each payload in the segment; any where there are no bytes.
        digests: of the elements.
        losses: of tensors that may have any.
    """

    segment: Segment
    rows: I64
    size_modes: U32
    offsets: U64
    checksums: U64
    digests: U64
    losses: Sequence[tuple[Path, Loss]]
    stage_s: float
    encode_s: float


class Route(Protocol):
    """How the segments of a save are made."""

    def prepare(self, first: int, end: int) -> Any:
        """Find what a task of these pieces needs, in the order of the tasks, by one thread."""

    def encode(self, task: Task) -> EncodedSegment:
        """Make the segment of a task, in any thread."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A unit to encode.

    Attributes:
        unit: role and shard of each.
        columns: of each shard, the chunks.
        parts: of each shard, what is held of it, or where its chunks stand.
        survey: what the codec is to know of all of it.
    """

    unit: Sequence[tuple[str, Shard]]
    columns: Sequence[Sequence[Chunk]]
    parts: Sequence[Part | list[int]]
    survey: "Future[object] | None" = None

    def piece(self, number: int, addresses: Sequence[int], basis: Basis | None) -> Piece:
        """Describe chunk ``number`` of each shard, at these addresses."""
        blocks, bases = {}, {}
        for (role, _), column, address in zip(self.unit, self.columns, addresses, strict=True):
            blocks[role] = block_at(column[number], address)
            if basis and (base := basis.address(column[number])):
                bases[role] = base
        return Piece(dotted(self.unit[-1][1].tensor.path), blocks, bases)


class ByPiece:
    """Each piece by calls of the codec, which may look at a whole unit before. See `Route`."""

    def __init__(
        self,
        shards: ShardTable,
        pieces: Pieces,
        origin: Origin,
        chunk_elements: int,
        codec: Codec,
        basis: Basis | None,
        submit: "Callable[[Callable[[_Work], object], _Work], Future[object]]",
    ) -> None:
        """Prepare nothing yet.

        Args:
            submit: has a thread look at a unit.
        """
        self._shards, self._pieces, self._origin = shards, pieces, origin
        self._chunk_elements, self._codec, self._basis = chunk_elements, codec, basis
        self._submit = submit
        self._last = (-1, _Work((), (), ()))  # the unit that was begun last

    def prepare(self, first: int, end: int) -> list[tuple[_Work, int]]:
        """Return the unit and the number of each piece."""
        starts, result = self._pieces.unit_first, []
        for piece in range(first, end):
            unit = int(starts.searchsorted(piece, "right")) - 1
            if unit != self._last[0]:
                self._last = unit, self._begin(unit)
            result.append((self._last[1], piece - int(starts[unit])))
        return result

    def _begin(self, unit: int) -> _Work:
        first, end = self._pieces.unit[[unit, unit + 1]].tolist()
        shards = self._shards[first:end].shards
        roles = [ROLES[role] for role in self._pieces.role[first:end].tolist()]
        columns = [list(chunks_of(shard, self._chunk_elements)) for shard in shards]
        parts = [self._origin.part(number) for number in range(first, end)]
        work = _Work(list(zip(roles, shards, strict=True)), columns, parts)
        if not self._codec.is_lossy:
            return work
        return _Work(work.unit, columns, parts, self._submit(self._survey, work))

    def _survey(self, work: _Work) -> object:
        """Let the codec look at all of a unit; what is not in one piece is copied."""
        rows: list[list[int]] = []
        kept: list[object] = []  # as long as its address is used
        for column, part in zip(work.columns, work.parts, strict=True):
            if isinstance(part, list):
                rows.append(part)
                continue
            memory = whole_of(*part, column)
            kept.append(memory)
            sizes = [0, *accumulate(chunk.size_bytes for chunk in column)]
            rows.append([memory.data_ptr() + size for size in sizes[:-1]])
        every = enumerate(zip(*rows, strict=True))
        return self._codec.survey([work.piece(n, at, self._basis) for n, at in every])

    def encode(self, task: Task) -> EncodedSegment:
        """Make the segment of a task."""
        first, end = self._pieces.first[[task.first, task.end]].tolist()
        rows, losses = self._pieces.rows[first:end], list[tuple[Path, Loss]]()
        found = list[tuple[Payload, int, int, bytes]]()
        works: list[tuple[_Work, int]] = task.prepared
        chunks = [column[number] for work, number in works for column in work.columns]
        room_bytes = sum(room_of(self._codec.room(block_at(chunk, 0))) for chunk in chunks)
        stage_s, encode_s, room = 0.0, 0.0, borrow()
        try:
            with Segment(room_bytes) as segment:
                for work, number in works:
                    started = time.perf_counter()
                    staged = _stage(work, number, room)
                    between = time.perf_counter()
                    for (_, shard), one in zip(
                        work.unit, self._encode(work, number, staged, room), strict=True
                    ):
                        row = int(rows[len(found)]) - task.first_chunk
                        at, checksum = segment.add(one.payload, _seed(task.head, row))
                        found.append((one.payload, at, checksum, one.digest))
                        if one.payload.loss is not None:
                            losses.append((shard.tensor.path, one.payload.loss))
                    stage_s += between - started
                    encode_s += time.perf_counter() - between
        finally:
            give_back(room)
        payloads, offsets, checksums, digests = zip(*found, strict=True)
        return EncodedSegment(
            segment,
            rows,
            np.array([one.size_bytes | one.mode << 24 for one in payloads], np.uint32),
            np.array(offsets, np.uint64),
            np.array(checksums, np.uint64),
            np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2),
            losses,
            stage_s,
            encode_s,
        )

    def _encode(
        self, work: _Work, number: int, staged: Sequence[Staged], room: Workspace
    ) -> list[Coded]:
        """Encode a piece, in the order of its shards; it becomes what the next base has of it."""
        basis, chunks = self._basis, [column[number] for column in work.columns]
        roles = [role for role, _ in work.unit]
        known = work.survey.result() if work.survey else None
        piece = work.piece(number, [one.address for one in staged], basis)
        digests = {role: one.digest for role, one in zip(roles, staged, strict=True)}
        same = dict[str, bytes]()
        if basis:
            same = {r: basis.digest(chunk, number) for r, chunk in zip(roles, chunks, strict=True)}
        made = encode(piece, digests, same, self._codec, known, room)
        coded = [made[role] for role in roles]
        if basis:
            for chunk, one in zip(chunks, coded, strict=True):
                basis.replace(chunk, number, one.digest, one.decoded)
        return coded


def _stage(work: _Work, number: int, room: Workspace) -> list[Staged]:
    """Copy the chunks of a piece, where they may change, and hash them."""
    room.clear()
    staged = list[Staged]()
    for column, part in zip(work.columns, work.parts, strict=True):
        chunk = column[number]
        if isinstance(part, list):
            staged.append(seal(part[number], chunk.size_bytes, 0))
        else:
            staged.append(stage(*part, chunk, room.take(chunk.size_bytes), 0))
    return staged


def _seed(head: bytes, row: int) -> int:
    """Return what `format.data_file.chunk_seed` does."""
    return xxh3_64(head + row.to_bytes(8, "little"))
