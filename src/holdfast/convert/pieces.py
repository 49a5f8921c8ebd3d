"""A `Source` whose tensors lie in pieces: views of storages, shards and partitions in many files.

A piece is a box of a tensor, and where its elements are: an offset in a file, and strides. Pieces
are read in spans of bounded size. Knows no format.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import CorruptError
from ..format.names import dotted
from ..layout import ITEM_BYTES, Box, Path, Shape, Tensor, tiling_fault
from .archive import Crcs, Record
from .files import Files
from .source import Source

SPAN_BYTES_MAX = 4 << 20  # read at once where elements do not follow each other
SPAN_BYTES_MIN = 64 << 10  # read whole, however few of its elements are needed
DENSITY = 4  # read whole if at least one element of so many is needed


class Piece(NamedTuple):
    """Where some elements of a tensor lie.

    Attributes:
        box: which elements.
        file: absolute path.
        offset: of the box's first element, in bytes.
        strides: from one element to the next along each side, in elements.
        record: the record of an archive that holds them; its CRC is checked before they are used.
        is_archive: whether the record is an archive itself, with that tensor alone. It is opened
            when it is read, and has no strides before.
    """

    box: Box
    file: str
    offset: int
    strides: Shape
    record: Record | None = None
    is_archive: bool = False


class PiecedSource(Source):
    """A source of pieces.

    Attributes:
        pieces: of each tensor, by its path.
        files: all that is read.
    """

    def __init__(self, location: str, kind: str) -> None:
        self.location, self.kind = location, kind
        self.tensors: tuple[Tensor, ...] = ()
        self.ties: Mapping[Path, Path] = {}
        self.values: Mapping[Path, Any] = {}
        self.pieces: dict[Path, list[Piece]] = {}
        self.files = Files()
        self._crcs = Crcs()

    def read(self, tensor: Tensor, box: Box, memory: memoryview) -> None:
        """Read a box from each piece that holds some of it."""
        if not box.elements:
            return
        kind = np.dtype(f"V{ITEM_BYTES[tensor.dtype]}")
        target: np.ndarray[Any, Any] = np.ndarray(box.shape, kind, memory)
        for piece in self.pieces[tensor.path]:
            common = piece.box.intersect(box)
            if common is None or not common.elements:
                continue
            found = self.located(tensor, piece)
            index: Any = (..., *common.relative_to(box.offset).slices())
            out = target[index]
            first = _dot(common.relative_to(piece.box.offset).offset, found.strides)
            self._fill(tensor, found, found.offset + first * kind.itemsize, out)

    def located(self, tensor: Tensor, piece: Piece) -> Piece:
        """Return a piece with its place; for formats that find it only when it is read."""
        return piece

    def close(self) -> None:
        """Close all files."""
        self.files.close()

    def _fill(self, tensor: Tensor, piece: Piece, offset: int, out: "np.ndarray[Any, Any]") -> None:
        """Fill an array with the elements of a piece from an offset on, whose CRC is checked."""
        record = piece.record
        where = f"{dotted(tensor.path)} in {piece.file}"
        whole_record = record is not None and out.nbytes == record.size_bytes
        if record is not None and not (whole_record and _follow(out, piece.strides)):
            self._crcs.check(self.files, piece.file, record, where)
            record = None
        _copy(self.files, piece.file, offset, piece.strides, out)
        if record is not None:
            self._crcs.check_bytes(piece.file, record, _bytes_of(out), where)

    def check_whole(self) -> None:
        """Check that the pieces of each tensor hold each element once.

        Raises:
            CorruptError: they do not; the text names the tensor.
        """
        for tensor in self.tensors:
            boxes = [piece.box for piece in self.pieces[tensor.path] if piece.box.elements]
            fault: str | None = "have another number of dimensions than the tensor"
            if all(len(box.shape) == len(tensor.shape) for box in boxes):
                fault = tiling_fault(tensor.shape, boxes) if tensor.size_bytes else None
            if fault:
                raise CorruptError(f"{self.location}: the parts of {dotted(tensor.path)} {fault}")


def row_major(shape: Shape) -> Shape:
    """Return the strides of a tensor whose elements follow each other.

    ``(2, 3, 4)`` → ``(12, 4, 1)``
    """
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


def _dot(a: Shape, b: Shape) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _follow(out: "np.ndarray[Any, Any]", strides: Shape) -> bool:
    """Whether elements follow each other, in the file and in memory."""
    sides = zip(out.shape, strides, row_major(out.shape), strict=True)
    return out.flags.c_contiguous and all(n == 1 or a == b for n, a, b in sides)


def _bytes_of(out: "np.ndarray[Any, Any]") -> memoryview:
    return out.reshape(-1).view(np.uint8).data


def _copy(
    files: Files, path: str, offset: int, strides: Shape, out: "np.ndarray[Any, Any]"
) -> None:
    """Fill an array with elements of a file that lie in strides."""
    if _follow(out, strides):
        files.read(path, offset, _bytes_of(out))
        return
    item = out.dtype.itemsize
    span = (_dot(tuple(n - 1 for n in out.shape), strides) + 1) * item
    is_dense = span <= out.size * item * DENSITY
    if span <= SPAN_BYTES_MIN or (span <= SPAN_BYTES_MAX and is_dense) or out.size == 1:
        buffer = bytearray(span)
        files.read(path, offset, memoryview(buffer))
        steps = [step * item * (n > 1) for n, step in zip(out.shape, strides, strict=True)]
        out[...] = np.ndarray(out.shape, out.dtype, buffer, strides=steps)
        return
    d = max(range(out.ndim), key=lambda d: (out.shape[d] - 1) * strides[d])
    half = out.shape[d] // 2
    before: list[Any] = [slice(None)] * out.ndim
    after = before.copy()
    before[d], after[d] = slice(0, half), slice(half, None)
    _copy(files, path, offset, strides, out[tuple(before)])
    _copy(files, path, offset + half * strides[d] * item, strides, out[tuple(after)])
