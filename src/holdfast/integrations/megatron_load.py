"""What a state of Megatron-Core is for holdfast, and how one is loaded. Knows no hook."""

import functools
import io
from bisect import bisect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import CorruptError
from ..loading.checkpoint import Checkpoint
from ..loading.load import load
from ..state.shard import Shard, Shards
from ..state.tensors import TORCH_DTYPES
from ..state.value import Value
from .adapter import check_mark, module

NAME = "megatron"

Key = tuple[str, tuple[int, ...]]  # of a ShardedTensor: its name, and where it begins


class Whole:
    """A value of any form: it is saved as it is, and becomes whatever was saved."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved."""
        self.value = state["value"]


def leaves_of(tree: Any) -> Iterator[Any]:
    nested = module("megatron.core.dist_checkpointing.dict_utils", NAME).nested_values
    yield from nested(tree)


def box_of(value: Any, data: torch.Tensor) -> Shard:
    """Return a ShardedTensor as a box; axes that Megatron prepends have the length 1 in it."""
    shape = (1,) * value.prepend_axis_num + tuple(value.local_shape)
    return Shard(data.detach().view(shape), value.global_shape, offset=value.global_offset)


def joined(boxes: list[Shard]) -> Shard:
    """Return boxes of one tensor as one leaf."""
    first, *more = boxes
    if not more:
        return first
    return Shards(first.data, first.shape, offset=first.offset, more=tuple(more))


def load_common(place: str) -> Any:
    """Return the common state of a checkpoint."""
    check_mark(place, NAME)
    saved = Checkpoint(place)
    state: dict[str, Any] = {"common": _target_of(saved, "common")}
    load(place, state, partial=True, group="alone", include="common")
    return _value_of(state["common"], place)


def _target_of(saved: Checkpoint, *path: str) -> Any:
    """Return what is filled with a value, or with the bytes of one that was pickled."""
    for name in saved.names():
        if saved.path_of(name) == path:
            return torch.empty(saved.info(name).shape, dtype=torch.uint8, device="cpu")
    return Whole(Value())


def _value_of(found: Any, place: str) -> Any:
    if isinstance(found, Whole):
        return found.value
    try:
        stream = io.BytesIO(found.numpy().tobytes())
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a pickle raises
        why = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
        raise CorruptError(f"an object of {place} cannot be unpickled: {why}") from error


def load_state(sharded: Any, place: str) -> Any:
    """Fill a sharded state dict from a checkpoint; return it with values in its leaves."""
    check_mark(place, NAME)
    saved = Checkpoint(place)
    mapping = module("megatron.core.dist_checkpointing.mapping", NAME)
    shapes = _shapes_of(saved)
    boxes: dict[str, dict[Key, Shard]] = {}
    targets: dict[str, Any] = {}
    memory = _Memory()
    # What may have another shape is filled in place, so it comes first.
    for value in sorted(leaves_of(sharded), key=lambda v: not _is_flexible(v)):
        if isinstance(value, mapping.ShardedTensor):
            value.init_data("cpu")
            found, key = boxes.setdefault(value.key, {}), (value.key, tuple(value.global_offset))
            box = _fitted(value, shapes.get(value.key))
            if box is None or key in found:
                continue
            if not memory.take(box.data) and not _is_flexible(value):
                own = torch.empty_like(box.data, dtype=box.data.dtype)
                box = Shard(own, box.shape, offset=box.offset)
            found[key] = box
        else:
            targets[value.unique_key] = _target_of(saved, "objects", value.unique_key)
    tensors = {key: joined([*found.values()]) for key, found in boxes.items() if found}
    parts = {"tensors": tensors, "objects": targets}
    state = {name: part for name, part in parts.items() if part}
    load(place, state, partial=True, cast=True)
    put = functools.partial(_put, boxes, targets, place, mapping)
    replaceleaves_of = module("megatron.core.dist_checkpointing.dict_utils", NAME)
    return replaceleaves_of.dict_list_map_inplace(put, sharded)


def _is_flexible(value: Any) -> bool:
    return bool(getattr(value, "allow_shape_mismatch", False))


class _Memory:
    """What is filled already: a master weight in float can be a view of its parameter."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # addresses in bytes, ascending

    def take(self, data: torch.Tensor) -> bool:
        """Return whether nothing else takes any of this memory; then it is taken."""
        if not data.numel():
            return True
        extents = zip(data.shape, data.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in extents)
        begin, end = data.data_ptr(), data.data_ptr() + elements * data.element_size()
        at = bisect(self._spans, (begin, end))
        before, behind = self._spans[at - 1 : at], self._spans[at : at + 1]
        if (at and before[0][1] > begin) or (behind and behind[0][0] < end):
            return False
        self._spans.insert(at, (begin, end))
        return True


def _put(
    boxes: dict[str, dict[Key, Shard]], objects: Any, place: str, mapping: Any, value: Any
) -> Any:
    """Return what stands in place of a leaf when it is loaded."""
    if isinstance(value, mapping.ShardedObject):
        return _value_of(objects[value.unique_key], place)
    if not isinstance(value, mapping.ShardedTensor):
        return value
    box = boxes[value.key].get((value.key, tuple(value.global_offset)))
    if box is not None and not value.allow_shape_mismatch:
        first = box.data.view(value.data.shape)
        if first.data_ptr() != value.data.data_ptr():  # it stands twice, or shares memory
            value.data.detach().copy_(first)
    return value.data


def _fitted(value: Any, shape: tuple[int, ...] | None) -> Shard | None:
    """Return the box to fill; where shapes may differ, what both have of it."""
    box = box_of(value, value.data)
    if not value.allow_shape_mismatch or shape is None or shape == tuple(value.global_shape):
        return box
    begins, inside = box.offset or (), []
    for at, size, limit in zip(begins, box.data.shape, shape, strict=True):
        inside.append(slice(0, max(0, min(size, limit - at))))
    data = box.data[tuple(inside)]
    return Shard(data, shape, offset=begins) if data.numel() else None


def _shapes_of(saved: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a checkpoint, by Megatron's keys."""
    return {path[1]: saved.info(name).shape for name, path in _paths(saved, "tensors")}


def _paths(saved: Checkpoint, below: str) -> Iterator[tuple[str, Any]]:
    for name in saved.names():
        path = saved.path_of(name)
        if path[0] == below:
            yield name, path


def object_keys(saved: Checkpoint) -> list[str]:
    """Return the unique keys of the objects of a checkpoint."""
    paths = [saved.path_of(name) for name in [*saved.names(), *saved.objects()]]
    return [*dict.fromkeys(str(path[1]) for path in paths if path[0] == "objects")]


def tensors_in(place: str) -> dict[str, Any]:
    """Return the tensors of a checkpoint as ShardedTensors without data."""
    mapping, saved = module("megatron.core.dist_checkpointing.mapping", NAME), Checkpoint(place)
    result = {}
    for name, path in _paths(saved, "tensors"):
        info = saved.info(name)
        empty = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
        result[path[1]] = mapping.ShardedTensor.from_rank_offsets(path[1], empty).without_data()
    return result
