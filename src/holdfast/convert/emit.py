"""A source's tensors → the bytes of files, in order, through a window of the pool to the disk.

What a file holds is said before: a list of texts and of boxes of tensors. Boxes are read right into
the memory that the disk takes them from, many at a time, while those before them are written. Knows
no formats and no names of tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import worker
from ..engine.pool import Lease, lease
from ..engine.stream import FileStream, Writes
from ..errors import OptionError
from ..layout import ITEM_BYTES, Box, Tensor, boxes_of_range
from ..options import Options
from ..stores.base import Store
from .cast import cast
from .source import Part, Source

BATCH_BYTES = 32 << 20  # read at once: a quarter of the window, so that the disk has work meanwhile
STEP_ELEMENTS = 1 << 20  # a tensor is cut where our chunks end, so that none is read twice
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """All elements of a box of a tensor, row-major, as a file is to hold them.

    Attributes:
        dtype: that they are converted to.
        see: called with the bytes, part by part in order, before they are written.
    """

    name: str
    tensor: Tensor
    box: Box
    dtype: str
    see: Callable[[memoryview], None] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes of the file."""
        return self.box.elements * ITEM_BYTES[self.dtype]


@dataclass(slots=True)
class Late:
    """Bytes that are known only when all before them have been seen, such as checksums."""

    size_bytes: int
    make: Callable[[], bytes]
    data: bytes = b""


Content = bytes | Piece | Late


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file, and what it holds, in order.

    Attributes:
        name: relative to the target.
    """

    name: str
    contents: Sequence[Content]

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return sum(map(size_of, self.contents))


def size_of(content: Content) -> int:
    """Return how many bytes a content has."""
    return len(content) if isinstance(content, bytes) else content.size_bytes


def write_files(
    store: Store,
    files: Sequence[PlannedFile],
    source: Source,
    report: Report,
    *,
    allow_overflow: bool,
    options: Options,
) -> None:
    """Write files one after the other; each is durable when the next one begins.

    Raises:
        OptionError: a number does not fit the dtype that it is converted to.
        CorruptError: the source fails a check.
        StoreError: disk, network or permission; what was written is left to the caller.
    """
    with lease(store, options) as leased:
        for file in files:
            _FileWriter(store, leased, source, report, allow_overflow=allow_overflow).write(file)


@dataclass(slots=True)
class _Batch:
    """What is filled in together: the bytes of a file from one position on.

    Attributes:
        steps: (content, first byte or element of it, how many, where in the batch).
    """

    size_bytes: int = 0
    scratch_bytes: int = 0
    steps: list[tuple[Content, int, int, int]] = field(default_factory=list)


class _FileWriter:
    """Writes one file."""

    def __init__(
        self,
        store: Store,
        leased: Lease,
        source: Source,
        report: Report,
        *,
        allow_overflow: bool,
    ) -> None:
        self._store, self._lease, self._source, self._report = store, leased, source, report
        self._allow_overflow = allow_overflow
        self._window_bytes = leased.pool.slots * leased.pool.slot_bytes
        self._memory = leased.pool.memory().cast("B")
        self._scratch = memoryview(b"")

    def write(self, file: PlannedFile) -> None:
        """Write all of it, durably."""
        size, queue, vfs = file.size_bytes, self._lease.queue, self._store.vfs
        is_small = size < self._lease.small_bytes
        descriptor = self._store.create(file.name, direct=queue.direct and not is_small)
        try:
            if not is_small:
                vfs.allocate(descriptor, size)  # a full disk says so first
            where, window = f"{self._store.location}/{file.name}", (0, self._window_bytes)
            stream = FileStream(self._lease, descriptor, where, window, Writes(), cached=is_small)
            for batch in _batches(file.contents, self._window_bytes):
                worker.check()
                if stream.position and stream.position % self._window_bytes == 0:
                    stream.turn()
                room = stream.room(stream.position, batch.size_bytes)
                self._fill(batch, self._memory[room : room + batch.size_bytes])
                stream.advance(batch.size_bytes)
            stream.finish(stream.position, b"")
            vfs.truncate(descriptor, size)
            vfs.sync(descriptor)
        finally:
            while queue.pending:
                queue.wait()
            vfs.close(descriptor)
        self._store.sync_made(file.name)

    def _fill(self, batch: _Batch, memory: memoryview) -> None:
        """Read and convert what a batch holds."""
        if batch.scratch_bytes > len(self._scratch):
            self._scratch = np.empty(batch.scratch_bytes, np.uint8).data
        parts, placed, scratch = list[Part](), list[memoryview](), 0
        for content, first, count, at in batch.steps:
            if not isinstance(content, Piece):
                placed.append(memory[at : at + count])
                continue
            item = ITEM_BYTES[content.tensor.dtype]
            target = memory[at : at + count * ITEM_BYTES[content.dtype]]
            if content.dtype != content.tensor.dtype:
                target = self._scratch[scratch : scratch + count * item]
                scratch += count * item
            placed.append(target)
            for before, box in boxes_of_range(content.box.shape, first, count):
                offset = tuple(a + b for a, b in zip(box.offset, content.box.offset, strict=True))
                part = target[before * item : (before + box.elements) * item]
                parts.append(Part(content.tensor, Box(offset, box.shape), part))
        self._source.read_all(parts)
        for (content, first, count, at), target in zip(batch.steps, placed, strict=True):
            if isinstance(content, Piece):
                self._convert(content, target, memory[at:][: count * ITEM_BYTES[content.dtype]])
            else:
                if isinstance(content, Late) and not content.data:
                    content.data = content.make()
                data = content.data if isinstance(content, Late) else content
                target[:] = data[first : first + count]

    def _convert(self, piece: Piece, read: memoryview, memory: memoryview) -> None:
        if piece.dtype != piece.tensor.dtype:
            lost = cast(read, piece.tensor.dtype, memory, piece.dtype)
            if lost is not None and not self._allow_overflow:
                raise OptionError(
                    f"{piece.name} has {lost:.6g}, which {piece.dtype} cannot hold: the largest "
                    "number is smaller. Choose another dtype, leave the tensor out, or give "
                    "--allow-overflow (allow_overflow=True). Nothing was written"
                )
        if piece.see is not None:
            piece.see(memory)
        self._report(len(read))


def _batches(contents: Sequence[Content], window_bytes: int) -> Iterator[_Batch]:
    """Cut contents into batches, none of which goes over the end of the window."""
    batch, position = _Batch(), 0
    for content in contents:
        done, unit, count = 0, 1, size_of(content)
        if isinstance(content, Piece):
            unit, count = ITEM_BYTES[content.dtype], content.box.elements
        while done < count:
            left = min(BATCH_BYTES, window_bytes - position % window_bytes) - batch.size_bytes
            taken = _taken(content, done, count, left // unit, batch)
            if taken:
                batch.steps.append((content, done, taken, batch.size_bytes))
                batch.size_bytes += taken * unit
                if isinstance(content, Piece) and content.dtype != content.tensor.dtype:
                    batch.scratch_bytes += taken * ITEM_BYTES[content.tensor.dtype]
                done += taken
            if done < count:
                yield batch
                batch, position = _Batch(), position + batch.size_bytes
    if batch.steps:
        yield batch


def _taken(content: Content, done: int, count: int, room: int, batch: _Batch) -> int:
    """Return how many bytes or elements of a content go into a batch."""
    if not isinstance(content, Piece):
        return min(count - done, room)
    if content.dtype != content.tensor.dtype:
        free = BATCH_BYTES - batch.scratch_bytes
        room = min(room, free // ITEM_BYTES[content.tensor.dtype])
    if count - done <= room:
        return count - done
    even = (done + room) // STEP_ELEMENTS * STEP_ELEMENTS - done
    return max(even, 0) if even > 0 or batch.steps else room
