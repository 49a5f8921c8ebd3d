"""Megatron-Core's `dist_checkpointing`: its `save` and `load`, in one commit for all ranks.

`hook` puts strategies into Megatron's registry. They take its ShardedTensors as boxes, its
ShardedObjects and the common state as values. Megatron's own checks and its wrappers stay.
"""

import contextlib
import functools
import io
import json
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..codecs.base import Codec
from ..errors import HoldfastError, OptionError, StateError, shown
from ..format.names import dotted
from ..format.values import encode_value
from ..group.base import COORDINATOR
from ..group.phase import Phase, find_group
from ..layout import Path
from ..loading.checkpoint import Checkpoint
from ..options import Options, options_of
from ..saving.handle import SaveHandle
from ..saving.save import save
from ..state.shard import Shard
from ..state.tree import flatten
from ..stores.base import Store
from ..stores.url import absolute, open_store
from .adapter import Hook, is_committed, known_version, mark, module
from .begin import begin
from .megatron_load import (
    NAME,
    Whole,
    box_of,
    joined,
    leaves_of,
    load_common,
    load_state,
    object_keys,
    tensors_in,
)

PACKAGE = "megatron-core"
OLDEST, NEWEST_TESTED = "0.16.0", "0.16.1"
BACKEND = "holdfast"  # in Megatron's metadata.json: without the hook, its load says that it lacks
FOLDER = "holdfast"  # of a checkpoint's directory
WHOLE = "metadata.json"  # beside it: Megatron takes a directory that has it for a checkpoint
POLL_S = 0.05


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
    serialization = module("megatron.core.dist_checkpointing.serialization", NAME)
    queues = module("megatron.core.dist_checkpointing.strategies.async_utils", NAME)
    stock, stock_config = strategies.register_default_torch_strategies, serialization.save_config
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

    def save_config(config: Any, checkpoint_dir: Any) -> None:
        """Write metadata.json; with holdfast it is there: all ranks have seen to it."""
        if config.sharded_backend != BACKEND:
            stock_config(config, checkpoint_dir)

    what = "dist_checkpointing.save and load"
    replaced = [
        (strategies, "register_default_torch_strategies", register),
        (serialization, "save_config", save_config),
        (queues, "TemporalAsyncCaller", _caller(queues.TemporalAsyncCaller)),
    ]
    stock_common = common.register_default_common_strategies
    return _Registered(NAME, version, what, replaced, base.default_strategies, stock_common)


class _Registered(Hook):
    """The active strategies."""

    def __init__(self, *arguments: Any) -> None:
        *given, self._strategies, self._stock_common = arguments
        super().__init__(*given)

    def remove(self) -> None:
        """Give Megatron its own strategies back."""
        super().remove()
        for known in self._strategies.values():
            known.pop((BACKEND, 1), None)
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
        for value in leaves_of(sharded):
            if not mapping.is_main_replica(value.replica_id):
                continue
            if isinstance(value, mapping.ShardedTensor):
                boxes.setdefault(value.key, []).append(box_of(value, value.data))
            else:
                objects[value.unique_key] = self._object(value.data, value.key)
        common = self._object(dict(self.common or {}), "the common state")
        self.common = None
        tensors = {key: joined(found) for key, found in boxes.items()}
        parts = {"tensors": tensors, "objects": objects}  # an empty dict would be a value
        given = {name: part for name, part in parts.items() if part}
        return {**self._mark, **given, "common": common}

    def _object(self, value: Any, name: str) -> "Whole | torch.Tensor":
        try:
            for path, leaf in flatten({"value": value}).objects.items():
                _check_plain(leaf, path)
            return Whole(value)
        except StateError as error:
            if not self._pickles:
                raise StateError(
                    f"{name} has a value that is not plain: {error}. To store it as torch.save "
                    'writes it, call install("megatron", pickles=True)'
                ) from error
        stream = io.BytesIO()
        torch.save(value, stream)
        return torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)

    def save(self, sharded: Any, directory: str) -> None:
        """Save; return when it is durable."""
        codec, options, place = self._codec, self._options, os.path.join(directory, FOLDER)
        save(self.state(sharded), place, codec=codec, replace=True, options=options)
        mark_whole(directory)

    def start(self, sharded: Any, directory: str) -> SaveHandle:
        """Copy, and save the copy in the background."""
        state, ranks = self.state(sharded), find_group(None, writing=True)
        codec, options, place = self._codec, self._options, os.path.join(directory, FOLDER)
        handle = begin(state, place, ranks, codec=codec, options=options)
        handle.is_given = True
        return handle


def mark_whole(directory: str) -> None:
    """Write Megatron's metadata.json beside a commit, in one step, with all ranks.

    Megatron writes it on rank 0 alone, where others wait for it: a full disk would end training.

    Raises:
        StoreError, PeerError: it could not be written. Megatron does not find the checkpoint then.
    """
    ranks = find_group(None, writing=True)
    config = module("megatron.core.dist_checkpointing.core", NAME).CheckpointingConfig(BACKEND, 1)
    wanted = json.dumps(asdict(config)).encode()
    with Phase(ranks):
        store = open_store(directory)
        if ranks.rank != COORDINATOR or _is_there(store, wanted):
            return
        pending = f"{WHOLE}.{secrets.token_hex(8)}"
        store.prepare(pending, wanted)
        store.replace(pending, WHOLE)


def _is_there(store: Store, wanted: bytes) -> bool:
    return store.exists(WHOLE) and store.get(WHOLE, 1 << 20) == wanted


def _check_plain(leaf: Any, path: Path) -> None:
    """Check that a value comes back as what it is."""
    text = json.dumps(encode_value(leaf, path))
    if '"$enum"' in text or '"$dataclass"' in text:
        raise StateError(f"{dotted(path[1:])} has an enumeration or a dataclass in it")


def _sharded(strategies: Any, writer: _Writer) -> tuple[Any, Any]:
    """Make the strategies that save and load the sharded part."""

    class HoldfastSaveStrategy(strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Saves ShardedTensors and ShardedObjects, with the common state."""

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            """Save, and return when it is durable."""
            writer.save(sharded_state_dict, absolute(checkpoint_dir))

        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            """Copy; what is returned is done when the copy is durable."""
            directory = absolute(checkpoint_dir)
            handle = writer.start(sharded_state_dict, directory)

            def finish() -> None:
                handle.result()
                mark_whole(directory)

            return strategies.AsyncRequest(_Background(handle), (), [finish])

    class HoldfastLoadStrategy(strategies.TorchDistLoadShardedStrategy):  # type: ignore[misc]
        """Loads ShardedTensors and ShardedObjects of any other layout."""

        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            """Fill a sharded state dict."""
            return load_state(sharded_state_dict, os.path.join(checkpoint_dir, FOLDER))

        def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:
            """Describe the tensors of a checkpoint."""
            return tensors_in(os.path.join(checkpoint_dir, FOLDER))

        def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
            """Describe the tensors and objects of a checkpoint."""
            place = os.path.join(checkpoint_dir, FOLDER)
            mapping = module("megatron.core.dist_checkpointing.mapping", NAME)
            keys = object_keys(Checkpoint(place))
            objects = {key: mapping.ShardedObject.empty_from_unique_key(key) for key in keys}
            return objects | tensors_in(place)

        def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
            """Refuse: a committed checkpoint does not change."""
            raise OptionError(
                f"{checkpoint_dir} is a checkpoint of holdfast, which does not change; tensors "
                f"that begin with {shown(key_prefix)} cannot be removed. Save it without them"
            )

    return HoldfastSaveStrategy(BACKEND, 1), HoldfastLoadStrategy()


class _Background:
    """A save in the background, where Megatron expects a function and the process that runs it.

    In another process, which Megatron may spawn and others fork, it waits for a file to go.
    """

    def __init__(self, handle: SaveHandle) -> None:
        self._handle, self._parent = handle, os.getpid()
        descriptor, self._mark = tempfile.mkstemp(prefix="holdfast-async-")
        os.close(descriptor)
        handle.add_done_callback(lambda _: _remove(self._mark))

    def __call__(self) -> None:
        if os.getpid() == self._parent:
            self.join()
        else:
            _wait_until_gone(self._mark, self._parent)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_wait_until_gone, self._mark, self._parent)

    def is_alive(self) -> bool:
        """Whether the save goes on."""
        return not self._handle.done()

    def join(self) -> None:
        """Wait for the end of the save; what finishes it raises its error."""
        with contextlib.suppress(HoldfastError):
            self._handle.wait_done()

    def kill(self) -> None:
        """Do nothing: a save has a deadline of its own."""


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


def _caller(stock: Any) -> Any:
    """Return Megatron's caller, which no longer forks the training to wait for a save of ours.

    A fork copies the page tables of the training, which then takes a fault for each page.
    """

    class HoldfastAsyncCaller(stock):  # type: ignore[misc]
        def schedule_async_call(self, async_req: Any) -> None:
            if isinstance(async_req.async_fn, _Background):
                self.process, self.start_time = async_req.async_fn, time.time()
            else:
                super().schedule_async_call(async_req)

    return HoldfastAsyncCaller


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
            return load_common(place)

    return HoldfastSaveCommon("torch", 1), HoldfastLoadCommon()
