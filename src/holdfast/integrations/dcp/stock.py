"""DCP's own directories: ``.metadata`` and ``.distcp`` files, read without running what is in them.

``.metadata`` is a pickle. The classes that one of DCP's needs are few, and none of them does more
than to hold values: any other name in it is refused before anything is called.
"""

import io
import os
import pickle
import pickletools
import zipfile
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ...errors import CorruptError, OptionError, StoreError
from ...format.names import DCP_METADATA_NAME
from ...format.spec import TENSOR_BYTES_MAX

_OF_METADATA = {
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
}
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    # Where torch 2.2 and older had them.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")),
}


_MEMO_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}


class _Reader(pickle.Unpickler):
    """Calls nothing but the classes of DCP's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise CorruptError(
            f"it names {module}.{name}, which no metadata of DCP needs; no code of it was run"
        )


def read_metadata(directory: str) -> Metadata:
    """Read what DCP wrote last into a checkpoint's directory.

    Raises:
        CorruptError: it is not DCP's metadata.
        StoreError: it cannot be read.
    """
    where = os.path.join(directory, DCP_METADATA_NAME)
    try:
        with open(where, "rb") as file:
            data = file.read()
        _check_memo(data)
        metadata: Metadata = _Reader(io.BytesIO(data)).load()
        whole = isinstance(metadata, Metadata) and _is_whole(metadata)
    except OSError as error:
        raise _failure(where, error) from error
    except Exception as error:  # of a pickle that is damaged there is hardly one it cannot be
        raise CorruptError(f"{where} cannot be read: {error}") from error
    if not whole:
        raise CorruptError(f"{where} is not the metadata of a checkpoint that DCP wrote")
    return metadata


def _check_memo(data: bytes) -> None:
    """Refuse places in the pickle's memo that it is too short to need.

    Python takes 16 bytes of memory for every place below one that is named, and a place is named
    by four bytes: they would cost up to 64 GB.
    """
    for opcode, place, _ in pickletools.genops(data):
        if opcode.name in _MEMO_PUTS and isinstance(place, int) and place >= len(data):
            raise CorruptError(
                f"it names place {place} of its memo, and has {len(data)} bytes; expected fewer"
            )


def _is_whole(metadata: Metadata) -> bool:
    """Whether everything in it is of the types that DCP gives it."""
    described, stored = metadata.state_dict_metadata, metadata.storage_data
    return (
        isinstance(described, dict)
        and isinstance(stored, dict)
        and all(isinstance(fqn, str) and _is_described(item) for fqn, item in described.items())
        and all(isinstance(index, MetadataIndex) for index in stored)
        and all(
            (type(info.relative_path), type(info.offset), type(info.length)) == (str, int, int)
            for info in stored.values()
        )
    )


def _is_described(item: object) -> bool:
    if isinstance(item, BytesStorageMetadata):
        return True
    if not isinstance(item, TensorStorageMetadata):
        return False
    sides = [item.size, *(side for c in item.chunks for side in (c.offsets, c.sizes))]
    return (
        isinstance(item.properties.dtype, torch.dtype)
        and all(isinstance(side, torch.Size) and len(side) == len(item.size) for side in sides)
        and all(number >= 0 for side in sides for number in side)
        and prod(n or 1 for n in item.size) * item.properties.dtype.itemsize <= TENSOR_BYTES_MAX
    )


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
        info = self._metadata.storage_data.get(index)
        if info is None:
            raise CorruptError(
                f"{self._directory} lists {index.fqn}, but has no data for it: its save lost a "
                "part without an error. Use another checkpoint"
            )
        name = os.path.normpath(info.relative_path)
        if os.path.isabs(name) or name.startswith("..") or "\0" in name:
            raise CorruptError(f"{self._directory} says that {index.fqn} is in {name}, outside it")
        if getattr(info, "transform_descriptors", None):
            raise OptionError(
                f"{index.fqn} was saved through an extension, {info.transform_descriptors}; load "
                "it with DCP and save it with HoldfastWriter"
            )
        place = os.path.join(self._directory, name)
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
