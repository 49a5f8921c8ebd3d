"""Chunks of a task → payloads in a segment, all by one call of the core: what a thread does.

For what is coded without loss, by the base too. Knows columns and addresses; no files.
"""

import time

import numpy as np

from .._core import segment_bytes_max, segment_encode
from ..boxes import I64, U64
from ..codecs.lossless import KINDS, PARTS
from ..layout import ROLES
from ..plan.shard_table import ShardTable
from .basis import Basis
from .file_plan import Pieces
from .origin import Origin, Standing
from .task import EncodedSegment, Task
from .workspace import Segment, borrow, give_back

# The numbers of an item, as `segment_encode` takes them.
_ADDRESS, _COUNT, _ITEM_BYTES, _KIND, _ROW, _COLUMN, _CHUNK, _IS_STAGED = range(8)
_MASTER, _SECOND_MOMENT, _BASE, _NEXT_BASE, _HAS_DIGEST, _DIGEST = range(8, 14)
_NUMBERS = _DIGEST + 2


class ByColumns:
    """See `task.Route`."""

    def __init__(
        self,
        shards: ShardTable,
        pieces: Pieces,
        origin: Origin,
        basis: Basis | None,
    ) -> None:
        """Prepare all items but for where they stand."""
        self._pieces, self._origin, self._basis = pieces, origin, basis
        self._shard = pieces.chunks.shard[pieces.rows]
        self._items = _items_of(shards, pieces, self._shard)
        if basis is not None:
            self._add_bases(basis)

    def prepare(self, first: int, end: int) -> Standing:
        """Find where the elements of pieces are."""
        items = self._pieces.first[[first, end]]
        return self._origin.hold(int(self._shard[items[0]]), int(self._shard[items[1] - 1]) + 1)

    def encode(self, task: Task) -> EncodedSegment:
        """Make the segment of a task."""
        started = time.perf_counter()
        standing: Standing = task.prepared
        first, end = self._pieces.first[[task.first, task.end]].tolist()
        rows, items = self._pieces.rows[first:end], self._items[first:end].copy()
        items[:, _ADDRESS] = standing.addresses[rows - standing.first_chunk]
        items[:, _CHUNK] = rows - task.first_chunk
        items[:, _IS_STAGED] = standing.is_staged
        room = borrow()
        try:
            missing = np.flatnonzero(items[:, _ADDRESS] == 0)
            for item in missing.tolist():
                row = int(rows[item])
                address = room.take(int(self._pieces.chunks.sizes[row]))
                standing.gather(row, address)
                items[item, _ADDRESS] = address
            items[missing, _IS_STAGED] = 1
            return self._encode(items, rows, task.head, started)
        finally:
            give_back(room)

    def _encode(self, items: U64, rows: I64, head: bytes, started: float) -> EncodedSegment:
        count = len(rows)
        size_modes, offsets = np.empty(count, np.uint32), np.empty(count, np.uint64)
        checksums, digests = np.empty(count, np.uint64), np.empty((count, 2), np.uint64)
        segment = Segment(segment_bytes_max(items))
        try:
            size, raw_bytes, stage_s = segment_encode(
                items, head, segment.address, size_modes, offsets, checksums, digests
            )
        except BaseException:
            segment.close()
            raise
        segment.take_up(size, raw_bytes)
        if self._basis is not None:
            self._basis.digests[rows] = digests
        encode_s = time.perf_counter() - started - stage_s
        return EncodedSegment(
            segment, rows, size_modes, offsets, checksums, digests, (), stage_s, encode_s
        )

    def _add_bases(self, basis: Basis) -> None:
        """Say of each item where the base's elements are, and where the next base's are to be."""
        shard, before = self._shard, self._pieces.chunks.start_bytes[self._pieces.rows]
        address, is_filled, is_known = basis.columns()
        self._items[:, _NEXT_BASE] = np.where(address[shard], address[shard] + before, 0)
        self._items[:, _BASE] = np.where(is_filled[shard], self._items[:, _NEXT_BASE], 0)
        self._items[:, _HAS_DIGEST] = is_known[shard]
        self._items[:, _DIGEST:] = basis.digests[self._pieces.rows]


def _items_of(shards: ShardTable, pieces: Pieces, shard: I64) -> U64:
    """Describe the elements of chunks, in the order of coding, and what they are coded by.

    Args:
        shard: of each chunk in that order.
    """
    chunks, rows = pieces.chunks, pieces.rows
    dtypes = [tensor.dtype for tensor in shards.tensors]
    parts = np.array([PARTS.get(dtype, 1) for dtype in dtypes], np.int64)[shards.tensor]
    kind = np.array([KINDS.get(dtype, 0) for dtype in dtypes], np.uint64)[shards.tensor]
    item_bytes = shards.item_bytes // parts
    row = shards.boxes.shape[:, 1:].prod(axis=1, dtype=np.int64) * parts
    items = np.zeros((len(rows), _NUMBERS), np.uint64)
    items[:, _ITEM_BYTES], items[:, _KIND] = item_bytes[shard], kind[shard]
    items[:, _ROW], items[:, _COUNT] = row[shard], chunks.sizes[rows] // items[:, _ITEM_BYTES]
    items[:, _COLUMN] = chunks.start_bytes[rows] // items[:, _ITEM_BYTES] % items[:, _ROW]
    for role, by, column in (
        ("weight", "master", _MASTER),
        ("exp_avg", "exp_avg_sq", _SECOND_MOMENT),
    ):
        items[:, column] = _distance(pieces, shard, ROLES.index(role), ROLES.index(by))
    return items


def _distance(pieces: Pieces, shard: I64, role: int, by: int) -> I64:
    """Return how far before each item of a role that of another is in its piece; else 0."""
    roles = pieces.role[shard]
    of_role, needed = np.flatnonzero(roles == role), np.flatnonzero(roles == by)
    piece = np.searchsorted(pieces.first, np.arange(len(shard)), "right") - 1
    place = np.full(len(pieces.first), -1, np.int64)
    place[piece[needed]] = needed
    found = place[piece[of_role]]
    distance = np.zeros(len(shard), np.int64)
    distance[of_role] = np.where(found < 0, 0, of_role - found)
    return distance
