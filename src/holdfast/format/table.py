"""The table of docs/format.md §6: bytes ⇄ header and columns. Knows no file system and no torch.

A MANIFEST is a table of all files, a footer is a table of one. What comes out of `decode_table`
has passed every check that one table can be put to.
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import xxh3_128
from ..errors import CorruptError, VersionError
from ..layout import ITEM_BYTES, Path, Shape, Tensor
from . import spec
from .values import decode_path, decode_value, encode_path, encode_value, parse_json

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_PREAMBLE = struct.Struct("<8sIIQQQQQQQ")
assert _PREAMBLE.size == spec.PREAMBLE_BYTES

_TOO_DEEP = f"its JSON header is nested deeper than {spec.JSON_DEPTH_MAX} levels"
_TENSOR_KEYS = {"path", "dtype", "shape", "codec"}
_KEYS = {
    *(
        "save_id",
        "step",
        "world_size",
        "mesh",
        "metrics",
        "written_by",
        "chunk_elements",
        "features",
    ),
    *("codecs", "tensors", "ties", "objects"),
}


@dataclass(frozen=True, slots=True)
class Header:
    """What the JSON header of a table says.

    Attributes:
        save_id: 32 hexadecimal digits.
        metrics: numbers that judge the step, by name.
        tensors: in the order that ``shard_tensor`` and ``ties`` count them.
        ties: (further path, index of the tensor).
        objects: (path, decoded value).
    """

    save_id: str
    step: int | None
    world_size: int
    mesh: dict[str, Any] | None
    metrics: dict[str, float]
    written_by: str
    chunk_elements: int
    tensors: tuple[Tensor, ...]
    ties: tuple[tuple[Path, int], ...]
    objects: tuple[tuple[Path, Any], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A header and its columns, as docs/format.md §6 names them.

    Attributes:
        shard_digest: (S, 2) little-endian halves of each XXH3-128.
        shard_box: all offsets and shapes, flat; `box_starts` says where each shard's begin.
    """

    header: Header
    file_bytes: U64
    file_footer_checksum: U64
    file_rank: U32
    file_number: U32
    file_chunks: U32
    shard_digest: U64
    shard_box: I64
    shard_tensor: U32
    shard_file: U32
    shard_first_chunk: U32
    shard_chunks: U32
    chunk_checksum: U64
    chunk_size_mode: U32
    chunk_offset: U32

    def box_starts(self) -> I64:
        """Return where each shard's numbers begin in ``shard_box``, and the end of the last."""
        ndim = np.array([len(t.shape) for t in self.header.tensors] or [0], np.int64)
        return np.concatenate([[0], np.cumsum(2 * ndim[self.shard_tensor])]).astype(np.int64)


# (field, dtype, items per row, which count) in file order.
_COLUMNS = (
    *(("file_bytes", "<u8", 1, "F"), ("file_footer_checksum", "<u8", 1, "F")),
    *(
        ("shard_digest", "<u8", 2, "S"),
        ("shard_box", "<i8", 1, "B"),
        ("chunk_checksum", "<u8", 1, "C"),
    ),
    *(("file_rank", "<u4", 1, "F"), ("file_number", "<u4", 1, "F"), ("file_chunks", "<u4", 1, "F")),
    *(("shard_tensor", "<u4", 1, "S"), ("shard_file", "<u4", 1, "S")),
    *(("shard_first_chunk", "<u4", 1, "S"), ("shard_chunks", "<u4", 1, "S")),
    *(("chunk_size_mode", "<u4", 1, "C"), ("chunk_offset", "<u4", 1, "C")),
)


def encode_table(magic: bytes, table: Table) -> bytes:
    """Write a table as bytes, H128 included."""
    header = _encode_header(table.header)
    columns = [
        np.ascontiguousarray(getattr(table, name), dtype).tobytes()
        for name, dtype, _, _ in _COLUMNS
    ]
    counts = (
        len(table.file_bytes),
        len(table.shard_tensor),
        len(table.chunk_offset),
        len(table.shard_box),
    )
    total = spec.PREAMBLE_BYTES + len(header) + sum(map(len, columns)) + spec.TABLE_CHECKSUM_BYTES
    preamble = _PREAMBLE.pack(magic, spec.FORMAT_VERSION, 0, total, len(header), *counts, 0)
    body = b"".join([preamble, header, *columns])
    return body + xxh3_128(body)


def encode_header_values(header: Header) -> dict[str, Any]:
    """Return the JSON header as values, in the order of docs/format.md."""
    tensors = [
        {"path": encode_path(t.path), "dtype": t.dtype, "shape": list(t.shape), "codec": 0}
        for t in header.tensors
    ]
    return {
        "save_id": header.save_id,
        "step": header.step,
        "world_size": header.world_size,
        "mesh": header.mesh,
        "metrics": encode_value(header.metrics, ("metrics",)),
        "written_by": header.written_by,
        "chunk_elements": header.chunk_elements,
        "features": [],
        "codecs": [{"name": spec.CODEC_RAW}],
        "tensors": tensors,
        "ties": [{"path": encode_path(path), "tensor": i} for path, i in header.ties],
        "objects": [
            {"path": encode_path(path), "value": encode_value(value, path)}
            for path, value in header.objects
        ],
    }


def _encode_header(header: Header) -> bytes:
    values = encode_header_values(header)
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def decode_table(magic: bytes, data: bytes) -> Table:
    """Parse and check a table; every check of docs/format.md §7 that needs no other file.

    Raises:
        CorruptError: the bytes are not a whole table of version 1.
        VersionError: a newer holdfast wrote them.
    """
    header_bytes, counts = _decode_preamble(magic, data)
    body, checksum = np.split(np.frombuffer(data, np.uint8), [-spec.TABLE_CHECKSUM_BYTES])
    if xxh3_128(body) != checksum.tobytes():
        raise CorruptError("its checksum (XXH3-128) does not match its bytes")
    end = spec.PREAMBLE_BYTES + header_bytes
    try:
        header = _decode_header(parse_json(_unpadded(data[spec.PREAMBLE_BYTES : end])))
    except RecursionError as error:  # of values in values; all else has a form of few levels
        raise CorruptError(_TOO_DEEP) from error
    columns = {}
    for name, dtype, items, count in _COLUMNS:
        rows = counts[count] * items
        columns[name] = np.frombuffer(data, dtype, rows, end)
        end += rows * int(dtype[-1])
    columns["shard_digest"] = columns["shard_digest"].reshape(-1, 2)
    return Table(header=header, **columns)


def _unpadded(text: bytes) -> bytes:
    """Take the spaces off that make the JSON header a multiple of 8 bytes."""
    bare = text.rstrip(b" ")
    if len(text) - len(bare) > 7:
        raise CorruptError(f"its JSON header is padded by {len(text) - len(bare)} spaces")
    return bare


def _decode_preamble(magic: bytes, data: bytes) -> tuple[int, dict[str, int]]:
    """Check sizes against each other before anything is read with them."""
    if len(data) < spec.PREAMBLE_BYTES + spec.TABLE_CHECKSUM_BYTES:
        raise CorruptError(f"it has {len(data)} bytes, fewer than the smallest table")
    found, version, zero, total, header_bytes, files, shards, chunks, numbers, zeros = (
        _PREAMBLE.unpack_from(data)
    )
    if found != magic:
        raise CorruptError(f"its magic is {found.hex()}; expected {magic.hex()}")
    if version > spec.FORMAT_VERSION:
        raise VersionError(
            f"it has format version {version}; this holdfast reads version {spec.FORMAT_VERSION}. "
            "Upgrade holdfast"
        )
    counts = {"F": files, "S": shards, "C": chunks, "B": numbers}
    size = spec.PREAMBLE_BYTES + header_bytes + spec.TABLE_CHECKSUM_BYTES
    size += sum(counts[c] * items * int(dtype[-1]) for _, dtype, items, c in _COLUMNS)
    if version != spec.FORMAT_VERSION or zero or zeros or total != len(data) or size != len(data):
        raise CorruptError(f"its preamble does not fit its {len(data)} bytes")
    if header_bytes % 8 or header_bytes > spec.HEADER_BYTES_MAX:
        raise CorruptError(f"its JSON header takes {header_bytes} bytes")
    return header_bytes, counts


def _decode_header(values: Any) -> Header:
    if not isinstance(values, dict):
        raise CorruptError("its JSON header is not an object")
    _check_known(values)
    if set(values) != _KEYS:
        raise CorruptError("its JSON header does not have the keys of version 1")
    tensors = _decode_tensors(_entries(values, "tensors"), values["codecs"])
    ties = tuple(_decode_tie(entry, len(tensors)) for entry in _entries(values, "ties"))
    objects = tuple(_decode_object(entry) for entry in _entries(values, "objects"))
    paths = [tensor.path for tensor in tensors]
    paths += [path for path, _ in ties] + [path for path, _ in objects]
    # True == 1 in Python, but no key of a path is a bool.
    if len(set(paths)) != len(paths):
        raise CorruptError("its JSON header names a path twice")
    return Header(
        save_id=_save_id(values["save_id"]),
        step=None if values["step"] is None else _count(values["step"], 0, "step", 1 << 53),
        world_size=_count(values["world_size"], 1, "world_size", 1 << 32),
        mesh=_mesh(values["mesh"]),
        metrics=_metrics(values["metrics"]),
        written_by=_text(values["written_by"], "written_by"),
        chunk_elements=_chunk_elements(values["chunk_elements"]),
        tensors=tensors,
        ties=ties,
        objects=objects,
    )


def _check_known(values: dict[str, Any]) -> None:
    """Tell a newer checkpoint from a damaged one."""
    for feature in _entries(values, "features"):
        _keys(feature, {"name", "since"}, "feature")
        name, since = (_text(feature[key], f"{key} of a feature") for key in ("name", "since"))
        raise VersionError(
            f"it uses the feature {name!r:.80}, which holdfast {since:.80} and newer read. "
            "Upgrade holdfast"
        )
    for codec in _entries(values, "codecs"):
        if (name := _text(codec.get("name"), "the name of a codec")) != spec.CODEC_RAW:
            raise VersionError(
                f"it uses the codec {name!r:.80}, which this holdfast does not know. "
                f"It was written by {values.get('written_by')!r:.80}; upgrade holdfast"
            )
        _keys(codec, {"name"}, "codec")


def _decode_tensors(entries: list[dict[str, Any]], codecs: list[Any]) -> tuple[Tensor, ...]:
    """Decode the tensors; what many have in common, as layers do, is looked at once."""
    known: dict[str, Shape] = {}
    tensors = []
    for entry in entries:
        _keys(entry, _TENSOR_KEYS, "tensor")
        dtype, shape, codec = entry["dtype"], entry["shape"], entry["codec"]
        alike = str((dtype, shape, codec))  # of 1 and True, which are equal, texts differ
        if alike not in known:
            known[alike] = _tensor_shape(dtype, shape, codec, len(codecs))
        tensors.append(Tensor(decode_path(entry["path"]), dtype, known[alike]))
    return tuple(tensors)


def _tensor_shape(dtype: Any, shape: Any, codec: Any, codecs: int) -> Shape:
    """Check all of a tensor but its path."""
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CorruptError(f"the dtype {dtype!r:.40} is unknown")
    if not isinstance(shape, list) or len(shape) > spec.DIMENSIONS_MAX:
        raise CorruptError(f"the shape {shape!r:.80} is not a list of at most 64 dimensions")
    if _count(codec, 0, "codec") >= codecs:
        raise CorruptError(f"codec {codec} is not in the table of {codecs}")
    found = _shape(shape)
    # An empty tensor may not be of a shape either that nobody could hold in memory.
    if prod([n or 1 for n in found]) * ITEM_BYTES[dtype] > spec.TENSOR_BYTES_MAX:
        raise CorruptError(f"a tensor of shape {shape!r:.80} takes 2^63 bytes or more")
    return found


def _decode_tie(entry: dict[str, Any], tensors: int) -> tuple[Path, int]:
    _keys(entry, {"path", "tensor"}, "tie")
    if _count(entry["tensor"], 0, "tie") >= tensors:
        raise CorruptError(f"a tie names tensor {entry['tensor']} of {tensors}")
    return decode_path(entry["path"]), entry["tensor"]


def _decode_object(entry: dict[str, Any]) -> tuple[Path, Any]:
    _keys(entry, {"path", "value"}, "object")
    return decode_path(entry["path"]), decode_value(entry["value"])


def _entries(values: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = values.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CorruptError(f"{key!r} of its JSON header is not a list of objects")
    return entries


def _keys(entry: dict[str, Any], keys: set[str], what: str) -> None:
    if entry.keys() != keys:
        raise CorruptError(f"a {what} of its JSON header has the keys {sorted(entry)!r:.80}")


def _count(value: Any, low: int, what: str, end: int = 1 << 63) -> int:
    if type(value) is not int or not low <= value < end:
        raise CorruptError(f"{what} is {value!r:.40}; expected an integer from {low} below {end}")
    return value


def _shape(values: list[Any]) -> Shape:
    return tuple([_count(n, 0, "a dimension") for n in values])


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise CorruptError(f"{what} is {value!r:.40}; expected text")
    return value


def _save_id(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 32 or not set(value) <= set("0123456789abcdef"):
        raise CorruptError(f"save_id is {value!r:.40}; expected 32 hexadecimal digits")
    return value


def _chunk_elements(value: Any) -> int:
    if _count(value, 1, "chunk_elements") > spec.CHUNK_ELEMENTS_MAX:
        raise CorruptError(f"chunk_elements is {value}; at most {spec.CHUNK_ELEMENTS_MAX}")
    return int(value)


def _mesh(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"shape", "names"}:
        raise CorruptError("mesh is neither null nor an object of shape and names")
    shape, names = value["shape"], value["names"]
    if not isinstance(shape, list) or not isinstance(names, list) or len(shape) != len(names):
        raise CorruptError("the mesh's shape and names are not lists of one length")
    return {"shape": list(_shape(shape)), "names": [_text(name, "a mesh name") for name in names]}


def _metrics(value: Any) -> dict[str, float]:
    decoded = decode_value(value)
    if not isinstance(decoded, dict) or any(
        not isinstance(name, str)
        or not isinstance(number, (int, float))
        or isinstance(number, bool)
        for name, number in decoded.items()
    ):
        raise CorruptError("metrics is not an object of numbers")
    return decoded
