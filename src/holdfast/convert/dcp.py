"""Checkpoints of PyTorch's DCP as a `Source`: ``.metadata`` and the files that it names.

Each chunk is a file of torch.save within a larger file. It is opened when it is read.
"""

import os
import threading
from collections import OrderedDict
from typing import Any

from ..errors import CorruptError, OptionError, StateError
from ..format.names import DCP_METADATA_NAME, dotted
from ..layout import Box, Path, Tensor
from ..state.tensors import DTYPE_NAMES
from .archive import MAGIC, Record, Region
from .contents import lay_flat
from .dcp_metadata import DcpMetadata, Stored, read_dcp_metadata
from .dcp_paths import joined, path_of
from .pieces import Piece, PiecedSource
from .rebuild import StoredTensor
from .torch_archive import TorchArchive, read_torch_archive
from .torch_file import add_tensors

KIND = "dcp"
LOCATED_MAX = 1 << 16  # chunks whose places are kept


class DcpSource(PiecedSource):
    """A checkpoint that DCP, or a framework by DCP's writer, has written."""

    def __init__(self, path: str, kind: str = KIND) -> None:
        super().__init__(path, kind)
        self._found: OrderedDict[tuple[Path, Box], Piece] = OrderedDict()
        self._found_lock = threading.Lock()

    def located(self, tensor: Tensor, piece: Piece) -> Piece:
        """Open the archive of a chunk, and return where the elements lie in it."""
        if not piece.is_archive or piece.record is None:
            return piece
        key = (tensor.path, piece.box)
        with self._found_lock:
            found = self._found.get(key)
        if found is None:
            place = Stored(piece.file, piece.offset, piece.record.size_bytes)
            where = f"{place.file}[{place.offset}:+{place.size_bytes}] ({dotted(tensor.path)})"
            archive = self.archive(place, where)
            stored = archive.root
            fits = type(stored) is StoredTensor and stored.shape == piece.box.shape
            if not fits or DTYPE_NAMES.get(stored.dtype) != tensor.dtype:
                raise CorruptError(
                    f"{where} holds another tensor than {DCP_METADATA_NAME} says; expected "
                    f"{tensor.dtype} {list(piece.box.shape)}. Use another checkpoint"
                )
            found = archive.piece(stored, piece.box)
            with self._found_lock:
                self._found[key] = found
                if len(self._found) > LOCATED_MAX:
                    self._found.popitem(last=False)
        return found

    def archive(self, place: Stored, where: str) -> TorchArchive:
        """Open a part of a file that torch.save wrote."""
        return read_torch_archive(Region(self.files, *place, where))

    def add_metadata(self, metadata: DcpMetadata) -> None:
        """Add the tensors, and check that all files have the bytes that are named.

        Raises:
            CorruptError: one has not; or chunks make no whole tensor.
        """
        sizes: dict[str, int] = {}
        tensors = []
        for fqn, described in metadata.tensors.items():
            path = path_of(fqn, metadata.keys)
            if described.dtype not in DTYPE_NAMES:
                raise StateError(f"{fqn} has the dtype {described.dtype}, which holdfast has not")
            tensors.append(Tensor(path, DTYPE_NAMES[described.dtype], described.shape))
            self.pieces[path] = [
                Piece(box, place.file, place.offset, (), Record(*place[1:], 0), is_archive=True)
                for box, stored in described.chunks
                if box.elements
                for place in [self.within(stored, fqn, sizes)]
            ]
        self.tensors += tuple(tensors)
        self.check_whole()

    def within(self, stored: Stored, fqn: str, sizes: dict[str, int]) -> Stored:
        """Return a place with the absolute path of its file, which is large enough for it."""
        file = os.path.join(self.location, stored.file)
        if file not in sizes:
            if not os.path.isfile(file):
                raise CorruptError(
                    f"{file} is missing or not a file, but {DCP_METADATA_NAME} names it for {fqn}"
                )
            sizes[file] = self.files.size(file)
        if stored.offset < 0 or not 0 <= stored.size_bytes <= sizes[file] - stored.offset:
            raise CorruptError(
                f"{file}[{stored.offset}:+{stored.size_bytes}] ({fqn}) is not within the file"
            )
        return stored._replace(file=file)

    def value_archive(self, fqn: str, stored: Stored, sizes: dict[str, int]) -> TorchArchive:
        """Open the bytes of a value.

        Raises:
            OptionError: a planner of its own wrote them.
        """
        place = self.within(stored, fqn, sizes)
        where = f"{place.file}[{place.offset}:+{place.size_bytes}] ({fqn})"
        if Region(self.files, *place, where).read(0, min(4, place.size_bytes)) != MAGIC:
            raise OptionError(
                f"{where} is a value that a planner of its own wrote; expected bytes of "
                "torch.save. Convert it with `holdfast convert --pickled`"
            )
        return self.archive(place, where)


def open_dcp(path: str) -> DcpSource:
    """Open a checkpoint of DCP.

    Args:
        path: absolute, of a directory.

    Raises:
        CorruptError: ``.metadata``, a value or the size of a file fails a check.
        OptionError, StateError: something in it cannot be read.
        StoreError: a file cannot be read.
    """
    source = DcpSource(path)
    try:
        metadata = read_dcp_metadata(path)
        source.add_metadata(metadata)
        sizes: dict[str, int] = {}
        values: dict[Path, Any] = {}
        for fqn, stored in metadata.values.items():
            archive = source.value_archive(fqn, stored, sizes)
            key = path_of(fqn, metadata.keys)
            contents = lay_flat(archive.root, archive.where, key)
            contents.check_plain(archive.where)
            add_tensors(source, archive, contents)
            values |= contents.values
        source.values = joined(values, [tensor.path for tensor in source.tensors])
    except BaseException:
        source.close()
        raise
    return source
