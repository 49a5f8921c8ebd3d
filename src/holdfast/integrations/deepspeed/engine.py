"""DeepSpeed: an engine's `save_checkpoint` and `load_checkpoint`, in one commit for all ranks.

Float master weights and the optimizer's state are saved by the names of the model's parameters,
whatever ZeRO stage and number of ranks hold them, so that any other loads them. Which rank holds
what is known by `zero`, not here.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ...codecs.base import Codec
from ...data.random_state import RandomState
from ...errors import HoldfastError, OptionError, shown
from ...group.base import COORDINATOR
from ...group.phase import Phase, find_group
from ...loading.checkpoint import Checkpoint
from ...loading.load import load
from ...options import Options, options_of
from ...runs.retention import Keep
from ...saving.handle import SaveHandle
from ...saving.save import save
from ...state.tensors import TORCH_DTYPES
from ...state.value import Value
from ..adapter import MARK, Hook, check_mark, known_version, mark
from ..adapter import module as module_of
from ..begin import begin
from . import zero
from .tags import NAME, conclude, find, logging_of

if TYPE_CHECKING:
    from ...group.base import Group

logger = logging.getLogger("holdfast")

OLDEST, NEWEST_TESTED = "0.19.8", "0.19.8"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_STATE = "optimizer.state."


class Checkpoints:
    """How engines save and load: see `attach` for the arguments."""

    def __init__(
        self,
        *,
        stage: Literal["sync", "eager"] = "sync",
        keep: Keep | None = None,
        codec: "str | Codec" = "raw",
        options: Options | None = None,
    ) -> None:
        self.version = known_version(NAME, OLDEST, NEWEST_TESTED)
        if stage not in ("sync", "eager"):
            raise OptionError(f"stage is {shown(stage)}; expected one of sync, eager")
        if keep is not None and keep.metrics:
            raise OptionError(f"keep is {keep}; DeepSpeed's save_checkpoint is given no metrics")
        self._stage, self._keep, self._codec = stage, keep or Keep.all(), codec
        self._options = options_of(options)
        self.engine_class = module_of("deepspeed.runtime.engine", NAME).DeepSpeedEngine
        self._stock_load = self.engine_class.load_checkpoint
        self._handle: SaveHandle | None = None

    def save(
        self,
        engine: Any,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save an engine, as its own ``save_checkpoint`` would be called."""
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        place, ranks = os.path.join(os.path.abspath(save_dir), tag), find_group(None, writing=True)
        failure = self._failure()
        with _partitioned(engine):
            state = self._state(engine, dict(client_state or {}), exclude_frozen_parameters)
            state |= mark(NAME, self.version, latest=bool(save_latest))
            step, codec, options = engine.global_steps, self._codec, self._options
            if self._stage == "sync":
                save(state, place, step=step, codec=codec, replace=True, options=options)
                with Phase(ranks):
                    if ranks.rank == COORDINATOR:
                        conclude(place, self._keep, save_latest=save_latest)
            else:

                def after(_: object) -> None:
                    with logging_of(place):
                        if ranks.rank == COORDINATOR:
                            conclude(place, self._keep, save_latest=save_latest)

                how: dict[str, Any] = {"step": step, "codec": codec, "options": options}
                self._handle = begin(state, place, ranks, after=after, **how)
                self._handle.is_given = True
        if failure is not None:
            raise failure
        return True

    def wait(self) -> None:
        """Wait until the save in the background is durable.

        Raises:
            HoldfastError: it failed.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.result()

    def load(
        self,
        engine: Any,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load an engine, as its own ``load_checkpoint`` would be called."""
        ranks = find_group(None)
        if self._handle is not None:
            self._handle.wait_done()
        found = find(os.path.abspath(load_dir), tag, ranks)
        if found["kind"] == "none":
            logger.warning("nothing is loaded: %s holds no checkpoint and no file latest", load_dir)
            return None, None
        if found["kind"] == NAME:
            logger.info("%s is a checkpoint of DeepSpeed's own: it loads it", found["path"])
            arguments = (load_module_strict, load_optimizer_states, load_lr_scheduler_states)
            stock: tuple[str | None, dict[str, Any] | None] = self._stock_load(
                engine, load_dir, found["tag"], *arguments, load_module_only, custom_load_fn
            )
            return stock
        if custom_load_fn is not None:
            raise OptionError(
                f"custom_load_fn was given for {found['path']}, which holdfast loads by names; "
                "leave it out, or use holdfast.load with rename="
            )
        if load_module_only:
            chosen: dict[str, Any] = {"include": "model"}
        else:
            skipped = [] if load_optimizer_states else ["optimizer"]
            skipped += [] if load_lr_scheduler_states else ["engine.lr_scheduler"]
            chosen = {"exclude": tuple(skipped)}
        with _partitioned(engine):
            client = self._fill(engine, found["path"], chosen, load_module_strict, ranks)
        return found["path"], client

    def _state(
        self, engine: Any, client_state: dict[str, Any], exclude_frozen: bool
    ) -> dict[str, Any]:
        """Return what is saved of an engine."""
        zero.check_engine(engine)
        pieces, inner = zero.pieces_of(engine), zero.inner_of(engine)
        given = [piece for piece in pieces if not piece.is_copy]
        model: dict[str, Any] = {piece.name: piece.of(piece.flat) for piece in given}
        if not exclude_frozen:
            model |= zero.others_of(engine, pieces)
        model |= {name: model[first] for name, first in zero.ties_of(engine) if first in model}
        state: dict[str, Any] = {"model": model | zero.buffers_of(engine)}
        if inner is not None:
            state["optimizer"] = {
                "state": {piece.name: zero.moments_of(piece, inner) for piece in given},
                "param_groups": {piece.name: zero.options_of(piece) for piece in given},
            }
        state["engine"] = {name: getattr(engine, name) for name in _COUNTERS} | _parts(engine)
        if (scaler := _scaler(engine)) is not None:
            state["engine"]["scaler"] = _numbers(scaler)
        state["client_state"] = client_state
        state["random"] = RandomState()
        return state

    def _fill(
        self, engine: Any, path: str, chosen: dict[str, Any], strict: bool, ranks: "Group"
    ) -> dict[str, Any]:
        """Fill an engine from a checkpoint; return the client's state."""
        zero.check_engine(engine)
        check_mark(path, NAME)
        pieces, inner = zero.pieces_of(engine), zero.inner_of(engine)
        if inner is None and "exclude" in chosen:
            chosen = {"exclude": (*chosen["exclude"], "optimizer")}
        saved = Checkpoint(path, self._options, **chosen)
        state = _target(engine, pieces, inner, saved)
        # Each engine has the dtypes of its configuration.
        load(path, state, strict=strict, cast=True, options=self._options, **chosen)
        with Phase(ranks):
            if found := state.get("optimizer", {}).get("state"):
                zero.put_numbers(pieces, inner, found)
                zero.put_options(pieces, state["optimizer"]["param_groups"])
        zero.spread(engine)
        counted: dict[str, Any] = state.get("engine", {})
        for name in _COUNTERS:
            setattr(engine, name, counted.get(name, getattr(engine, name)))
        if (scaler := _scaler(engine)) is not None and (numbers := counted.get("scaler")):
            for name in _numbers(scaler).keys() & numbers.keys():
                setattr(scaler, name, numbers[name])
        client: dict[str, Any] = state.get("client_state", {})
        return client

    def _failure(self) -> HoldfastError | None:
        """Return what the save before has failed with, once."""
        if self._handle is None or not self._handle.done():
            return None
        failure, self._handle = self._handle.exception(), None
        return failure if isinstance(failure, HoldfastError) else None


def _target(engine: Any, pieces: list[zero.Piece], inner: Any, saved: Checkpoint) -> dict[str, Any]:
    """Return the state that a checkpoint fills."""
    values, names = saved.objects(), saved.names()
    model: dict[str, Any] = {piece.name: piece.of(piece.flat) for piece in pieces}
    model |= zero.others_of(engine, pieces)
    model |= {name: model[first] for name, first in zero.ties_of(engine)}
    state: dict[str, Any] = {"model": model | zero.buffers_of(engine)}
    if "engine.global_steps" not in values:  # the weights alone were asked for
        return state
    moments: dict[str, dict[str, Any]] = {}
    for name in names:
        if name.startswith(_STATE):
            parameter, _, key = name[len(_STATE) :].rpartition(".")
            moments.setdefault(parameter, {})[key] = saved.info(name)
    if any(name.startswith("optimizer.param_groups.") for name in values):
        state["optimizer"] = {"state": {}, "param_groups": {}}
        for piece in pieces:
            found = moments.get(piece.name, {})
            shapes = {key: info.shape for key, info in found.items()}
            dtypes = {key: TORCH_DTYPES[info.dtype] for key, info in found.items()}
            target = zero.targets_of(piece, inner, shapes, dtypes)
            state["optimizer"]["state"][piece.name] = target
            state["optimizer"]["param_groups"][piece.name] = Value()
    state["engine"] = dict.fromkeys(_COUNTERS, 0)
    parts = _parts(engine) | {"scaler": Value()}
    below = {name.split(".")[1] for name in [*values, *names] if name.startswith("engine.")}
    state["engine"] |= {name: parts.get(name, Value()) for name in below.difference(_COUNTERS)}
    state |= {"client_state": Value(), "random": RandomState(), MARK: Value()}
    return state


def _parts(engine: Any) -> dict[str, Any]:
    """Return what DeepSpeed saves beside the weights, as objects with ``state_dict()``."""
    found = {"lr_scheduler": engine.lr_scheduler}
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = engine.training_dataloader.data_sampler
    if engine.random_ltd_enabled():
        found["random_ltd"] = engine.random_ltd_scheduler
    found["grad_scaler"] = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return {name: part for name, part in found.items() if part is not None}


def _scaler(engine: Any) -> Any:
    """Return what holds a loss scale that changes, as fp16 has it; or None."""
    optimizer = engine.optimizer
    found = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    changes = getattr(found, "dynamic", getattr(found, "dynamic_loss_scale", False))
    return found if changes else None


def _numbers(scaler: Any) -> dict[str, Any]:
    kept = (int, float, type(None))
    return {name: value for name, value in vars(scaler).items() if isinstance(value, kept)}


@contextlib.contextmanager
def _partitioned(engine: Any) -> Iterator[None]:
    """Keep ZeRO-3's parameters partitioned meanwhile; wait for copies of ZeRO's offload."""
    optimizer = engine.optimizer
    getattr(optimizer, "_wait_for_offload_copies", lambda: None)()
    if engine._optimizer_has_ckpt_event_prologue():
        optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        if engine._optimizer_has_ckpt_event_epilogue():
            optimizer.checkpoint_event_epilogue()


def attach(
    engine: Any,
    *,
    stage: Literal["sync", "eager"] = "sync",
    keep: Keep | None = None,
    codec: "str | Codec" = "raw",
    options: Options | None = None,
) -> "Attached":
    """Let an engine of DeepSpeed save and load through holdfast, by its own methods.

    Call it once, after ``deepspeed.initialize``. ``save_checkpoint`` and ``load_checkpoint`` keep
    their arguments. A checkpoint that DeepSpeed saved before is still loaded, by DeepSpeed.

    Args:
        engine: result of ``deepspeed.initialize``.
        stage: "sync": ``save_checkpoint`` returns when the checkpoint is durable. "eager": it
            returns when the state is copied; if the save fails, the next one raises its error.
        keep: which tags of a directory stay after each save, by their global steps; default: all.
        codec, options: as for `holdfast.save`.

    Returns:
        ``wait()`` waits for the save in the background, ``remove()`` gives the engine its own
        methods back.

    Raises:
        ImportError: DeepSpeed is not installed; the text has the command.
        OptionError: an untested version of DeepSpeed, or an engine that holdfast cannot describe.
    """
    checkpoints = Checkpoints(stage=stage, keep=keep, codec=codec, options=options)
    if not isinstance(engine, checkpoints.engine_class):
        raise OptionError(
            f"attach() is given {shown(engine)}; expected the engine, the first of the results of "
            "deepspeed.initialize"
        )
    zero.check_engine(engine)
    return Attached(checkpoints, engine)


class Attached(Hook):
    """An engine's methods, or those of all engines, that save and load through holdfast."""

    def __init__(self, checkpoints: Checkpoints, owner: Any) -> None:
        self._checkpoints = checkpoints
        one = not isinstance(owner, type)
        ours = {
            f"{verb}_checkpoint": functools.partial(call, owner) if one else _method(call)
            for verb, call in (("save", checkpoints.save), ("load", checkpoints.load))
        }
        replaced = [(owner, name, call) for name, call in ours.items()]
        what = "save_checkpoint and load_checkpoint"
        super().__init__(NAME, checkpoints.version, what, replaced)

    def wait(self) -> None:
        """Wait until the save in the background is durable.

        Raises:
            HoldfastError: it failed.
        """
        self._checkpoints.wait()


def _method(call: Any) -> Any:
    def method(engine: Any, *arguments: Any, **named: Any) -> Any:
        return call(engine, *arguments, **named)

    return method


def hook(**options: Any) -> Attached:
    """Let all engines of this process save and load through holdfast: for programs as they are."""
    checkpoints = Checkpoints(**options)
    return Attached(checkpoints, checkpoints.engine_class)
