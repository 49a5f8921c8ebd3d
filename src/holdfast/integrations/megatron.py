"""Megatron-Core's `dist_checkpointing`: its `save` and `load`, in one commit for all ranks.

`hook` puts strategies into Megatron's registry. They take its ShardedTensors as boxes, its
ShardedObjects and the common state as values. Megatron's own checks and its wrappers stay.
"""

import contextlib
import functools
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..codecs.base import Codec
from ..errors import CorruptError, OptionError, StateError, shown
from ..format.names import dotted
from ..format.values import encode_value
from ..group.phase import find_group
from ..layout import Path
from ..loading.checkpoint import Checkpoint
from ..loading.load import load
from ..options import Options, options_of
from ..saving.handle import SaveHandle
from ..saving.save import save
from ..state.shard import Shard, Shards
from ..state.tensors import TORCH_DTYPES
from ..state.tree import flatten
from ..state.value import Value
from .adapter import Hook, check_mark, is_committed, known_version, mark, module
from .begin import begin

NAME, PACKAGE = "megatron", "megatron-core"
OLDEST, NEWEST_TESTED = "0.16.0", "0.16.1"
BACKEND = "holdfast"  # in Megatron's metadata.json: without the hook, its load says that it lacks
FOLDER = "holdfast"  # of a checkpoint's directory; Megatron writes metadata.json beside it
POLL_S = 0.05

Key = tuple[str, tuple[int, ...]]  # of a ShardedTensor: its name, and where it begins


def hook(
    *,
    pickles: bool = False,
    codec: "str | Codec" = "raw",
    options: Options | None = None,
) -> Hook:
    """Let Megatron-Core's ``dist_checkpointing`` save and load through holdfast.

    Call it by ``install("megatron")``, before the first save or load. Checkpoints of the format
    ``torch_dist`` are still loaded, by Megatron.

    Args:
        pickles: store what is no plain value or tensor as torch.save writes it: objects in the
            common state, such as ``args``, and in ShardedObjects. They are read again with
            ``weights_only=True``, so only by classes that Megatron allows. False: they are refused.
        codec, options: as for `holdfast.save`.

    Raises:
        ImportError: Megatron-Core is not installed; the text has the command.
        OptionError: an untested version of it.
    """
    version = known_version(PACKAGE, OLDEST, NEWEST_TESTED, NAME)
    strategies = module("megatron.core.dist_checkpointing.strategies.torch", NAME)
    base = module("megatron.core.dist_checkpointing.strategies.base", NAME)
    common = module("megatron.core.dist_checkpointing.strategies.common", NAME)
    stock = strategies.register_default_torch_strategies
    writer = _Writer(version, pickles=pickles, codec=codec, options=options_of(options))
    save_sharded, load_sharded = _sharded(strategies, writer)
    save_common, load_common = _common(common, writer)

    def register() -> None:
        """Register Megatron's strategies, and ours in place of those that save."""
        stock()
        action = base.StrategyAction
        base.register_default_strategy(action.SAVE_SHARDED, "torch_dist", 1, save_sharded)
        base.register_default_strategy(action.SAVE_SHARDED, BACKEND, 1, save_sharded)
        base.register_default_strategy(action.LOAD_SHARDED, BACKEND, 1, load_sharded)
        base.register_default_strategy(action.SAVE_COMMON, "torch", 1, save_common)
        base.register_default_strategy(action.LOAD_COMMON, "torch", 1, load_common)

    what = "dist_checkpointing.save and load"
    replaced = [(strategies, "register_default_torch_strategies", register)]
    return _Registered(NAME, version, what, replaced, common.register_default_common_strategies)


class _Registered(Hook):
    """The active strategies."""

    def __init__(self, *arguments: Any) -> None:
        *given, self._stock_common = arguments
        super().__init__(*given)

    def remove(self) -> None:
        """Give Megatron its own strategies back."""
        super().remove()
        self._stock_common()


class _Writer:
    """Saves what Megatron gives in two calls, the common state and the sharded one, as one."""

    def __init__(
        self, version: str, *, pickles: bool, codec: "str | Codec", options: Options
    ) -> None:
        self._mark = mark(NAME, version)
        self._pickles, self._codec, self._options = pickles, codec, options
        self.common: Mapping[Any, Any] | None = None

    def state(self, sharded: Any) -> dict[str, Any]:
        """Return what is saved: of replicas the main one alone, as Megatron does."""
        mapping = module("megatron.core.dist_checkpointing.mapping", NAME)
        boxes: dict[str, list[Shard]] = {}
        objects: dict[str, Any] = {}
        for value in _leaves(sharded):
            if not mapping.is_main_replica(value.replica_id):
                continue
            if isinstance(value, mapping.ShardedTensor):
                boxes.setdefault(value.key, []).append(_box_of(value, value.data))
            else:
                objects[value.unique_key] = self._object(value.data, value.key)
        common = self._object(dict(self.common or {}), "the common state")
        self.common = None
        tensors = {key: _joined(found) for key, found in boxes.items()}
        parts = {"tensors": tensors, "objects": objects}  # an empty dict would be a value
        given = {name: part for name, part in parts.items() if part}
        return {**self._mark, **given, "common": common}

    def _object(self, value: Any, name: str) -> "_Whole | torch.Tensor":
        try:
            for path, leaf in flatten({"value": value}).objects.items():
                _check_plain(leaf, path)
            return _Whole(value)
        except StateError as error:
            if not self._pickles:
                raise StateError(
                    f"{name} has a value that is not plain: {error}. To store it as torch.save "
                    'writes it, call install("megatron", pickles=True)'
                ) from error
        stream = io.BytesIO()
        torch.save(value, stream)
        return torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)

    def save(self, sharded: Any, place: str) -> None:
        """Save; return when it is durable."""
        codec, options = self._codec, self._options
        save(self.state(sharded), place, codec=codec, replace=True, options=options)

    def start(self, sharded: Any, place: str) -> SaveHandle:
        """Copy, and save the copy in the background."""
        state, ranks = self.state(sharded), find_group(None, writing=True)
        codec, options = self._codec, self._options
        handle = begin(state, place, ranks, codec=codec, options=options)
        handle.is_given = True
        return handle


class _Whole:
    """A value of any form: it is saved as it is, and becomes whatever was saved."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved."""
        self.value = state["value"]


def _check_plain(leaf: Any, path: Path) -> None:
    """Check that a value comes back as what it is."""
    text = json.dumps(encode_value(leaf, path))
    if '"$enum"' in text or '"$dataclass"' in text:
        raise StateError(f"{dotted(path[1:])} has an enumeration or a dataclass in it")


def _leaves(tree: Any) -> Iterator[Any]:
    nested = module("megatron.core.dist_checkpointing.dict_utils", NAME).nested_values
    yield from nested(tree)


def _box_of(value: Any, data: torch.Tensor) -> Shard:
    """Return a ShardedTensor as a box; axes that Megatron prepends have the length 1 in it."""
    shape = (1,) * value.prepend_axis_num + tuple(value.local_shape)
    return Shard(data.detach().view(shape), value.global_shape, offset=value.global_offset)


def _joined(boxes: list[Shard]) -> Shard:
    """Return boxes of one tensor as one leaf."""
    first, *more = boxes
    if not more:
        return first
    return Shards(first.data, first.shape, offset=first.offset, more=tuple(more))


def _sharded(strategies: Any, writer: _Writer) -> tuple[Any, Any]:
    """Make the strategies that save and load the sharded part."""

    class HoldfastSaveStrategy(strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Saves ShardedTensors and ShardedObjects, with the common state."""

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            """Save, and return when it is durable."""
            writer.save(sharded_state_dict, os.path.join(os.path.abspath(checkpoint_dir), FOLDER))

        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            """Copy; what is returned is done when the copy is durable."""
            place = os.path.join(os.path.abspath(checkpoint_dir), FOLDER)
            handle = writer.start(sharded_state_dict, place)
            descriptor, mark_path = tempfile.mkstemp(prefix="holdfast-async-")
            os.close(descriptor)
            handle.add_done_callback(lambda _: _remove(mark_path))
            arguments = (mark_path, os.getpid())
            return strategies.AsyncRequest(_wait_until_gone, arguments, [handle.result])

    class HoldfastLoadStrategy(strategies.TorchDistLoadShardedStrategy):  # type: ignore[misc]
        """Loads ShardedTensors and ShardedObjects of any other layout."""

        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            """Fill a sharded state dict."""
            return _load(sharded_state_dict, os.path.join(checkpoint_dir, FOLDER))

        def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:
            """Describe the tensors of a checkpoint."""
            return _tensors_in(os.path.join(checkpoint_dir, FOLDER))

        def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
            """Describe the tensors and objects of a checkpoint."""
            place = os.path.join(checkpoint_dir, FOLDER)
            mapping = module("megatron.core.dist_checkpointing.mapping", NAME)
            keys = _object_keys(Checkpoint(place))
            objects = {key: mapping.ShardedObject.empty_from_unique_key(key) for key in keys}
            return objects | _tensors_in(place)

        def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
            """Refuse: a committed checkpoint does not change."""
            raise OptionError(
                f"{checkpoint_dir} is a checkpoint of holdfast, which does not change; tensors "
                f"that begin with {shown(key_prefix)} cannot be removed. Save it without them"
            )

    return HoldfastSaveStrategy(BACKEND, 1), HoldfastLoadStrategy()


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _wait_until_gone(path: str, parent: int) -> None:
    """Wait, in a process of Megatron's, until the save that goes on in its parent has ended."""
    while os.path.exists(path):
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            return _remove(path)
        time.sleep(POLL_S)
    return None


def _common(common: Any, writer: _Writer) -> tuple[Any, Any]:
    """Make the strategies of the common state."""

    class HoldfastSaveCommon(common.TorchCommonSaveStrategy):  # type: ignore[misc]
        """Keeps the common state for the sharded save, which follows at once."""

        def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
            """Keep it."""
            writer.common = common_state_dict

    class HoldfastLoadCommon(common.TorchCommonLoadStrategy):  # type: ignore[misc]
        """Loads the common state from holdfast's checkpoint, where there is one."""

        def load_common(self, checkpoint_dir: Any) -> Any:
            """Load it."""
            place = os.path.join(checkpoint_dir, FOLDER)
            if not is_committed(place):
                return super().load_common(checkpoint_dir)
            check_mark(place, NAME)
            saved = Checkpoint(place)
            state: dict[str, Any] = {"common": _target_of(saved, "common")}
            load(place, state, partial=True, group="alone", include="common")
            return _value_of(state["common"], place)

    return HoldfastSaveCommon("torch", 1), HoldfastLoadCommon()


def _target_of(saved: Checkpoint, *path: str) -> Any:
    """Return what is filled with a value, or with the bytes of one that was pickled."""
    for name in saved.names():
        if saved.path_of(name) == path:
            return torch.empty(saved.info(name).shape, dtype=torch.uint8, device="cpu")
    return _Whole(Value())


def _value_of(found: Any, place: str) -> Any:
    if isinstance(found, _Whole):
        return found.value
    try:
        stream = io.BytesIO(found.numpy().tobytes())
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a pickle raises
        why = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
        raise CorruptError(f"an object of {place} cannot be unpickled: {why}") from error


def _load(sharded: Any, place: str) -> Any:
    """Fill a sharded state dict from a checkpoint; return it with values in its leaves."""
    check_mark(place, NAME)
    saved = Checkpoint(place)
    mapping = module("megatron.core.dist_checkpointing.mapping", NAME)
    shapes = _shapes_of(saved)
    boxes: dict[str, dict[Key, Shard]] = {}
    targets: dict[str, Any] = {}
    for value in _leaves(sharded):
        if isinstance(value, mapping.ShardedTensor):
            value.init_data("cpu")
            found = boxes.setdefault(value.key, {})
            box = _fitted(value, shapes.get(value.key))
            if box is not None:
                found.setdefault((value.key, tuple(value.global_offset)), box)
        else:
            targets[value.unique_key] = _target_of(saved, "objects", value.unique_key)
    tensors = {key: _joined([*found.values()]) for key, found in boxes.items() if found}
    parts = {"tensors": tensors, "objects": targets}
    state = {name: part for name, part in parts.items() if part}
    load(place, state, partial=True, cast=True)
    put = functools.partial(_put, boxes, targets, place, mapping)
    replace_leaves = module("megatron.core.dist_checkpointing.dict_utils", NAME)
    return replace_leaves.dict_list_map_inplace(put, sharded)


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
        if first.data_ptr() != value.data.data_ptr():  # it stands twice in the state
            value.data.copy_(first)
    return value.data


def _fitted(value: Any, shape: tuple[int, ...] | None) -> Shard | None:
    """Return the box to fill; where shapes may differ, what both have of it."""
    box = _box_of(value, value.data)
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


def _object_keys(saved: Checkpoint) -> list[str]:
    """Return the unique keys of the objects of a checkpoint."""
    paths = [saved.path_of(name) for name in [*saved.names(), *saved.objects()]]
    return [*dict.fromkeys(str(path[1]) for path in paths if path[0] == "objects")]


def _tensors_in(place: str) -> dict[str, Any]:
    """Return the tensors of a checkpoint as ShardedTensors without data."""
    mapping, saved = module("megatron.core.dist_checkpointing.mapping", NAME), Checkpoint(place)
    result = {}
    for name, path in _paths(saved, "tensors"):
        info = saved.info(name)
        empty = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
        result[path[1]] = mapping.ShardedTensor.from_rank_offsets(path[1], empty).without_data()
    return result
