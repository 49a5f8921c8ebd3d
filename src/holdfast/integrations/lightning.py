"""Lightning: a `CheckpointIO`, and strategies that save all ranks' shards in one commit.

docs/frameworks/lightning.md says how to use them; `fabric` has those of Lightning Fabric.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..data.random_state import RandomState
from ..errors import OptionError, StateError
from ..loading.load import load
from ..loading.opening import open as open_checkpoint
from ..state.value import Value
from .adapter import MARK, Hook, check_mark, is_committed, known_version, mark
from .saves import Saves

NAME = "lightning"
VERSION = known_version(NAME, "2.5.0", "2.6.6")

from lightning.fabric.plugins.io import TorchCheckpointIO  # type: ignore[import-not-found] # noqa
from lightning.pytorch import Callback  # type: ignore[import-not-found] # noqa: E402
from lightning.pytorch import strategies  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # type: ignore # noqa: E402
from lightning.pytorch.core.optimizer import LightningOptimizer  # type: ignore # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus  # type: ignore # noqa: E402

_SingleDevice: Any = strategies.SingleDeviceStrategy
_DDP: Any = strategies.DDPStrategy
_FSDP: Any = strategies.FSDPStrategy
_ModelParallel: Any = strategies.ModelParallelStrategy
Path = str | os.PathLike[str]
MODEL, OPTIMIZERS, RANDOM, REST = "model", "optimizers", "random", "lightning"


class HoldfastCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """Saves the checkpoints of strategies that gather them on rank 0: one device, and DDP.

    Give it as ``Trainer(plugins=[HoldfastCheckpointIO()])`` or ``Fabric(plugins=…)``. Lightning's
    own checkpoints can be resumed from; what is saved from then on is holdfast's.

    Args:
        stage: "eager": saves go on while training does, from a copy; "sync": training waits, and a
            failed save raises. Lightning gives copies of optimizer states, so there is no "lazy".
        codec, options: as for `holdfast.save`.

    Example:
        ``trainer = Trainer(plugins=[HoldfastCheckpointIO()])``
    """

    def __init__(self, *, stage: str = "eager", codec: Any = "raw", options: Any = None) -> None:
        """Prepare; nothing is written before the first save."""
        super().__init__()
        if stage == "lazy":
            raise OptionError(
                "stage is 'lazy'; expected one of eager, sync. The strategies have it"
            )
        self._saves = Saves(stage=stage, codec=codec, options=options, group="alone")
        announce("checkpoints of rank 0 (CheckpointIO)")
        link_when_durable()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Save what Lightning has gathered on rank 0."""
        refuse(storage_options)
        state: dict[str, Any] = mark(NAME, VERSION)
        rest = dict(checkpoint)
        if "state_dict" in rest:
            state[MODEL] = rest.pop("state_dict")
        if "optimizer_states" in rest:
            state[OPTIMIZERS] = dict(enumerate(rest.pop("optimizer_states")))
        state[REST] = rest
        place = self._saves.place_for(path)
        self._saves.save(state, path, place=place)

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint of holdfast, or one of Lightning's own."""
        self._saves.wait()
        if not is_committed(path):
            more = {} if map_location is None else {"map_location": map_location}
            found: dict[str, Any] = super().load_checkpoint(path, **more, **asked(weights_only))
            return found
        check_mark(path, NAME)
        state = open_checkpoint(path).state(exclude=MARK)
        if RANDOM in state:  # optimizers by the names of parameters, and not by numbers
            raise OptionError(
                f"a strategy of holdfast saved {path}; resume with that, not a plugin"
            )
        result: dict[str, Any] = state.get(REST, {})
        if MODEL in state:
            result["state_dict"] = state[MODEL]
        if OPTIMIZERS in state:
            result["optimizer_states"] = [state[OPTIMIZERS][n] for n in sorted(state[OPTIMIZERS])]
        return result

    def remove_checkpoint(self, path: Path) -> None:
        """Delete a checkpoint, when what was saved before is durable."""
        self._saves.delete(path)

    def teardown(self) -> None:
        """Wait for the save in flight.

        Raises:
            HoldfastError: the last save failed.
        """
        self._saves.close()


class HoldfastRandomState(Callback):  # type: ignore[misc]
    """Saves and restores the random numbers of all ranks, with any strategy and plugin.

    The strategies of holdfast do so themselves; `HoldfastCheckpointIO` sees rank 0 alone.

    Example:
        ``Trainer(plugins=[HoldfastCheckpointIO()], callbacks=[HoldfastRandomState()])``
    """

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None  # restored before the first batch

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks; all of them call it together, as Lightning does."""
        own = RandomState().state_dict()
        if not dist.is_initialized():
            return own
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own["ranks"])
        return own | {"ranks": {rank: state for part in parts for rank, state in part.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until the first batch: a loader draws when it begins."""
        self._saved = state_dict

    def on_train_batch_start(self, *_: Any) -> None:
        """Restore this rank's."""
        if self._saved is not None:
            RandomState().load_state_dict(self._saved)
            self._saved = None


class _HoldfastStrategy:
    """Saves the module, its optimizers and random numbers of all ranks, and loads them in place."""

    _lists = True  # whether the module lists its tensors without gathering them

    def __init__(
        self, *args: Any, stage: str = "eager", codec: Any = "raw", options: Any = None, **more: Any
    ) -> None:
        self._saves = Saves(stage=stage, codec=codec, options=options)
        self._listed: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None  # restored before the first batch
        self._is_in_place = False  # whether the checkpoint that was loaded last is
        super().__init__(*args, **more)
        check_alone(self, getattr(self, "_checkpoint_io", None))
        announce(f"checkpoints of all ranks ({type(self).__name__})")
        link_when_durable()

    @property
    def checkpoint_io(self: Any) -> Any:
        """Return Lightning's own, which loads what holdfast has not saved."""
        return super().checkpoint_io  # type: ignore[misc]

    @checkpoint_io.setter
    def checkpoint_io(self: Any, io: Any) -> None:
        check_alone(self, io)
        super(_HoldfastStrategy, type(self)).checkpoint_io.fset(self, io)  # type: ignore[misc]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: module and optimizers are filled where they are."""
        return True

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """Return the module's own tensors, each rank its shards, for hooks to look at."""
        self._listed = dict(self.lightning_module.state_dict()) if self._lists else {}
        return dict(self._listed)

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return the optimizer itself: its state is saved where it is."""
        return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

    def save_checkpoint(
        self: Any, checkpoint: dict[str, Any], filepath: Path, storage_options: Any = None
    ) -> None:
        """Save one commit: module, optimizers, random numbers, and rank 0's view of the rest."""
        refuse(storage_options)
        rest = dict(checkpoint)
        self._check_tensors(rest.pop("state_dict", self._listed))
        state: dict[str, Any] = mark(NAME, VERSION) | {MODEL: self.model}
        if "optimizer_states" in rest:
            state[OPTIMIZERS] = dict(enumerate(rest.pop("optimizer_states")))
            state[RANDOM] = RandomState()
        # What only looks alike on all ranks, such as timers, is rank 0's, as Lightning has it.
        if kept := {k: v for k, v in rest.items() if self.global_rank == 0 or is_stateful(v)}:
            state[REST] = kept
        told = None
        if self.global_rank == 0:
            told = os.fspath(filepath), self._saves.place_for(filepath)
        path, place = self.broadcast(told)
        now = self.lightning_module.trainer.state.status != TrainerStatus.RUNNING
        self._saves.save(state, path, place=place, now=now)

    def load_checkpoint(
        self: Any, checkpoint_path: Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill module and optimizers in place, on any number of ranks; return the rest."""
        self._saves.wait()
        told = (checkpoint_path, is_committed(checkpoint_path)) if self.global_rank == 0 else None
        path, self._is_in_place = self.broadcast(told)
        if not self._is_in_place:
            stock = super().load_checkpoint  # type: ignore[misc]
            found: dict[str, Any] = stock(path, **asked(weights_only))
            return found
        check_mark(path, NAME)
        into: dict[str, Any] = {MARK: Value(), MODEL: self.model, REST: Value()}
        is_fit = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if is_fit and self.optimizers:
            into[OPTIMIZERS] = dict(enumerate(self.optimizers))
        has_random = any(name.startswith(f"{RANDOM}.") for name in open_checkpoint(path).names())
        if is_fit and has_random:
            into[RANDOM] = Value()
        load(path, into, strict=self.lightning_module.strict_loading, partial=not is_fit)
        self._random = into.get(RANDOM)
        rest: dict[str, Any] = into[REST]
        return rest | {"optimizer_states": []} if OPTIMIZERS in into else rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing when the module is filled already."""
        if not self._is_in_place:
            super().load_model_state_dict(checkpoint, strict=strict)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing when the optimizers are filled already."""
        if not self._is_in_place:
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Restore the random numbers: what a loader draws when it begins is drawn by now."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if self._random is not None:
            RandomState().load_state_dict(self._random)
            self._random = None

    def remove_checkpoint(self: Any, filepath: Path) -> None:
        """Delete a checkpoint, when what was saved before is durable."""
        if self.global_rank == 0:
            self._saves.delete(filepath)

    def teardown(self) -> None:
        """Wait for the save in flight.

        Raises:
            HoldfastError: the last save failed.
        """
        try:
            self._saves.close()
        finally:
            super().teardown()  # type: ignore[misc]

    def _check_tensors(self, given: Mapping[str, Any]) -> None:
        """Check that no hook has changed what is saved of the module.

        Raises:
            StateError: one has.
        """
        here = self._listed
        changed = [name for name in {**here, **given} if given.get(name) is not here.get(name)]
        if changed:
            raise StateError(
                f"a hook changed checkpoint['state_dict'] ({', '.join(changed[:3])}), but "
                f"{type(self).__name__} saves the module as it is. Change the module in the hook, "
                "or use HoldfastCheckpointIO where one rank gathers the checkpoint"
            )


class HoldfastSingleDeviceStrategy(_HoldfastStrategy, _SingleDevice):  # type: ignore[misc]
    """Lightning's SingleDeviceStrategy, saving through holdfast.

    Args:
        stage, codec, options: as for `holdfast.save_async`; "sync" waits for each save.
        args, more: as for Lightning's strategy.

    Example:
        ``Trainer(strategy=HoldfastSingleDeviceStrategy(device="cuda:0"))``
    """


class HoldfastDDPStrategy(_HoldfastStrategy, _DDP):  # type: ignore[misc]
    """Lightning's DDPStrategy, saving through holdfast: all ranks write.

    Args:
        stage, codec, options: as for `holdfast.save_async`; "sync" waits for each save.
        args, more: as for Lightning's strategy.

    Example:
        ``Trainer(strategy=HoldfastDDPStrategy())``
    """


class HoldfastFSDPStrategy(_HoldfastStrategy, _FSDP):  # type: ignore[misc]
    """Lightning's FSDPStrategy (FSDP1), saving shards through holdfast.

    Args:
        stage, codec, options: as for `holdfast.save_async`; "sync" waits for each save.
        args, more: as for Lightning's strategy; ``state_dict_type`` has no effect on saves.

    Example:
        ``Trainer(strategy=HoldfastFSDPStrategy())``
    """

    _lists = False


class HoldfastModelParallelStrategy(_HoldfastStrategy, _ModelParallel):  # type: ignore[misc]
    """Lightning's ModelParallelStrategy (FSDP2, tensor parallel), saving shards through holdfast.

    Args:
        stage, codec, options: as for `holdfast.save_async`; "sync" waits for each save.
        args, more: as for Lightning's strategy; ``save_distributed_checkpoint`` has no effect.

    Example:
        ``Trainer(strategy=HoldfastModelParallelStrategy(data_parallel_size=2))``
    """


def check_alone(strategy: Any, io: Any) -> None:
    """Check that a strategy of holdfast has no plugin of holdfast's beside it.

    Raises:
        OptionError: it has.
    """
    if isinstance(io, HoldfastCheckpointIO):
        raise OptionError(
            f"two integrations save for one program: {type(strategy).__name__} and "
            "HoldfastCheckpointIO. Leave HoldfastCheckpointIO out"
        )


def asked(weights_only: bool | None) -> dict[str, bool]:
    """Return an argument that Lightning has since 2.6, where it is given."""
    return {} if weights_only is None else {"weights_only": weights_only}


def is_stateful(value: Any) -> bool:
    """Return whether each rank has its own part of a value, such as a `DataState`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def refuse(storage_options: Any) -> None:
    """Refuse options of Lightning's storage.

    Raises:
        OptionError: there are any.
    """
    if storage_options is not None:
        raise OptionError(
            "storage_options is given; expected None. holdfast takes its options when its plugin "
            "or strategy is created: options=holdfast.Options(…)"
        )


def announce(what: str) -> None:
    """Say once in the log what is active."""
    if what not in _announced:
        _announced.add(what)
        Hook(NAME, VERSION, what)


_announced: set[str] = set()


def link_when_durable() -> None:
    """Let ``save_last="link"`` wait for the save that its link leads to; say so in the log.

    Lightning makes the link when a save returns, which is too early for one in the background.
    """
    stock = ModelCheckpoint._link_checkpoint
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        strategy = trainer.strategy
        saves = getattr(strategy, "_saves", None) or getattr(strategy.checkpoint_io, "_saves", None)
        if not isinstance(saves, Saves):
            stock(trainer, filepath, linkpath)
            return
        saves.wait()  # all ranks
        if trainer.is_global_zero:
            saves.link(filepath, linkpath)
        strategy.barrier()

    ours = [(ModelCheckpoint, "_link_checkpoint", staticmethod(_link_checkpoint))]
    Hook(NAME, VERSION, "links of ModelCheckpoint", ours)
