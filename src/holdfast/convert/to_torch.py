"""Tensors and values → one file of `torch.save`: a flat dict of names. Pure; imports no pickle.

The pickle is written here, of few opcodes and of names that `torch.load(weights_only=True)` takes.
"""

import struct
from collections.abc import Sequence
from math import prod
from typing import Any

from .emit import PlannedFile
from .names import Chosen
from .to_safetensors import Written
from .zipped import ALIGN_BYTES, Archive

FOLDER = "archive"
STORAGES = {
    **{"f64": "Double", "f32": "Float", "f16": "Half", "bf16": "BFloat16", "bool": "Bool"},
    **{"u8": "Byte", "i8": "Char", "i16": "Short", "i32": "Int", "i64": "Long"},
    **{"c64": "ComplexFloat", "c128": "ComplexDouble"},
}
# Those that came later have a storage of bytes, and their own name.
NEWER = {
    **{"u16": "uint16", "u32": "uint32", "u64": "uint64", "c32": "complex32"},
    **{"f8_e4m3fn": "float8_e4m3fn", "f8_e5m2": "float8_e5m2"},
    **{"f8_e4m3fnuz": "float8_e4m3fnuz", "f8_e5m2fnuz": "float8_e5m2fnuz"},
    **{"f8_e8m0fnu": "float8_e8m0fnu", "f4_e2m1fn_x2": "float4_e2m1fn_x2"},
}
DEPTH_MAX = 100
INTEGER_BITS_MAX = 255 * 8 - 1  # of the longer form weights_only reads nothing
_MARK, _TUPLE, _REDUCE, _EMPTY_TUPLE = b"(", b"t", b"R", b")"


def plan_file(
    name: str, tensors: Sequence[Written], taken: Chosen
) -> tuple[PlannedFile, tuple[str, ...]]:
    """Plan a file; return it, and the names of values that it cannot hold."""
    values = {key: text for key, value in taken.values.items() if (text := _pickled(value))}
    body, place = list[bytes](), dict[str, int]()
    for number, written in enumerate(tensors):
        place[written.piece.name] = number
        body += [_text(written.piece.name), _tensor(number, written), _put(number)]
    for tie, owner in taken.ties.items():
        body += [_text(tie), b"j" + struct.pack("<I", place[owner])]
    body += [part for key, text in values.items() for part in (_text(key), text)]
    pickled = b"\x80\x02}" + _MARK + b"".join(body) + b"u."
    archive = Archive()
    archive.add(f"{FOLDER}/data.pkl", pickled)
    archive.add(f"{FOLDER}/.format_version", b"1")
    archive.add(f"{FOLDER}/.storage_alignment", str(ALIGN_BYTES).encode())
    archive.add(f"{FOLDER}/byteorder", b"little")
    for number, written in enumerate(tensors):
        archive.add(f"{FOLDER}/data/{number}", b"", written.piece)
    archive.add(f"{FOLDER}/version", b"3\n")
    left = tuple(key for key in taken.values if key not in values)
    return PlannedFile(name, archive.finish()), left


def _tensor(number: int, written: Written) -> bytes:
    """Pickle a tensor that is all of its storage."""
    dtype, shape = written.piece.dtype, written.shape
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    if dtype in STORAGES:
        kind, count, version = f"torch {STORAGES[dtype]}Storage", prod(shape), 2
    else:
        kind, count, version = "torch.storage UntypedStorage", written.piece.size_bytes, 3
    storage = _tuple(
        _text("storage"), _global(kind), _text(str(number)), _text("cpu"), _integer(count)
    )
    numbers = [_tuple(*map(_integer, each)) for each in (shape, strides)]
    hooks = _global("collections OrderedDict") + _EMPTY_TUPLE + _REDUCE
    arguments = [storage + b"Q", _integer(0), *numbers, b"\x89", hooks]
    if version == 3:
        arguments.append(_global(f"torch {NEWER[dtype]}"))
    rebuild = _global(f"torch._utils _rebuild_tensor_v{version}")
    return rebuild + _tuple(*arguments) + _REDUCE


def _pickled(value: Any, depth: int = DEPTH_MAX) -> bytes | None:
    """Pickle plain data; None: weights_only would not take it."""
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if type(value) is int:
        return _integer(value) if value.bit_length() <= INTEGER_BITS_MAX else None
    if type(value) is float:
        return b"G" + struct.pack(">d", value)
    if type(value) is str:
        return _text(value)
    if type(value) is bytes:
        arguments = _tuple(_text(value.decode("latin-1")), _text("latin1"))
        return _global("_codecs encode") + arguments + _REDUCE
    if type(value) not in (list, tuple, dict) or depth == 0:
        return None
    items = (
        [*value] if type(value) is not dict else [part for pair in value.items() for part in pair]
    )
    parts = [_pickled(item, depth - 1) for item in items]
    if any(part is None for part in parts):
        return None
    body = _MARK + b"".join(part for part in parts if part is not None)
    if type(value) is tuple:
        return body + _TUPLE
    return b"]" + body + b"e" if type(value) is list else b"}" + body + b"u"


def _tuple(*parts: bytes) -> bytes:
    return _MARK + b"".join(parts) + _TUPLE


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(number: int) -> bytes:
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _global(name: str) -> bytes:
    module, _, attribute = name.partition(" ")
    return f"c{module}\n{attribute}\n".encode()


def _put(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)
