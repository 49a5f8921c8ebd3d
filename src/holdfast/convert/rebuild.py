"""The names in a pickle that mean plain data: tensors of torch, arrays of numpy, containers.

Each function here stands for one callable, and does less: a tensor is only described. It allocates
nothing for the elements, which lie beside the pickle.
"""

import math
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import CorruptError
from ..format.spec import DIMENSIONS_MAX, TENSOR_BYTES_MAX
from ..state.tensors import DTYPE_NAMES
from .inert import Buildable, Global, Inert, Names
from .machine import Machine


class Storage(NamedTuple):
    """A storage, as a pickle refers to it: ``dtype`` is None where the bytes have none."""

    key: str
    dtype: torch.dtype | None
    size_bytes: int


class StoredTensor(NamedTuple):
    """A tensor, as a pickle describes it.

    Attributes:
        storage: holds the elements.
        offset: of the first element in it, in elements.
        shape, strides: in elements.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, those that are repeated counted each."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row-major, without gaps."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return not math.prod(self.shape)
            expected *= length
        return True


def _bad(what: str) -> CorruptError:
    return CorruptError(f"the pickle describes {what}")


# Tensors.

_STORAGE_DTYPES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16},
    **{"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Bool": torch.bool},
    **{"Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128, "Untyped": None},
}


def storage(persistent_id: Any) -> "Storage | Inert":
    """Read a reference to a storage, ``("storage", FloatStorage, "0", "cpu", 12)``.

    Raises:
        CorruptError: it is none.
    """
    if type(persistent_id) is not tuple or len(persistent_id) != 5:
        raise _bad("a reference that is no storage's")
    word, kind, key, _, count = persistent_id
    name = kind.name.removesuffix("Storage") if isinstance(kind, Global) else ""
    if word != "storage" or not name:
        raise _bad("a storage of no kind")
    if name not in _STORAGE_DTYPES:  # of a tensor that is quantized, and refused by its name
        return Inert(kind, ())
    if type(key) is not str or type(count) is not int or not 0 <= count <= TENSOR_BYTES_MAX:
        raise _bad("a storage without a key or a size")
    dtype = _STORAGE_DTYPES[name]
    return Storage(key, dtype, count * (dtype.itemsize if dtype else 1))


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    fits = type(value) in (tuple, torch.Size, list) and len(value) <= DIMENSIONS_MAX
    if not fits or not all(type(n) is int and 0 <= n <= TENSOR_BYTES_MAX for n in value):
        raise _bad(f"a tensor whose {what} is no short tuple of sizes")
    return tuple(value)


def described(held: Any, offset: Any, shape: Any, strides: Any, dtype: Any) -> StoredTensor:
    """Describe a tensor, and check that it lies within its storage.

    Raises:
        CorruptError: it does not.
    """
    if type(held) is not Storage or type(dtype) is not torch.dtype:
        raise _bad("a tensor without a storage or a dtype")
    shape, strides = _numbers(shape, "shape"), _numbers(strides, "strides")
    if type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise _bad("a tensor with an offset, a shape and strides that do not fit together")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    count = math.prod(shape)
    if count and (last + 1) * dtype.itemsize > held.size_bytes:
        raise _bad(
            f"a tensor of {shape} at {offset} that reaches beyond its storage of "
            f"{held.size_bytes:,} bytes"
        )
    if count * dtype.itemsize > TENSOR_BYTES_MAX:
        raise _bad(f"a tensor of {count:,} elements")
    return StoredTensor(held, offset, shape, strides, dtype)


def _refused(name: str, *args: Any) -> Inert:
    module, _, last = name.rpartition(".")
    return Inert(Global(module, last), args)


def _tensor_v2(
    _: Machine, held: Any, offset: Any, shape: Any, strides: Any, *further: Any
) -> "StoredTensor | Inert":
    if len(further) > 2 and further[2]:  # conjugated or negated: its bytes are not its elements
        return _refused("torch._utils._rebuild_tensor_v2", held, further[2])
    if type(held) is not Storage or held.dtype is None:
        raise _bad("a tensor without a dtype")
    return described(held, offset, shape, strides, held.dtype)


def _tensor_v3(
    _: Machine,
    held: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> "StoredTensor | Inert":
    if metadata:
        return _refused("torch._utils._rebuild_tensor_v3", held, metadata)
    return described(held, offset, shape, strides, dtype)


def _parameter(_: Machine, data: Any, *further: Any) -> Any:
    if type(data) not in (StoredTensor, Inert):
        raise _bad("a parameter without a tensor")
    return data


def _of_type(machine: Machine, function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Stand for `torch._tensor._rebuild_from_type_v2`: a tensor with attributes, or a subclass."""
    if str(kind) in _PLAIN_TENSORS and str(function) in _TENSOR_CALLS:
        return machine.called(function, args, {})
    return _refused("torch._tensor._rebuild_from_type_v2", function, kind, args, state)


_PLAIN_TENSORS = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
_TENSOR_CALLS = {f"torch._utils._rebuild_tensor_{version}" for version in ("v2", "v3")}


def _size(_: Machine, numbers: Any) -> torch.Size:
    return torch.Size(_numbers(numbers, "shape"))


def _device(_: Machine, kind: Any, index: Any = None) -> Any:
    if type(kind) is str and kind in _DEVICES and (index is None or type(index) is int):
        if index is None:
            return torch.device(kind)
        if 0 <= index < 128:  # eight bits, with a sign
            return torch.device(kind, index)
    return _refused("torch.device", kind, index)


_DEVICES = {"cpu", "cuda", "meta", "xpu", "hpu", "npu", "mps", "xla"}


# Arrays of numpy, which stand in the pickle itself.

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
            raise _bad("a dtype of numpy in an unknown version")
        if state[1] == ">":
            raise _bad("an array whose numbers are big-endian; expected little-endian")

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
            raise _bad("an array of numpy in an unknown version")
        self._content = _array(state[4], state[2], state[1], "F" if state[3] else "C")

    def array(self) -> "np.ndarray[Any, Any]":
        """Return the array. It cannot be written."""
        return self._content


def _array(raw: Any, kind: Any, shape: Any, order: Any) -> "np.ndarray[Any, Any]":
    shape = _numbers(shape if type(shape) is tuple else (shape,), "shape")
    if (
        type(raw) not in (bytes, bytearray)
        or type(kind) is not ArrayType
        or order not in ("C", "F")
    ):
        raise _bad("an array of numpy that holds no plain numbers")
    dtype = kind.dtype
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise _bad(f"an array of numpy of {shape} in {len(raw):,} bytes")
    return np.frombuffer(raw, dtype).reshape(shape, order=order)


def _array_type(_: Machine, code: Any, *further: Any) -> "ArrayType | Inert":
    fits = type(code) is str and code in _ARRAY_DTYPES
    return ArrayType(code) if fits else _refused("numpy.dtype", code)


def _reconstruct(_: Machine, kind: Any, shape: Any, code: Any) -> "Array | Inert":
    if str(kind) != "numpy.ndarray":
        return _refused("numpy._core.multiarray._reconstruct", kind)
    return Array()


def _from_buffer(_: Machine, raw: Any, kind: Any, shape: Any, order: Any, *further: Any) -> Array:
    made = Array()
    made._content = _array(raw, kind, shape, order)
    return made


def _scalar(_: Machine, kind: Any, raw: Any) -> Any:
    return _array(raw, kind, (), "C")[()]


# Python's own.


def _encoded(machine: Machine, text: Any, code: Any) -> bytes:
    """Stand for `_codecs.encode`: what protocol 2 makes of bytes."""
    if type(text) is not str or code not in ("latin1", "latin-1"):
        raise _bad("bytes in an unknown way")
    machine.charge(len(text) + 64)
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise _bad("bytes above 255") from None


def _bytearray(machine: Machine, value: Any = b"", code: Any = None) -> bytearray:
    raw = value if type(value) is bytes else _encoded(machine, value, code)
    machine.charge(len(raw))
    return bytearray(raw)


def _set_of(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def made(machine: Machine, items: Any = ()) -> Any:
        if type(items) not in (list, tuple):
            raise _bad("a set of no list")
        machine.charge(240 + 112 * len(items))
        for item in items:
            machine.check_key(item)
        return kind(items)

    return made


def _ordered(machine: Machine, pairs: Any = ()) -> "OrderedDict[Any, Any]":
    if type(pairs) not in (list, tuple) or not all(
        type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise _bad("a dict of no pairs")
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
        raise _bad("a Counter of no dict")
    machine.charge(144 * len(counts))
    return dict(counts)


def _complex(_: Machine, real: Any, imag: Any) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise _bad("a complex number of no numbers")
    return complex(real, imag)


def _path(machine: Machine, *parts: Any) -> Path:
    if not all(type(part) is str for part in parts):
        raise _bad("a path of no texts")
    machine.charge(4 * sum(map(len, parts)))
    return Path(*parts)


_CONSTANTS: dict[str, Any] = {str(dtype): dtype for dtype in DTYPE_NAMES}

_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": lambda _, name: name,
    "numpy.dtype": _array_type,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "_codecs.encode": _encoded,
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

TENSORS = Names(_CONSTANTS, _CALLS, storage)
PLAIN = Names(_CONSTANTS, _CALLS)
