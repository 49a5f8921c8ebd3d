"""DCP's words and ours: FQNs ⇄ paths, what its planners see of a MANIFEST. Reads no files.

DCP opens nested dicts, and lists in which there is a dict or a tensor, and names what it finds by
its keys, joined with dots: the FQN. The keys themselves it keeps as ``planner_data``.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ...convert.dcp_paths import opened
from ...errors import StateError
from ...format.manifest import Manifest
from ...format.names import dotted, escaped
from ...format.spec import MANIFEST_NAME
from ...layout import Path, Shape
from ...state.tensors import DTYPE_NAMES, TORCH_DTYPES
from ...stores.url import SCHEME


def place_of(checkpoint_id: "str | os.PathLike[str]") -> str:
    """Return the directory that a checkpoint_id names, with or without our scheme."""
    name = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else checkpoint_id
    return name.removeprefix(SCHEME) if isinstance(name, str) else name  # refused where it is used


def keys_of(path: Path) -> tuple[str | int, ...]:
    """Return a path as DCP nests it: positions as integers, keys of dicts as text."""
    return tuple(key[1] if isinstance(key, tuple) else str(key) for key in path)


def fqns_of(paths: Iterable[Path]) -> dict[Path, str]:
    """Give each path its FQN; paths that DCP could not tell apart get names of no other form.

    Who asks for the FQN that they would share finds none: which was meant, no one knows.
    """
    plain = {path: dotted(path) for path in paths}
    count = Counter(plain.values())
    fqns = {path: name for path, name in plain.items() if count[name] == 1}
    taken = set(plain.values())
    for path in [path for path in plain if path not in fqns]:
        fqns[path] = escaped(path)
        while fqns[path] in taken:
            fqns[path] = "\\" + fqns[path]
        taken.add(fqns[path])
    return {path: fqns[path] for path in plain}


def natural(fqn: str) -> tuple[list[tuple[str, int]], str]:
    """Return a key to sort by, the same on every rank: ``layer.2`` comes before ``layer.10``."""
    parts = re.split(r"([0-9]+)", fqn)
    numbers = [int(number) for number in parts[1::2]]
    return [*zip(parts[::2], [*numbers, 0], strict=True)], fqn


def dtype_of(dtype: torch.dtype, fqn: str) -> str:
    """Return our name of a dtype.

    Raises:
        StateError: there is none.
    """
    if dtype not in DTYPE_NAMES:
        raise StateError(
            f"{fqn} has the dtype {dtype}, which holdfast cannot save; convert it, or leave it out"
        )
    return DTYPE_NAMES[dtype]


def tensor_metadata(dtype: str, shape: Shape) -> TensorStorageMetadata:
    """Describe a tensor to a planner: as one chunk, since any box of it can be read by itself."""
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
    return TensorStorageMetadata(TensorProperties(dtype=TORCH_DTYPES[dtype]), size, [chunk])


def stored_in(described: Mapping[str, STORAGE_TYPES]) -> dict[MetadataIndex, _StorageInfo]:
    """Say of each item how many bytes it has; where they are, MANIFEST says, to our reader."""
    found = {}
    for fqn, item in described.items():
        if not isinstance(item, TensorStorageMetadata):
            found[MetadataIndex(fqn)] = _StorageInfo(MANIFEST_NAME, 0, 0)
            continue
        for number, chunk in enumerate(item.chunks):
            size_bytes = chunk.sizes.numel() * item.properties.dtype.itemsize
            index = MetadataIndex(fqn, chunk.offsets, number)
            found[index] = _StorageInfo(MANIFEST_NAME, 0, size_bytes)
    return found


class _Described(dict[str, STORAGE_TYPES]):
    """What a planner is told of; values that were opened are there too when it asks for them.

    They are not listed: a planner that rebuilds all would have them twice.
    """

    def __init__(self, listed: Mapping[str, STORAGE_TYPES], whole: Collection[str]) -> None:
        super().__init__(listed)
        self._whole = whole

    def __contains__(self, fqn: object) -> bool:
        return super().__contains__(fqn) or fqn in self._whole

    def __missing__(self, fqn: str) -> STORAGE_TYPES:
        assert fqn in self._whole, f"{fqn} is not in the checkpoint"
        return BytesStorageMetadata()


def is_described(metadata: Metadata) -> bool:
    """Return whether metadata is what `describe` made of a checkpoint of ours."""
    return isinstance(metadata.state_dict_metadata, _Described)


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint as DCP's planners see it.

    Attributes:
        tensors: {FQN: index of the tensor}, tied names included.
        values: {FQN: value}, those of dicts and lists both opened and whole.
    """

    metadata: Metadata
    tensors: dict[str, int]
    values: dict[str, Any]


def describe(manifest: Manifest, checkpoint_id: str) -> Contents:
    """Describe a checkpoint to DCP's planners."""
    header = manifest.table.header
    tensors = {tensor.path: index for index, tensor in enumerate(header.tensors)}
    tensors |= dict(header.ties)
    values = {leaf: v for path, value in header.objects for leaf, v in opened(path, value)}
    unopened = {path: value for path, value in header.objects if path not in values}
    fqns = fqns_of([*tensors, *values, *unopened])
    described: dict[str, STORAGE_TYPES] = {
        fqns[path]: tensor_metadata(header.tensors[i].dtype, header.tensors[i].shape)
        for path, i in tensors.items()
    }
    described |= {fqns[path]: BytesStorageMetadata() for path in values}
    whole = {fqns[path]: value for path, value in unopened.items()}
    keys = {fqns[path]: keys_of(path) for path in [*tensors, *values]}
    return Contents(
        Metadata(
            _Described(described, whole),
            planner_data=keys,
            storage_data=stored_in(described),
            storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=header.save_id),
            version=CURRENT_DCP_VERSION,
        ),
        {fqns[path]: index for path, index in tensors.items()},
        whole | {fqns[path]: value for path, value in values.items()},
    )
