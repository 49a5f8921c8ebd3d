"""What can be read as a checkpoint, whatever its format: `Source`. Knows no format itself.

A source describes itself as a MANIFEST does: tensors with typed paths and holdfast's dtypes, ties,
and plain values. Opening one reads no elements. `kinds` finds out which kind a path is of.
"""

import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import TracebackType
from typing import Any, NamedTuple

from ..errors import CorruptError, StoreError
from ..format.names import display_names
from ..layout import ITEM_BYTES, Box, Path, Shape, Tensor

READERS = 4  # threads that read parts at the same time: enough to keep a disk busy
READ_BYTES_MAX = 8 << 20  # of one call of the system, so that a failure is noticed soon


class Part(NamedTuple):
    """A box of a tensor, and the memory that it goes to.

    Attributes:
        tensor: one of the source's ``tensors``.
        memory: writable bytes, exactly those of the box's elements, row-major.
    """

    tensor: Tensor
    box: Box
    memory: memoryview


class Source(ABC):
    """Something that can be read as a checkpoint. Close it when it is not needed any more.

    A kind of source sets the attributes when it is made, and has a method `read`. It checks then
    whatever it can without reading elements: sizes of files, overlaps, names. What it was not told
    it never makes up. It executes nothing that a file says.

    Attributes:
        location: absolute path, for people.
        kind: its name in the table of `kinds`.
        tensors: all tensors, in order, each with another path. A tensor whose shape or dtype is not
            one of holdfast's is refused on opening, by name.
        ties: further path → path of the tensor whose elements it shares; none of the further paths
            is in ``tensors``.
        values: plain data that is no tensor (docs/format.md, Values), by path.
        advice: what a caller ought to know and cannot see, such as classes that were left out.
    """

    location: str
    kind: str
    tensors: tuple[Tensor, ...]
    ties: Mapping[Path, Path]
    values: Mapping[Path, Any]
    advice: tuple[str, ...] = ()

    @abstractmethod
    def read(self, tensor: Tensor, box: Box, memory: memoryview) -> None:
        """Fill memory with the elements of a box, row-major. Thread-safe.

        Args:
            memory: writable bytes, exactly ``box.elements`` of the dtype's size.

        Raises:
            CorruptError: the source is damaged, or was changed since it was opened.
            StoreError: disk, network or permission.
        """

    def read_all(self, parts: Sequence[Part]) -> None:
        """Fill many parts; where they do not depend on each other, at the same time.

        Raises:
            CorruptError, StoreError: as `read`.
        """
        if len(parts) < 2:
            for part in parts:
                self.read(*part)
            return
        with ThreadPoolExecutor(min(READERS, len(parts)), "holdfast-read") as threads:
            list(threads.map(lambda part: self.read(*part), parts))

    def close(self) -> None:  # noqa: B027 - what holds nothing has nothing to give back
        """Give back what is held; a second call does nothing."""

    def names(self) -> dict[Path, str]:
        """Return the dotted name of every tensor, tie and value, as `holdfast.open` shows it."""
        return display_names([*(t.path for t in self.tensors), *self.ties, *self.values])

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements of all tensors, ties not counted."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def __enter__(self) -> "Source":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Span(NamedTuple):
    """Where all elements of a tensor lie, row-major: bytes of one file."""

    file: str
    offset: int
    size_bytes: int


class FileSource(Source):
    """A source whose tensors lie uncompressed in files, each in one piece.

    Attributes:
        spans: where each tensor is, by its path; the files by absolute path.
    """

    def __init__(self, location: str, kind: str) -> None:
        self.location, self.kind = location, kind
        self.tensors: tuple[Tensor, ...] = ()
        self.ties: Mapping[Path, Path] = {}
        self.values: Mapping[Path, Any] = {}
        self.spans: dict[Path, Span] = {}
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, tensor: Tensor, box: Box, memory: memoryview) -> None:
        """Read a box, run by run of elements that follow each other."""
        span = self.spans[tensor.path]
        item, done = ITEM_BYTES[tensor.dtype], 0
        descriptor = self.descriptor(span.file)
        for first, elements in runs_of(tensor.shape, box):
            size = elements * item
            read_at(descriptor, span.file, span.offset + first * item, memory[done : done + size])
            done += size

    def descriptor(self, file: str) -> int:
        """Return the descriptor of an open file; opens it the first time."""
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = open_file(file)
            return self._descriptors[file]

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])


def open_file(path: str) -> int:
    """Open a regular file for reading; return its descriptor.

    Raises:
        StoreError: it cannot be opened, or is no regular file.
    """
    try:
        # A pipe would block until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise store_error(f"open {path}", error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StoreError(f"{path} is no regular file; expected a file of a checkpoint")
    return descriptor


def list_names(path: str) -> list[str]:
    """Return the names in a directory.

    Raises:
        StoreError: it cannot be listed, or is none.
    """
    try:
        return os.listdir(path)
    except OSError as error:
        raise store_error(f"list {path}", error) from error


def read_at(descriptor: int, path: str, offset: int, memory: memoryview) -> None:
    """Fill memory with bytes of a file.

    Raises:
        CorruptError: the file ends before.
        StoreError: the disk failed.
    """
    done = 0
    while done < len(memory):
        part = memory[done : done + READ_BYTES_MAX]
        try:
            count = os.preadv(descriptor, [part], offset + done)
        except OSError as error:
            raise store_error(f"read {path} at {offset + done}", error) from error
        if not count:
            raise CorruptError(
                f"{path} ends at byte {offset + done}; expected {len(memory) - done} more. It was "
                "cut or changed meanwhile: get it again"
            )
        done += count


def store_error(what: str, cause: OSError) -> StoreError:
    """Return the error of a failed call of the system."""
    error = StoreError(f"{what}: {cause.strerror}")
    error.errno = cause.errno
    return error


def runs_of(shape: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """Yield (first element, elements) of what of a box follows each other in a row-major tensor.

    ``(4, 6), Box((1, 0), (2, 6))`` → ``(6, 12)``; ``Box((1, 2), (2, 3))`` → ``(8, 3), (14, 3)``
    """
    if not box.elements:
        return
    # Dimensions that are taken whole belong to the run of the one before them.
    inner = len(shape)
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    cut = max(inner - 1, 0)
    length = prod(box.shape[cut:])
    first = sum(a * s for a, s in zip(box.offset[cut:], strides[cut:], strict=True))
    yield from _outer_runs(box.offset[:cut], box.shape[:cut], strides, first, length)


def _outer_runs(
    offset: Iterable[int], shape: Shape, strides: Sequence[int], first: int, length: int
) -> Iterator[tuple[int, int]]:
    start = first + sum(a * s for a, s in zip(offset, strides, strict=False))
    index = [0] * len(shape)
    for _ in range(prod(shape)):
        yield start + sum(i * s for i, s in zip(index, strides, strict=False)), length
        for d in reversed(range(len(shape))):
            index[d] += 1
            if index[d] < shape[d]:
                break
            index[d] = 0
