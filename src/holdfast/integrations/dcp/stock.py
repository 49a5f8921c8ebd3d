"""DCP's own directories: ``.metadata`` and ``.distcp`` files, read without running what is in them.

``.metadata`` is a pickle, which `convert/dcp_metadata.py` reads as data.
"""

import io
import os
import zipfile

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ...convert.dcp_metadata import read_dcp_metadata
from ...errors import CorruptError, StoreError
from ...format.names import DCP_METADATA_NAME


def read_metadata(directory: str) -> Metadata:
    """Read what DCP wrote last into a checkpoint's directory.

    Raises:
        CorruptError: it is not DCP's metadata.
        OptionError: something was saved through an extension.
        StoreError: it cannot be read.
    """
    found = read_dcp_metadata(directory)
    described: dict[str, STORAGE_TYPES] = {fqn: BytesStorageMetadata() for fqn in found.values}
    stored = {MetadataIndex(fqn): _StorageInfo(*place) for fqn, place in found.values.items()}
    for fqn, tensor in found.tensors.items():
        chunks = []
        for box, place in tensor.chunks:
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            stored[MetadataIndex(fqn, chunk.offsets)] = _StorageInfo(*place)
            chunks.append(chunk)
        form = TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)
        described[fqn] = TensorStorageMetadata(*form, chunks)
    return Metadata(described, planner_data=found.keys, storage_data=stored)


class Files(DefaultSavePlanner):
    """Plans what is in a directory of DCP's, and reads it item by item when its turn comes."""

    def __init__(self, directory: str, metadata: Metadata) -> None:
        super().__init__()
        self._directory, self._metadata = directory, metadata
        self._latest: tuple[MetadataIndex, torch.Tensor] | None = None

    def create_local_plan(self) -> SavePlan:
        """Plan all of it."""
        items = []
        for fqn, described in self._metadata.state_dict_metadata.items():
            if isinstance(described, BytesStorageMetadata):
                items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
            elif isinstance(described, TensorStorageMetadata):
                items += _tensor_items(fqn, described)
        return SavePlan(items, planner_data=self._metadata.planner_data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read one item.

        Raises:
            CorruptError: it is not there, or not whole.
            StoreError: it cannot be read.
        """
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            where, data = self._read(index)
            if zipfile.is_zipfile(io.BytesIO(data)):  # planners may make other bytes of values
                _check_crc(where, data)
            return io.BytesIO(data)
        if self._latest is None or self._latest[0] != index:
            self._latest = None  # let go of one before the next is read
            self._latest = index, _tensor_of(*self._read(index))
        return self._latest[1]

    def _read(self, index: MetadataIndex) -> tuple[str, bytes]:
        """Return where an item is, for people, and its bytes."""
        info = self._metadata.storage_data[index]
        place = os.path.join(self._directory, info.relative_path)
        where = f"{place}[{info.offset}:+{info.length}] ({index.fqn})"
        if not os.path.isfile(place):
            raise CorruptError(
                f"{place} is missing or not a file, but {DCP_METADATA_NAME} names it"
            )
        try:
            with open(place, "rb") as file:
                room = os.fstat(file.fileno()).st_size - info.offset
                if info.offset < 0 or not 0 <= info.length <= room:
                    raise CorruptError(f"{where} is not within the file")
                file.seek(info.offset)
                return where, file.read(info.length)
        except OSError as error:
            raise _failure(place, error) from error


def _tensor_items(fqn: str, described: TensorStorageMetadata) -> list[WriteItem]:
    """Plan the chunks of a tensor, each once: some writers list those of every replica."""
    chunks = {tuple(chunk.offsets): chunk for chunk in described.chunks}
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, described.properties, described.size),
        )
        for chunk in chunks.values()
    ]


def _tensor_of(where: str, data: bytes) -> torch.Tensor:
    """Return the tensor that `torch.save` made bytes of.

    Raises:
        CorruptError: they are not that.
    """
    _check_crc(where, data)
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of damaged bytes there is hardly one it cannot be
        raise CorruptError(f"{where} cannot be read: {error}") from error
    if not isinstance(found, torch.Tensor):
        raise CorruptError(f"{where} is not a tensor. Use another checkpoint")
    return found


def _check_crc(where: str, data: bytes) -> None:
    """Check the CRCs that `torch.save` writes, and `torch.load` does not look at.

    Raises:
        CorruptError: one is wrong, or there are none.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as parts:
            damaged = parts.testzip()
    except Exception as error:  # of damaged bytes there is hardly one it cannot be
        raise CorruptError(f"{where} is not a file of torch.save: {error}") from error
    if damaged is not None:
        raise CorruptError(
            f"{where} is damaged: the CRC of {damaged} is wrong (or it was saved with none, under "
            "torch.serialization.set_crc32_options(False)). Use another checkpoint"
        )


def _failure(where: str, cause: OSError) -> StoreError:
    error = StoreError(f"read {where}: {cause.strerror}")
    error.errno = cause.errno
    return error
