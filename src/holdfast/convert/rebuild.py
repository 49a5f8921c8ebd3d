"""The names in a pickle that mean plain data: tensors of torch, and those of `plain_calls`.

Each function here stands for one callable, and does less: a tensor is only described. It allocates
nothing for the elements, which lie beside the pickle.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..format.spec import TENSOR_BYTES_MAX
from ..state.tensors import DTYPE_NAMES
from .inert import Global, Inert, Names, bad, refused, sizes_of
from .machine import Machine
from .plain_calls import PLAIN_CALLS


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
        raise bad("a reference that is no storage's")
    word, kind, key, _, count = persistent_id
    name = kind.name.removesuffix("Storage") if isinstance(kind, Global) else ""
    if word != "storage" or not name:
        raise bad("a storage of no kind")
    if name not in _STORAGE_DTYPES:  # of a tensor that is quantized, and refused by its name
        return Inert(kind, ())
    if type(key) is not str or type(count) is not int or not 0 <= count <= TENSOR_BYTES_MAX:
        raise bad("a storage without a key or a size")
    dtype = _STORAGE_DTYPES[name]
    return Storage(key, dtype, count * (dtype.itemsize if dtype else 1))


def described(held: Any, offset: Any, shape: Any, strides: Any, dtype: Any) -> StoredTensor:
    """Describe a tensor, and check that it lies within its storage.

    Raises:
        CorruptError: it does not.
    """
    if type(held) is not Storage or type(dtype) is not torch.dtype:
        raise bad("a tensor without a storage or a dtype")
    shape, strides = sizes_of(shape, "shape"), sizes_of(strides, "strides")
    if type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise bad("a tensor with an offset, a shape and strides that do not fit together")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    count = math.prod(shape)
    if count and (last + 1) * dtype.itemsize > held.size_bytes:
        raise bad(
            f"a tensor of {shape} at {offset} that reaches beyond its storage of "
            f"{held.size_bytes:,} bytes"
        )
    if count * dtype.itemsize > TENSOR_BYTES_MAX:
        raise bad(f"a tensor of {count:,} elements")
    return StoredTensor(held, offset, shape, strides, dtype)


def _tensor_v2(
    _: Machine, held: Any, offset: Any, shape: Any, strides: Any, *further: Any
) -> "StoredTensor | Inert":
    if len(further) > 2 and further[2]:  # conjugated or negated: its bytes are not its elements
        return refused("torch._utils._rebuild_tensor_v2", held, further[2])
    if type(held) is not Storage or held.dtype is None:
        raise bad("a tensor without a dtype")
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
        return refused("torch._utils._rebuild_tensor_v3", held, metadata)
    return described(held, offset, shape, strides, dtype)


def _parameter(_: Machine, data: Any, *further: Any) -> Any:
    if type(data) not in (StoredTensor, Inert):
        raise bad("a parameter without a tensor")
    return data


def _of_type(machine: Machine, function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Stand for `torch._tensor._rebuild_from_type_v2`: a tensor with attributes, or a subclass."""
    if str(kind) in _PLAIN_TENSORS and str(function) in _TENSOR_CALLS:
        return machine.called(function, args, {})
    return refused("torch._tensor._rebuild_from_type_v2", function, kind, args, state)


_PLAIN_TENSORS = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
_TENSOR_CALLS = {f"torch._utils._rebuild_tensor_{version}" for version in ("v2", "v3")}


def _size(_: Machine, numbers: Any) -> torch.Size:
    return torch.Size(sizes_of(numbers, "shape"))


def _device(_: Machine, kind: Any, index: Any = None) -> Any:
    if type(kind) is str and kind in _DEVICES and (index is None or type(index) is int):
        if index is None:
            return torch.device(kind)
        if 0 <= index < 128:  # eight bits, with a sign
            return torch.device(kind, index)
    return refused("torch.device", kind, index)


_DEVICES = {"cpu", "cuda", "meta", "xpu", "hpu", "npu", "mps", "xla"}


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
    **PLAIN_CALLS,
}

TENSORS = Names(_CONSTANTS, _CALLS, storage)
PLAIN = Names(_CONSTANTS, _CALLS)
