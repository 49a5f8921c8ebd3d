"""Chunks of a parameter's tensors → payloads in a segment: what a thread does for a save.

Knows elements, codecs and memory; no files, and nothing of other threads.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate

from .._core import Elements, lossless_bytes_max, segment_encode
from ..codecs.base import Codec, Loss, Piece
from ..codecs.groups import Unit
from ..codecs.lossless import elements_of
from ..format.names import dotted
from ..format.rows import Place
from ..layout import Chunk, Shard
from .basis import Basis
from .encode import encode
from .registry import LOSSLESS
from .stage import Part, Staged, gather, seal, stage, whole_of
from .workspace import Segment, Workspace, block_at, borrow, give_back, room_of

# What is held of a shard; or the addresses where its chunks have been staged.
Find = Callable[[Shard], Part | list[int]]

Seed = Callable[[int], int]  # row of a chunk → seed of its checksum


@dataclass(frozen=True, slots=True)
class Encoded:
    """Chunk ``number`` of each shard of a unit, in a segment.

    Attributes:
        digests: of each shard, those of its chunks; all are there when the last has been made.
        rows: of each chunk the row, and of its payload bytes, mode, offset in the segment (any
            where there are no bytes) and checksum.
        losses: of each chunk; empty where none may have any.
    """

    work: "Work"
    number: int
    rows: Sequence[tuple[int, int, int, int, int]]
    losses: Sequence[Loss | None]
    stage_s: float
    encode_s: float

    @property
    def is_last(self) -> bool:
        """Whether the shards end with these."""
        return self.number + 1 == len(self.work.columns[0])

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the elements."""
        return sum(column[self.number].size_bytes for column in self.work.columns)


@dataclass(frozen=True, slots=True)
class Work:
    """A unit to encode.

    Attributes:
        columns: of each of its shards, the chunks.
        parts: of each of its shards, what is held of it, or where its chunks stand.
        digests: of each of its shards, those of its chunks, once they are known.
        survey: what the codec is to know of all of it.
    """

    unit: Unit
    columns: Sequence[Sequence[Chunk]]
    parts: Sequence[Part | list[int]]
    places: Sequence[Place]
    digests: Sequence[list[bytes]]
    codec: Codec
    basis: Basis | None
    survey: "Future[object] | None" = None

    def piece(self, number: int, addresses: Sequence[int]) -> Piece:
        """Describe chunk ``number`` of each shard, at these addresses."""
        blocks, bases = {}, {}
        for (role, _), column, address in zip(self.unit, self.columns, addresses, strict=True):
            blocks[role] = block_at(column[number], address)
            if self.basis and (base := self.basis.address(column[number])):
                bases[role] = base
        return Piece(dotted(self.unit[-1][1].tensor.path), blocks, bases)


Made = tuple[Segment, list[Encoded]]


def survey(work: Work) -> object:
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
    pieces = [work.piece(n, addresses) for n, addresses in enumerate(zip(*rows, strict=True))]
    return work.codec.survey(pieces)


def encode_task(task: Sequence[tuple[Work, int]], seed: Seed) -> Made:
    """Encode what a task has, into one segment."""
    work, _ = task[0]
    room = borrow()
    try:
        if work.basis is None and work.codec == LOSSLESS:
            return _encode_plain(task, seed, room)
        chunks = [column[number] for work, number in task for column in work.columns]
        room_bytes = sum(room_of(work.codec.room(block_at(chunk, 0))) for chunk in chunks)
        with Segment(room_bytes) as segment:
            return segment, [_encode_chunks(*one, seed, room, segment) for one in task]
    finally:
        give_back(room)


def _encode_plain(task: Sequence[tuple[Work, int]], seed: Seed, room: Workspace) -> Made:
    """Do what `_encode_chunks` does, for all chunks by one call: small ones take longer to call."""
    started = time.perf_counter()
    items: list[tuple[int, Elements, int, bool, int, int]] = []
    places: list[tuple[list[bytes], int]] = []  # where digests go, and rows
    for work, number in task:
        roles = dict[str, int]()
        shards = zip(work.unit, work.columns, work.parts, work.places, work.digests, strict=True)
        for (role, _), column, part, place, digests in shards:
            chunk, row = column[number], place.first_chunk + number
            address, is_staged = (
                (part[number], True) if isinstance(part, list) else gather(*part, chunk, room.take)
            )
            master = roles.get("master", -1) if role == "weight" else -1
            second_moment = roles.get("exp_avg_sq", -1) if role == "exp_avg" else -1
            roles[role] = len(items)
            elements = elements_of(block_at(chunk, address))
            items.append((address, elements, seed(row), is_staged, master, second_moment))
            places.append((digests, row))
    with Segment(sum(room_of(lossless_bytes_max(item[1])) for item in items)) as segment:
        made, size_bytes, stage_s = segment_encode(items, segment.address)
    segment.take_up(size_bytes, max((size for mode, size, *_ in made if not mode), default=0))
    encode_s, first, result = time.perf_counter() - started - stage_s, 0, list[Encoded]()
    for work, number in task:
        rows, end = [], first + len(work.unit)
        for (digests, row), (mode, size, at, found, digest) in zip(
            places[first:end], made[first:end], strict=True
        ):
            digests[number] = digest
            rows.append((row, size, mode, at, found))
        share = len(rows) / len(items)
        result.append(Encoded(work, number, rows, (), share * stage_s, share * encode_s))
        first = end
    return segment, result


def _encode_chunks(
    work: Work, number: int, seed: Seed, room: Workspace, segment: Segment
) -> Encoded:
    started = time.perf_counter()
    room.clear()
    chunks = [column[number] for column in work.columns]
    staged: list[Staged] = []
    for chunk, part in zip(chunks, work.parts, strict=True):
        if isinstance(part, list):
            staged.append(seal(part[number], chunk.size_bytes, 0))
        else:
            staged.append(stage(*part, chunk, room.take(chunk.size_bytes), 0))
    known = work.survey.result() if work.survey else None
    between = time.perf_counter()
    piece = work.piece(number, [one.address for one in staged])
    digests = {role: one.digest for (role, _), one in zip(work.unit, staged, strict=True)}
    same = _same(work, chunks, number)
    made = encode(piece, digests, same, _codec(work), known, room)
    coded = [made[role] for role, _ in work.unit]
    for chunk, one, known_digests in zip(chunks, coded, work.digests, strict=True):
        known_digests[number] = one.digest
        if work.basis:
            work.basis.replace(chunk, number, one.digest, one.decoded)
    rows = []
    for place, one in zip(work.places, coded, strict=True):
        row, payload = place.first_chunk + number, one.payload
        at, found = segment.add(payload, seed(row))
        rows.append((row, payload.size_bytes, payload.mode, at, found))
    losses = [one.payload.loss for one in coded]
    ended = time.perf_counter()
    return Encoded(work, number, rows, losses, between - started, ended - between)


def _codec(work: Work) -> Codec:
    """What stands by itself is stored without loss."""
    is_link = work.basis is not None and work.basis.is_base
    return work.codec if is_link or not work.codec.is_lossy else LOSSLESS


def _same(work: Work, chunks: Sequence[Chunk], number: int) -> dict[str, bytes]:
    """Return, by role, the digests of the base's elements that are known."""
    if not work.basis:
        return {}
    known = zip(work.unit, chunks, strict=True)
    return {role: work.basis.digest(chunk, number) for (role, _), chunk in known}
