"""Torch tensors ⇄ shards: dtypes, boxes of DTensors, ties.

Knows no names but the path it is given.
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .._core import xxh3_128
from ..errors import StateError
from ..format.names import dotted
from ..format.spec import DIMENSIONS_MAX
from ..layout import Box, Path, Shard, Tensor, whole

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

# Up to this size ranks compare every byte (counters, random states, statistics), above it samples:
# a part of another rank's tensor differs nearly everywhere.
COMPARED_BYTES_MAX = 64 << 10
SAMPLES, SAMPLE_BYTES = 66, 1 << 10

TieKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What this process holds of a global tensor.

    Attributes:
        shard: the box held; its shape is that of ``data`` and may be empty.
        data: the elements, in any strides, on any device.
        tie: equal for two names of one memory; None when that cannot be known.
        plain: whether it is an ordinary tensor, of which ranks may hold different versions.
    """

    shard: Shard
    data: torch.Tensor
    tie: TieKey | None
    plain: bool

    def digest(self) -> str | None:
        """Return a digest of an ordinary tensor, to compare ranks by; None for a DTensor.

        That of a large one is of evenly spread samples, the first and the last bytes among them.
        """
        if not self.plain:
            return None
        if self.shard.size_bytes > COMPARED_BYTES_MAX:
            return xxh3_128(_samples(self.data).numpy()).hex()
        # Single bytes as integers: some of those dtypes cannot be copied otherwise.
        data = self.data.view(torch.uint8) if self.data.element_size() == 1 else self.data
        elements = torch.empty(data.shape, dtype=data.dtype).copy_(data)
        return xxh3_128(elements.reshape(-1).view(torch.uint8).numpy()).hex()


def _samples(data: torch.Tensor) -> torch.Tensor:
    """Gather bytes of a large tensor, where only its shape decides; one copy from its device."""
    if not (data.is_complex() or data.is_neg()):
        # Integers of the same size: some of the other dtypes cannot be indexed.
        data = data.view(_INTEGERS[data.element_size()])
    run = SAMPLE_BYTES // data.element_size()
    starts = torch.arange(SAMPLES, device=data.device) * (data.numel() - run) // (SAMPLES - 1)
    positions = (starts[:, None] + torch.arange(run, device=data.device)).reshape(-1)
    if data.is_contiguous():
        found = data.reshape(-1)[positions]
    else:  # by coordinates, so that no copy of the whole is needed
        found = data[torch.unravel_index(positions, data.shape)]
    return found.resolve_conj().resolve_neg().cpu().view(torch.uint8)


def local_tensor(value: torch.Tensor, path: Path) -> LocalTensor:
    """Describe a tensor or DTensor.

    Raises:
        StateError: it has no plain elements to save (sparse, quantized, nested, meta, partial …).
    """
    _check_dense(value, path)
    mesh = None
    if isinstance(value, DTensor):
        tensor, box, mesh, data = _local_part(value, path)
    else:
        data, box = value.detach(), whole(value.shape)
        tensor = Tensor(path, _dtype_name(value, path), tuple(value.shape))
    if hasattr(data, "__tensor_flatten__"):
        kind = type(data).__name__
        raise StateError(
            f"{dotted(path)} is a {kind}, which wraps other tensors; save those instead"
        )
    _check_storage(data, path)
    tie = _tie_key(data, tensor, box, mesh)
    return LocalTensor(Shard(tensor, box), data, tie, plain=not isinstance(value, DTensor))


def mesh_of(value: torch.Tensor) -> dict[str, list[int] | list[str]] | None:
    """Describe the device mesh of a DTensor, for people."""
    if not isinstance(value, DTensor):
        return None
    mesh = value.device_mesh
    names = mesh.mesh_dim_names or [f"dim_{i}" for i in range(mesh.ndim)]
    return {"shape": list(mesh.mesh.shape), "names": list(names)}


def _local_part(value: DTensor, path: Path) -> tuple[Tensor, Box, object, torch.Tensor]:
    if any(isinstance(placement, Partial) for placement in value.placements):
        raise StateError(
            f"{dotted(path)} is a DTensor with a pending reduction ({value.placements}); "
            "redistribute it to Shard or Replicate first"
        )
    tensor = Tensor(path, _dtype_name(value, path), tuple(value.shape))
    data = value.to_local().detach()
    # The one place where DTensor tells where its shard lies, strided shards included.
    parts = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(parts) != 1 or tuple(parts[0].sizes) != tuple(data.shape):
        raise StateError(
            f"{dotted(path)} is a DTensor whose local part of shape {list(data.shape)} is not one "
            f"box of the global tensor ({value.placements}); redistribute it first"
        )
    box = Box(tuple(parts[0].offsets), tuple(parts[0].sizes))
    if value.numel() and not data.numel():
        box = Box((0,) * value.ndim, tuple(data.shape))
    return tensor, box, value.device_mesh, data


def _dtype_name(value: torch.Tensor, path: Path) -> str:
    if value.dtype not in DTYPE_NAMES:
        raise StateError(
            f"{dotted(path)} has dtype {value.dtype}; a checkpoint holds "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPE_NAMES)}"
        )
    return DTYPE_NAMES[value.dtype]


def _check_dense(value: torch.Tensor, path: Path) -> None:
    """Check that a tensor has elements one can count: some kinds do not even have a shape."""
    name = dotted(path)
    if isinstance(value, UninitializedTensorMixin):
        raise StateError(f"{name} belongs to a lazy module; run the module once to give it a shape")
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise StateError(f"{name} has layout {kind}; make it dense, or save its parts")
    if value.is_meta:
        raise StateError(f"{name} is on the meta device and has no elements; materialize it first")
    if value.ndim > DIMENSIONS_MAX:
        raise StateError(f"{name} has {value.ndim} dimensions; at most {DIMENSIONS_MAX}")


def _check_storage(data: torch.Tensor, path: Path) -> None:
    """Check that the elements are there: frameworks free the storage of a tensor they keep."""
    if not data.numel():
        return
    strides = zip(data.shape, data.stride(), strict=True)
    end = data.storage_offset() + sum((n - 1) * stride for n, stride in strides) + 1
    needed, held = end * data.element_size(), data.untyped_storage().nbytes()
    if held < needed:
        raise StateError(
            f"{dotted(path)} needs {needed} bytes of its storage, which holds {held}: its memory "
            "was freed (resize_(0)); give it back before the checkpoint, or leave the tensor out"
        )


def _tie_key(data: torch.Tensor, tensor: Tensor, box: Box, mesh: object) -> TieKey | None:
    # Empty tensors share data_ptr 0, and expanded ones share memory within themselves.
    if not data.numel():
        return None
    place = (data.device, data.untyped_storage().data_ptr(), data.storage_offset())
    bits = (data.is_conj(), data.is_neg())
    return (*place, tuple(data.shape), data.stride(), tensor.dtype, tensor.shape, box, mesh, bits)
