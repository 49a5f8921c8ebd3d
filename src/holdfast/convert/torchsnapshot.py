"""Snapshots of torchsnapshot as a `Source`: ``.snapshot_metadata`` and the files that it names.

Its metadata is JSON. Elements lie plainly in files; other values are files of torch.save. Nothing
has a checksum, so damage of elements is not noticed.
"""

import base64
import binascii
import os
import struct
from collections import OrderedDict
from typing import Any

from ..errors import CorruptError, OptionError, StateError, shown
from ..layout import Box, Shape, Tensor, whole
from ..state.tensors import DTYPE_NAMES
from .archive import Region
from .contents import Contents, lay_flat, plain
from .inert import sizes_of
from .json_file import read_json
from .pieces import Piece, PiecedSource, row_major
from .rebuild import Storage, StoredTensor
from .torch_archive import read_torch_archive

KIND = "torchsnapshot"
METADATA = ".snapshot_metadata"
DEPTH_MAX = 100
_DTYPES = {str(dtype): dtype for dtype in DTYPE_NAMES}
_CONTAINERS = {"dict": dict, "OrderedDict": OrderedDict}
_TENSORS = {"Tensor": None, "ChunkedTensor": "chunks", "ShardedTensor": "shards"}


def open_torchsnapshot(path: str) -> PiecedSource:
    """Open a snapshot. What only ranks above 0 have is left out, and counted in ``advice``.

    Args:
        path: absolute, of a directory.

    Raises:
        CorruptError: the metadata or the size of a file fails a check.
        OptionError: a tensor is quantized.
        StateError: it holds objects that are no plain data.
        StoreError: a file cannot be read.
    """
    source = PiecedSource(path, KIND)
    try:
        _Snapshot(source).add_all()
    except BaseException:
        source.close()
        raise
    return source


class _Snapshot:
    """What the metadata says, and what is added of it to the source."""

    def __init__(self, source: PiecedSource) -> None:
        self._source, self._where = source, f"{source.location}/{METADATA}"
        found = read_json(source.files, self._where)
        entries = found.get("manifest") if isinstance(found, dict) else None
        ranks = found.get("world_size") if isinstance(found, dict) else None
        if not isinstance(entries, dict) or type(ranks) is not int or ranks < 1:
            raise CorruptError(f"{self._where} is no metadata of torchsnapshot")
        self._entries: dict[str, dict[str, Any]] = {}
        self._ranks: dict[str, list[dict[str, Any]]] = {}  # those of all ranks, by the same name
        for name, entry in entries.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
                raise self._fault(name, "in an unknown way")
            self._entries[name] = entry
            self._ranks.setdefault(name.split("/", 1)[-1], []).append(entry)
        self._pieces: dict[str, list[Piece]] = {}
        self._sizes: dict[str, int] = {}

    def _fault(self, name: str, what: str) -> CorruptError:
        return CorruptError(f"{self._where} describes {name:.80} {what}")

    def add_all(self) -> None:
        """Add all tensors and values of rank 0, with the shards of all ranks."""
        tops = [name[2:] for name in self._entries if name.startswith("0/")]
        root = {top: self._value(f"0/{top}", 0) for top in tops if "/" not in top}
        contents = lay_flat(root, self._where)
        contents.check_plain(self._where)
        self._add(contents)
        others = {name.split("/", 1)[-1] for name in self._entries if not name.startswith("0/")}
        lost = [name for name in others if f"0/{name}" not in self._entries]
        own = [
            name
            for name, entry in self._entries.items()
            if not name.startswith("0/") and entry.get("replicated") is False
        ]
        if lost or own:
            count = len({*lost, *(name.split("/", 1)[-1] for name in own)})
            self._source.advice += (f"left out {count} values that ranks above 0 have otherwise",)

    def _add(self, contents: Contents) -> None:
        source = self._source
        tensors = []
        for path, stored in contents.tensors.items():
            tensors.append(Tensor(path, DTYPE_NAMES[stored.dtype], stored.shape))
            source.pieces[path] = self._pieces[stored.storage.key]
        source.tensors, source.values = tuple(tensors), contents.values
        source.check_whole()

    def _value(self, name: str, depth: int) -> Any:
        """Return what an entry describes, with `StoredTensor` in the place of tensors."""
        entry = self._entries.get(name)
        if entry is None or depth > DEPTH_MAX:
            raise self._fault(name, "nowhere" if entry is None else "too deep")
        kind = entry["type"]
        if kind in _CONTAINERS:
            keys = entry.get("keys")
            if not isinstance(keys, list) or not all(type(key) in (str, int) for key in keys):
                raise self._fault(name, "without keys")
            if len({str(key) for key in keys}) < len(keys):
                raise self._fault(name, "with a key twice")
            items = [(key, self._value(f"{name}/{_escaped(key)}", depth + 1)) for key in keys]
            return _CONTAINERS[kind](items)
        if kind == "list":
            items, number = [], 0
            while f"{name}/{number}" in self._entries:
                items.append(self._value(f"{name}/{number}", depth + 1))
                number += 1
            return items
        if kind in _TENSORS:
            return self._tensor(name, entry)
        return self._object(name, entry) if kind == "object" else self._primitive(name, entry)

    def _primitive(self, name: str, entry: dict[str, Any]) -> Any:
        kind, text = entry["type"], entry.get("serialized_value")
        try:
            if kind == "str" and isinstance(text, str):
                return text
            if kind == "int" and isinstance(text, str):
                return int(text)
            if kind == "bool" and text in ("True", "False"):
                return text == "True"
            if kind in ("bytes", "float") and isinstance(text, str):
                raw = base64.b64decode(text, validate=True)
                return raw if kind == "bytes" else struct.unpack("<d", raw)[0]
        except (ValueError, binascii.Error, struct.error):
            pass
        raise self._fault(name, f"as {shown(kind)} of {shown(text)}")

    def _object(self, name: str, entry: dict[str, Any]) -> Any:
        if entry.get("serializer") != "torch_save":
            raise self._fault(name, f"as an object of {shown(entry.get('serializer'))}")
        file, start, stop = self._place(name, entry)
        where = f"{file} ({name})"
        archive = read_torch_archive(Region(self._source.files, file, start, stop - start, where))
        try:
            return plain(archive.root)
        except StateError as error:
            raise StateError(
                f"{where} holds {error}, which is no plain data. Nothing of it was run. Leave it "
                "out of the state, and take the snapshot again"
            ) from error

    # Tensors.

    def _tensor(self, name: str, entry: dict[str, Any]) -> StoredTensor:
        part = _TENSORS[entry["type"]]
        parts: list[tuple[Box | None, Any]]
        if part is None:
            parts = [(None, entry)]
        else:
            parts = [
                (self._box(name, piece), piece.get("tensor") if isinstance(piece, dict) else None)
                for piece in self._all_parts(name, part)
            ]
        found: dict[Box, Piece] = {}
        dtypes = set()
        for box, held in parts:
            piece, dtype = self._piece(name, box, held)
            dtypes.add(dtype)
            if piece.box.elements:
                found[piece.box] = piece
        if len(dtypes) != 1:
            raise self._fault(name, "with parts of several dtypes, or none")
        boxes = [box for box, _ in parts if box is not None]
        if part == "shards":  # the only kind that does not say how large the whole is
            sides = [[a + n for a, n in zip(b.offset, b.shape, strict=True)] for b in boxes]
            if len(set(map(len, sides))) != 1:
                raise self._fault(name, "with parts of several ranks")
            shape = tuple(map(max, zip(*sides, strict=True)))
        else:
            shape = sizes_of(entry.get("shape"), "shape")
        dtype = dtypes.pop()
        self._pieces[name] = [*found.values()]
        size = whole(shape).elements * dtype.itemsize
        return StoredTensor(Storage(name, dtype, size), 0, shape, row_major(shape), dtype)

    def _all_parts(self, name: str, part: str) -> list[Any]:
        """Return the chunks of a tensor, or the shards that all ranks have of it."""
        rest = name.split("/", 1)[1]
        entries = self._ranks[rest] if part == "shards" else [self._entries[name]]
        found: list[Any] = []
        for entry in entries:
            pieces = entry.get(part)
            if not isinstance(pieces, list):
                raise self._fault(name, f"without {part}")
            found += pieces
        return found

    def _box(self, name: str, piece: Any) -> Box:
        fields = piece if isinstance(piece, dict) else {}
        offset, shape = (sizes_of(fields.get(key), "shape") for key in ("offsets", "sizes"))
        if len(offset) != len(shape):
            raise self._fault(name, "with a part of another rank")
        return Box(offset, shape)

    def _piece(self, name: str, box: Box | None, held: Any) -> tuple[Piece, Any]:
        fields = held if isinstance(held, dict) else {}
        shape: Shape = sizes_of(fields.get("shape"), "shape")
        kind = fields.get("dtype")
        dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
        if fields.get("serializer") != "buffer_protocol" or dtype is None:
            raise OptionError(
                f"{self._where}: {name:.80} is {shown(kind)}, stored by "
                f"{shown(fields.get('serializer'))}; expected a plain tensor. Load it with "
                "torchsnapshot, and save it with holdfast"
            )
        box = whole(shape) if box is None else box
        file, start, stop = self._place(name, fields)
        if box.shape != shape or stop - start != box.elements * dtype.itemsize:
            raise self._fault(name, f"in {stop - start:,} bytes; expected {dtype} {list(shape)}")
        return Piece(box, file, start, row_major(shape)), dtype

    def _place(self, name: str, fields: dict[str, Any]) -> tuple[str, int, int]:
        """Return the file of an entry, and where its bytes begin and end."""
        location: Any = fields.get("location")
        span = fields.get("byte_range")
        fits = isinstance(location, str) and location and "\0" not in location
        if not fits or os.path.isabs(location) or ".." in location.split("/"):
            raise self._fault(name, f"in {shown(location)}; expected a file beneath the snapshot")
        file = f"{self._source.location}/{location}"
        if file not in self._sizes:
            if not os.path.isfile(file):
                raise CorruptError(f"{file} is missing or not a file, and {METADATA} names it")
            self._sizes[file] = self._source.files.size(file)
        start, stop = span if isinstance(span, list) and len(span) == 2 else (0, self._sizes[file])
        fits = type(start) is int and type(stop) is int and 0 <= start <= stop <= self._sizes[file]
        if not fits:
            raise CorruptError(f"{file}[{shown(start)}:{shown(stop)}] is not within the file")
        return file, start, stop


def _escaped(key: str | int) -> str:
    return str(key).replace("%", "%25").replace("/", "%2F")
