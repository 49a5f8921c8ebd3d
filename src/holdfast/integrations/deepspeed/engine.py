"""DeepSpeed: an engine's `save_checkpoint` and `load_checkpoint`, in one commit for all ranks.

Float master weights and the optimizer's state are saved by the names of the model's parameters,
whatever ZeRO stage and number of ranks hold them, so that any other loads them. What that is, is
known by `content`, not here.
"""

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any, Literal

from ...codecs.base import Codec
from ...engine.registry import find_codec
from ...errors import HoldfastError, OptionError, shown
from ...group.base import COORDINATOR
from ...group.phase import Phase, find_group
from ...options import Options, options_of
from ...runs.retention import Keep
from ...saving.handle import SaveHandle
from ...saving.save import save
from ..adapter import Hook, check_mark, known_version, mark
from ..adapter import module as module_of
from ..begin import begin
from . import content, zero
from .tags import NAME, conclude, find, logging_of

logger = logging.getLogger("holdfast")

OLDEST, NEWEST_TESTED = "0.18.0", "0.19.8"


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
        if keep is not None and not isinstance(keep, Keep):
            raise OptionError(
                f"keep is {shown(keep)}; expected a policy, such as keep=holdfast.Keep.latest(3)"
            )
        if keep is not None and keep.metrics:
            raise OptionError(f"keep is {keep}; DeepSpeed's save_checkpoint is given no metrics")
        self._stage, self._keep, self._codec = stage, keep or Keep.all(), codec
        self._options = options_of(options)
        find_codec(codec)
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
        with content.partitioned(engine):
            state = content.state_of(engine, frozen=not exclude_frozen_parameters)
            state["client_state"] = dict(client_state or {})
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
        check_mark(found["path"], NAME)
        state = content.fill(
            engine, found["path"], strict=load_module_strict, options=self._options, **chosen
        )
        return found["path"], state.get("client_state", {})

    def _failure(self) -> HoldfastError | None:
        """Return what the save before has failed with, once."""
        if self._handle is None or not self._handle.done():
            return None
        failure, self._handle = self._handle.exception(), None
        return failure if isinstance(failure, HoldfastError) else None


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
