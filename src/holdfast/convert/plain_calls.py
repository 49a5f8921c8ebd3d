"""The names in a pickle that mean plain data of Python and numpy. Knows no torch.

Each function stands for one callable, and does less. Arrays of numpy stand in the pickle itself.
"""

import io
import math
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .inert import Buildable, Inert, bad, refused, sizes_of
from .machine import Machine

_ARRAY_DTYPES = {
    "b1",
    "i1",
    "u1",
    "i2",
    "u2",
    "i4",
    "u4",
    "i8",
    "u8",
    "f2",
    "f4",
    "f8",
    "c8",
    "c16",
}


class ArrayType(Buildable):
    """A dtype of numpy: its code, and its byte order, which comes as a state."""

    __slots__ = ("code",)

    def __init__(self, code: str) -> None:
        self.code = code

    def build(self, state: Any) -> None:
        """Take the byte order."""
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "|", ">", "="):
            raise bad("a dtype of numpy in an unknown version")
        if state[1] == ">":
            raise bad("an array whose numbers are big-endian; expected little-endian")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of numpy."""
        return np.dtype(self.code)


class Array(Buildable):
    """An array of numpy, whose content comes as a state."""

    __slots__ = ("_content",)

    def __init__(self) -> None:
        self._content: np.ndarray[Any, Any] = np.empty(0, np.float64)

    def build(self, state: Any) -> None:
        """Take the shape, the dtype and the bytes."""
        if type(state) is not tuple or len(state) != 5:
            raise bad("an array of numpy in an unknown version")
        self._content = _array(state[4], state[2], state[1], "F" if state[3] else "C")

    def array(self) -> "np.ndarray[Any, Any]":
        """Return the array. It cannot be written."""
        return self._content


def _array(raw: Any, kind: Any, shape: Any, order: Any) -> "np.ndarray[Any, Any]":
    shape = sizes_of(shape if type(shape) is tuple else (shape,), "shape")
    if (
        type(raw) not in (bytes, bytearray)
        or type(kind) is not ArrayType
        or order not in ("C", "F")
    ):
        raise bad("an array of numpy that holds no plain numbers")
    dtype = kind.dtype
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise bad(f"an array of numpy of {shape} in {len(raw):,} bytes")
    return np.frombuffer(raw, dtype).reshape(shape, order=order)


def _array_type(_: Machine, code: Any, *further: Any) -> "ArrayType | Inert":
    fits = type(code) is str and code in _ARRAY_DTYPES
    return ArrayType(code) if fits else refused("numpy.dtype", code)


def _reconstruct(_: Machine, kind: Any, shape: Any, code: Any) -> "Array | Inert":
    if str(kind) != "numpy.ndarray":
        return refused("numpy._core.multiarray._reconstruct", kind)
    return Array()


def _from_buffer(_: Machine, raw: Any, kind: Any, shape: Any, order: Any, *further: Any) -> Array:
    made = Array()
    made._content = _array(raw, kind, shape, order)
    return made


def _scalar(_: Machine, kind: Any, raw: Any) -> Any:
    return _array(raw, kind, (), "C")[()]


# Python's own.


class Buffer(Buildable):
    """A BytesIO, whose bytes and position come as a state."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: tuple[bytes, int] = (b"", 0)

    def build(self, state: Any) -> None:
        """Take the bytes and the position."""
        if type(state) is not tuple or [type(item) for item in state[:2]] != [bytes, int]:
            raise bad("a BytesIO of no bytes")
        self._state = state[0], min(max(state[1], 0), len(state[0]))

    def buffer(self) -> io.BytesIO:
        """Return it."""
        found = io.BytesIO(self._state[0])
        found.seek(self._state[1])
        return found


def _encoded(machine: Machine, text: Any, code: Any) -> bytes:
    """Stand for `_codecs.encode`: what protocol 2 makes of bytes."""
    if type(text) is not str or code not in ("latin1", "latin-1"):
        raise bad("bytes in an unknown way")
    machine.charge(len(text) + 64)
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise bad("bytes above 255") from None


def _bytearray(machine: Machine, value: Any = b"", code: Any = None) -> bytearray:
    raw = value if type(value) is bytes else _encoded(machine, value, code)
    machine.charge(len(raw))
    return bytearray(raw)


def _set_of(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def made(machine: Machine, items: Any = ()) -> Any:
        if type(items) not in (list, tuple):
            raise bad("a set of no list")
        machine.charge(240 + 112 * len(items))
        for item in items:
            machine.check_key(item)
        return kind(items)

    return made


def _ordered(machine: Machine, pairs: Any = ()) -> "OrderedDict[Any, Any]":
    if type(pairs) not in (list, tuple) or not all(
        type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise bad("a dict of no pairs")
    machine.charge(240 * len(pairs))
    for key, _ in pairs:
        machine.check_key(key)
    return OrderedDict(pairs)


def _default_dict(_: Machine, factory: Any = None) -> Any:
    """Stand for a defaultdict with a dict, which makes nothing by itself."""
    return {}


def _counter(machine: Machine, counts: Any = None) -> dict[Any, Any]:
    """Stand for a Counter with a dict."""
    if type(counts) is not dict:
        raise bad("a Counter of no dict")
    machine.charge(144 * len(counts))
    return dict(counts)


def _complex(_: Machine, real: Any, imag: Any) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise bad("a complex number of no numbers")
    return complex(real, imag)


def _path(machine: Machine, *parts: Any) -> Path:
    if not all(type(part) is str for part in parts):
        raise bad("a path of no texts")
    machine.charge(4 * sum(map(len, parts)))
    return Path(*parts)


PLAIN_CALLS: dict[str, Callable[..., Any]] = {
    "numpy.dtype": _array_type,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "_codecs.encode": _encoded,
    "_io.BytesIO": lambda _: Buffer(),
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda _: b"",
    "builtins.set": _set_of(set),
    "builtins.frozenset": _set_of(frozenset),
    "builtins.complex": _complex,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _counter,
    "argparse.Namespace": lambda _: Namespace(),
    **{f"pathlib.{kind}": _path for kind in ("Path", "PosixPath", "PurePosixPath")},
}
