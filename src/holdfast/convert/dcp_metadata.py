"""The ``.metadata`` of a DCP checkpoint: which tensors there are, and where their chunks lie.

It is a pickle of DCP's own classes. They are read as records of calls, and no class is imported.
Frameworks that write DCP's files, such as Megatron, add classes of their own: these stay inert.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from ..errors import CorruptError, OptionError
from ..format.names import DCP_METADATA_NAME
from ..format.spec import DIMENSIONS_MAX, TENSOR_BYTES_MAX
from ..layout import Box, Shape
from .inert import Inert, check_tree, children_with_inert, kind_of
from .pickles import MEMORY_MAX_BYTES, read_pickle
from .rebuild import PLAIN
from .source import open_file, read_at

METADATA_BYTES_MAX = 1 << 30
GROWTH_MAX = 32  # bytes of memory for each byte of the pickle, beyond what any pickle may take


class Stored(NamedTuple):
    """Where an item lies: bytes of a file, whose path is relative to the checkpoint."""

    file: str
    offset: int
    size_bytes: int


class Described(NamedTuple):
    """A tensor, and where its chunks lie, those without elements too."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[tuple[Box, Stored], ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What ``.metadata`` says, by FQN.

    Attributes:
        values: where the bytes of each value lie.
        keys: {FQN: keys of nested containers}, where the planner kept them.
        fields: all of it, with those that a framework has added.
    """

    tensors: dict[str, Described]
    values: dict[str, Stored]
    keys: Mapping[Any, Any]
    fields: Mapping[str, Any]


def read_dcp_metadata(directory: str) -> DcpMetadata:
    """Read what DCP wrote last into a checkpoint's directory.

    Raises:
        CorruptError: it is not DCP's metadata, or a chunk has no data.
        OptionError: a tensor or an item is stored in a way that cannot be read.
        StoreError: it cannot be read.
    """
    where = os.path.join(directory, DCP_METADATA_NAME)
    root = read_root(where)
    fields = fields_of(root, where)
    items, places = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(items, dict) or not isinstance(places, dict):
        raise CorruptError(f"{where} is not the metadata of a checkpoint that DCP wrote")
    stored = _places(places, where)
    tensors: dict[str, Described] = {}
    values: dict[str, Stored] = {}
    for fqn, item in items.items():
        if not isinstance(fqn, str) or not isinstance(item, Inert):
            raise CorruptError(f"{where} describes {fqn!r:.80} in an unknown way")
        if item.name.endswith(".BytesStorageMetadata"):
            values[fqn] = _place(stored, fqn, None, directory)
        elif item.name.endswith(".TensorStorageMetadata"):
            tensors[fqn] = _tensor(fqn, fields_of(item, where), stored, directory)
        else:
            raise CorruptError(f"{where} describes {fqn:.80} as {item.name:.80}, which is unknown")
    keys = fields.get("planner_data") or {}
    if not isinstance(keys, dict):
        raise CorruptError(
            f"{where} keeps {kind_of(keys)} of a planner; expected the keys of each name. None of "
            "its code was run"
        )
    return DcpMetadata(tensors, values, keys, fields)


def read_root(path: str) -> Inert:
    """Read the pickle.

    Raises:
        CorruptError: it is damaged, or holds no object.
        StoreError: it cannot be read.
    """
    descriptor = open_file(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > METADATA_BYTES_MAX:
            raise CorruptError(
                f"{path} has {size:,} bytes; expected at most {METADATA_BYTES_MAX:,}"
            )
        data = bytearray(size)
        read_at(descriptor, path, 0, memoryview(data))
    finally:
        os.close(descriptor)
    try:
        found = read_pickle(
            memoryview(data), PLAIN, memory_max_bytes=MEMORY_MAX_BYTES + GROWTH_MAX * size
        )
        check_tree(found.root, children_with_inert)  # all of it is met below
    except CorruptError as error:
        raise CorruptError(f"{path} cannot be read: {error}") from error
    if type(found.root) is not Inert:
        raise CorruptError(f"{path} is not the metadata of a checkpoint that DCP wrote")
    return found.root


def fields_of(value: Any, where: str) -> dict[str, Any]:
    """Return the attributes of an object that a pickle describes.

    Raises:
        CorruptError: it describes none.
    """
    state = value.state if type(value) is Inert else None
    if type(value) is Inert and state is None:
        return {}
    if type(state) is not dict:
        raise CorruptError(f"{where} holds an object whose attributes cannot be told")
    return state


def _places(places: dict[Any, Any], where: str) -> dict[tuple[str, Shape], Stored]:
    """Return where each item lies, by its FQN and its offset; that of a value is ()."""
    found: dict[tuple[str, Shape], Stored] = {}
    for index, info in places.items():
        key, place = fields_of(index, where), fields_of(info, where)
        fqn, offset = key.get("fqn"), key.get("offset")
        file: Any = place.get("relative_path")
        start: Any = place.get("offset")
        size: Any = place.get("length")
        fits = isinstance(fqn, str) and (offset is None or isinstance(offset, torch.Size))
        if not fits or (type(file), type(start), type(size)) != (str, int, int):
            raise CorruptError(f"{where} says in an unknown way where {fqn!r:.80} lies")
        if place.get("transform_descriptors"):
            raise OptionError(
                f"{fqn:.80} was saved through an extension, "
                f"{place['transform_descriptors']!r:.80}; load it with DCP and save it with "
                "HoldfastWriter"
            )
        found[str(fqn), tuple(offset or ())] = Stored(str(file), int(start), int(size))
    return found


def _tensor(
    fqn: str, fields: dict[str, Any], stored: dict[tuple[str, Shape], Stored], directory: str
) -> Described:
    where = os.path.join(directory, DCP_METADATA_NAME)
    properties, chunks = fields.get("properties"), fields.get("chunks")
    size: Any = fields.get("size")
    state = properties.state if type(properties) is Inert else None
    dtype: Any = state[0] if type(state) is tuple and state else None
    if type(state) is dict:
        dtype = state.get("dtype")
    fits = isinstance(dtype, torch.dtype) and _is_shape(size) and type(chunks) is list
    if not fits or prod(n or 1 for n in size) * dtype.itemsize > TENSOR_BYTES_MAX:
        raise CorruptError(f"{where} describes {fqn:.80} in an unknown way, or with a wrong shape")
    found: dict[Box, Stored] = {}
    for chunk in chunks or ():  # some writers list those of every replica
        sides = fields_of(chunk, where)
        offset: Any = sides.get("offsets")
        shape: Any = sides.get("sizes")
        fits = _is_shape(offset) and _is_shape(shape)
        if not fits or not len(offset) == len(size) == len(shape):
            raise CorruptError(f"{where} describes a chunk of {fqn:.80} in an unknown way")
        box = Box(tuple(offset), tuple(shape))
        found[box] = _place(stored, fqn, box.offset, directory)
    return Described(dtype, tuple(size), tuple(found.items()))


def _is_shape(value: Any) -> bool:
    is_short = isinstance(value, torch.Size) and len(value) <= DIMENSIONS_MAX
    return is_short and all(n >= 0 for n in value)


def _place(
    stored: dict[tuple[str, Shape], Stored], fqn: str, offset: Shape | None, directory: str
) -> Stored:
    place = stored.get((fqn, offset or ()))
    if place is None and offset is not None and not any(offset):
        place = stored.get((fqn, ()))
    if place is None:
        raise CorruptError(
            f"{directory} lists {fqn:.80}, but has no data for it: its save lost a part without an "
            "error. Use another checkpoint"
        )
    name = os.path.normpath(place.file)
    if os.path.isabs(name) or name.split("/")[0] == ".." or "\0" in name:
        raise CorruptError(f"{directory} says that {fqn:.80} is in {place.file:.80}, outside it")
    return place._replace(file=name)
