"""Torch tensors ⇄ shards: dtypes, boxes of DTensors, ties.

Knows no names but the path it is given.
"""

import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from .._core import hash_chunk, hash_samples, xxh3_128
from ..errors import StateError
from ..format.names import dotted
from ..format.spec import DIMENSIONS_MAX, TENSOR_BYTES_MAX
from ..format.values import path_text
from ..layout import HELD_BOXES_MAX, Box, Path, Shape, Tensor, spanned_bytes, whole
from .ambient import ordinary_torch
from .dtensor import local_part
from .memory import ORDINARY, check_dense, own_memory, spread
from .natives import add_torch_types
from .shard import TENSORS, Shard, Shards, check_shard, parts_of

add_torch_types()

DTYPE_NAMES = {
    **{torch.bool: "bool", torch.float64: "f64", torch.float32: "f32"},
    **{torch.float16: "f16", torch.bfloat16: "bf16"},
    **{torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64"},
    **{torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"},
    **{torch.complex32: "c32", torch.complex64: "c64", torch.complex128: "c128"},
    **{torch.float8_e4m3fn: "f8_e4m3fn", torch.float8_e5m2: "f8_e5m2"},
    **{torch.float8_e4m3fnuz: "f8_e4m3fnuz", torch.float8_e5m2fnuz: "f8_e5m2fnuz"},
    **{torch.float8_e8m0fnu: "f8_e8m0fnu", torch.float4_e2m1fn_x2: "f4_e2m1fn_x2"},
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_REAL = {dtype: name for dtype, name in DTYPE_NAMES.items() if not dtype.is_complex}

# Up to this size ranks compare every byte (counters, random states, statistics), above it samples:
# a part of another rank's tensor differs nearly everywhere.
COMPARED_BYTES_MAX = 64 << 10
SAMPLES, SAMPLE_BYTES = 256, 64

_whole = lru_cache(whole)

TieKey = tuple[object, ...]
Part = tuple[torch.Tensor, Box]  # the elements, and which they are


class LocalTensor(NamedTuple):
    """What this process holds of a global tensor. A tuple: there are many, and none is made faster.

    Attributes:
        tensor: the global one.
        data: the elements, in any strides, on any device; none when they are in several tensors.
        boxed: of one that is not plain: the boxes held, each with its elements, which are a view
            of ``data`` if it has any.
        tie: equal for two names of one memory; None when that cannot be known.
        plain: whether it is an ordinary tensor, of which ranks may hold different versions.
        address: of ``data`` where it lies row-major in host memory; else 0.
    """

    tensor: Tensor
    data: torch.Tensor
    boxed: tuple[Part, ...]
    tie: TieKey | None
    plain: bool
    address: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """The boxes held, each with its elements."""
        return ((self.data, _whole(self.tensor.shape)),) if self.plain else self.boxed

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes held."""
        return (_whole(self.tensor.shape),) if self.plain else tuple([b for _, b in self.boxed])

    def digest(self) -> bytes | None:
        """Return a digest of an ordinary tensor, to compare ranks by; None for a shard.

        That of a large one is of evenly spread samples, the first and the last bytes among them.
        """
        if not self.plain:
            return None
        data = self.data
        size, item = data.nbytes, data.element_size()
        if size > COMPARED_BYTES_MAX:
            if self.address:
                return hash_samples(self.address, size, item, SAMPLES, SAMPLE_BYTES)
            return xxh3_128(_samples(data).numpy())
        if self.address and size:
            return hash_chunk(self.address, size, 0)[1]
        # Single bytes as integers: some of those dtypes cannot be copied otherwise.
        data = data.view(torch.uint8) if item == 1 else data
        elements = torch.empty(data.shape, dtype=data.dtype, device="cpu").copy_(data)
        return xxh3_128(elements.reshape(-1).view(torch.uint8).numpy())


def _samples(data: torch.Tensor) -> torch.Tensor:
    """Gather bytes of a large tensor, where only its shape decides; one copy from its device."""
    if not (data.is_complex() or data.is_neg()):
        # Integers of the same size: some of the other dtypes cannot be indexed.
        data = data.view(_INTEGERS[data.element_size()])
    run = SAMPLE_BYTES // data.element_size()
    starts = torch.arange(SAMPLES, dtype=torch.int64, device=data.device)
    starts = starts * (data.numel() - run) // (SAMPLES - 1)
    within = torch.arange(run, dtype=torch.int64, device=data.device)
    positions = (starts[:, None] + within).reshape(-1)
    if data.is_contiguous():
        found = data.reshape(-1)[positions]
    else:  # by coordinates, so that no copy of the whole is needed
        found = data[torch.unravel_index(positions, data.shape)]
    return found.resolve_conj().resolve_neg().cpu().view(torch.uint8)


def local_tensor(value: torch.Tensor | Shard, path: Path) -> LocalTensor:
    """Describe a tensor, a DTensor, a ShardedTensor or a `Shard`; call it in `ordinary_torch`.

    Raises:
        StateError: it has no plain elements to save (sparse, quantized, nested, meta, partial …),
            no memory of its own (fake, wrapped), or does not lie in its tensor; or its path
            cannot be written.
    """
    path_text(path)  # fails here, rather than at the commit; and before a text names it
    if isinstance(value, Shard):
        return _given_shard(value, path)
    if isinstance(value, ShardedTensor):
        return _sharded_tensor(value, path)
    check_dense(value, path)
    dtype, shape = _dtype_name(value.dtype, path), tuple(value.shape)
    if isinstance(value, DTensor):
        data, boxes, places = local_part(value, path)
        tensor = _tensor(path, dtype, shape)
        parts = tuple((data[at.slices()], box) for box, at in zip(boxes, places, strict=True))
        parts = ((data, boxes[0]),) if len(boxes) == 1 else parts
        tie = _tie_key(data, tensor, (boxes, value.device_mesh))
        return LocalTensor(tensor, data, parts, tie, False, _address_of(data))
    data = own_memory(value, path)
    tensor = _tensor(path, dtype, shape)
    tie = _tie_key(data, tensor, None)
    return LocalTensor(tensor, data, (), tie, True, _address_of(data))


def local_tensors(found: Mapping[Path, torch.Tensor | Shard]) -> dict[Path, LocalTensor]:
    """`local_tensor` of each, of which there are many: ordinary ones take no further call.

    In a thread for which nothing is set, as a worker is, ordinary ones need no `ordinary_torch`.
    """
    global _tensors
    if len(_tensors) > TENSORS_MAX:
        _tensors = {}
    known, result, odd = _tensors, dict[Path, LocalTensor](), list[Path]()
    is_set = (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_inference_mode_enabled()
    )
    value: Any
    for path, value in found.items():
        try:
            # The checks of `check_dense` and `own_memory`, as an ordinary tensor passes them.
            is_odd = (
                is_set
                or type(value) not in ORDINARY
                or value.layout is not torch.strided
                or not ((is_host := value.is_cpu) or value.is_cuda)
                or not value.is_contiguous()
                or value.is_nested
                or not (dtype := _REAL.get(value.dtype, ""))
                or not (address := value.data_ptr())
                or value.is_neg()
            )
        except RuntimeError:  # it has no memory of its own: it is within a torch.func transform
            is_odd = True
        if not is_odd:
            data, shape, tensor = value.detach(), value.shape, known.get(path, _NONE)
            storage = data.untyped_storage()
            is_new = tensor.shape != shape or tensor.dtype != dtype
            is_odd = address + data.nbytes > storage.data_ptr() + storage.nbytes()
        if is_odd or (is_new and len(shape) > DIMENSIONS_MAX):
            result[path] = _LATER
            odd.append(path)  # `local_tensor` says what is wrong, if anything is
            continue
        if is_new:
            path_text(path)  # fails here, rather than at the commit
            tensor = known[path] = Tensor(path, dtype, tuple(shape))
        shape = tensor.shape
        # What `_tie_key` returns of it.
        tie = (is_host or data.device, address, shape, None, dtype, shape, None, _AS_IT_IS)
        local = (tensor, data, (), tie, True, address if is_host else 0)
        result[path] = _new_tuple(LocalTensor, local)  # as LocalTensor(…), without a call of Python
    if odd:
        with ordinary_torch():
            for path in odd:
                result[path] = local_tensor(found[path], path)
    return result


# Most tensors are those of the save before, and then one object: what is equal is seen at once. The
# path of each can be written.
_tensors: dict[Path, Tensor] = {}
_NONE = Tensor((), "", (-1,))
_LATER = LocalTensor(_NONE, torch.empty(0, device="cpu", dtype=torch.uint8), (), None, True)
_AS_IT_IS = (False, False)
TENSORS_MAX = 1 << 16
_new_tuple = tuple.__new__


def _given_shard(value: Shard, path: Path) -> LocalTensor:
    if isinstance(value, Shards):
        first = Shard(value.data, value.shape, offset=value.offset)
        each = [_given_shard(one, path) for one in (first, *value.more)]
        held = tuple(part for one in each for part in one.boxed)
        nothing = torch.empty(0, dtype=value.data.dtype, device="cpu")
        return LocalTensor(each[0].tensor, nothing, held, None, False)
    check_shard(value, path)
    check_dense(value.data, path)
    data = own_memory(value.data, path)
    shape = tuple(map(operator.index, value.shape))
    tensor = _tensor(path, _dtype_name(data.dtype, path), shape)
    tie = _tie_key(data, tensor, (value.offset and tuple(value.offset), value.start))
    parts = tuple(parts_of(value, data))
    return LocalTensor(tensor, data, parts, tie, False, _address_of(data))


def _sharded_tensor(value: ShardedTensor, path: Path) -> LocalTensor:
    """Describe torch's older kind of sharded tensor: it may hold several boxes, each in memory."""
    form = value.metadata()
    dtype = _dtype_name(form.tensor_properties.dtype, path)
    tensor = _tensor(path, dtype, tuple(form.size))
    parts = []
    for shard in value.local_shards():
        check_dense(shard.tensor, path)
        data = own_memory(shard.tensor, path)
        parts.append((data, Box(tuple(shard.metadata.shard_offsets), tuple(data.shape))))
    if len(parts) > HELD_BOXES_MAX:
        raise StateError(
            f"{dotted(path)} is a ShardedTensor with {len(parts)} shards on this rank; expected at "
            f"most {HELD_BOXES_MAX}. Use fewer, larger shards"
        )
    keys = tuple(_tie_key(data, tensor, box) for data, box in parts)
    tie = keys if keys and None not in keys else None
    none = torch.empty(0, dtype=TORCH_DTYPES[dtype], device="cpu")
    data = parts[0][0] if len(parts) == 1 else none
    return LocalTensor(tensor, data, tuple(parts), tie, plain=False)


def _tensor(path: Path, dtype: str, shape: Shape) -> Tensor:
    tensor = Tensor(path, dtype, shape)
    known = _tensors.get(path)
    if known == tensor:
        return known
    if 0 in shape and spanned_bytes(dtype, shape) > TENSOR_BYTES_MAX:
        raise StateError(
            f"{dotted(path)} has no elements, but its shape {list(shape)!s:.80} spans 2^63 bytes "
            "or more; give it a smaller shape, or leave it out"
        )
    _tensors[path] = tensor
    return tensor


def _address_of(data: torch.Tensor) -> int:
    straight = data.is_cpu and data.is_contiguous() and not (data.is_conj() or data.is_neg())
    return data.data_ptr() if straight else 0


def mesh_of(value: object) -> dict[str, list[int] | list[str]] | None:
    """Describe the device mesh of a DTensor, for people."""
    if not isinstance(value, DTensor):
        return None
    mesh = value.device_mesh
    names = mesh.mesh_dim_names or [f"dim_{i}" for i in range(mesh.ndim)]
    return {"shape": list(mesh.mesh.shape), "names": list(names)}


def _dtype_name(dtype: torch.dtype, path: Path) -> str:
    if dtype not in DTYPE_NAMES:
        raise StateError(
            f"{dotted(path)} has dtype {dtype}; expected one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPE_NAMES)}"
        )
    return DTYPE_NAMES[dtype]


def fits(tensor: Any, wanted: Tensor) -> bool:
    """Whether something that stands in a state can be filled as it is."""
    if not isinstance(tensor, TENSORS) or tuple(tensor.shape) != wanted.shape:
        return False
    dtype = TORCH_DTYPES[wanted.dtype]
    if isinstance(tensor, ShardedTensor):
        return tensor.metadata().tensor_properties.dtype == dtype
    data = tensor.data if isinstance(tensor, Shard) else tensor
    return data.dtype == dtype and (data.is_contiguous() or not spread(data)[1])


def _tie_key(data: torch.Tensor, tensor: Tensor, where: object) -> TieKey | None:
    """Return what is equal for two names of one memory, which is the same part of both."""
    # Empty tensors share data_ptr 0, and expanded ones share memory within themselves.
    if not data.numel():
        return None
    shape, strides = tuple(data.shape), None if data.is_contiguous() else data.stride()
    place = (data.is_cpu or data.device, data.data_ptr(), shape, strides)
    return (*place, tensor.dtype, tensor.shape, where, (data.is_conj(), data.is_neg()))
