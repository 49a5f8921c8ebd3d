"""The Trainer of Hugging Face transformers: each of its checkpoints is one commit of holdfast.

``from holdfast.integrations.transformers import HoldfastTrainer``, or for unchanged programs
``install("transformers")``. See docs/frameworks/transformers.md.
"""

import dataclasses
import functools
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..data.random_state import RandomState
from ..errors import NotCommittedError, OptionError, shown
from ..group.base import COORDINATOR
from ..group.phase import find_group
from ..loading.load import load
from .adapter import Hook, is_committed, known_version, marked, module
from .deepspeed import trainer as over_deepspeed
from .directories import Directories, Saving, saving_of
from .optimizers import named_optimizer
from .peft import adapter_of, base_of, check_base, is_adapted

if TYPE_CHECKING:
    HoldfastTrainer: Any

logger = logging.getLogger("holdfast")

NAME = "transformers"
OLDEST, NEWEST_TESTED = "5.3.0", "5.24.0"
PATTERN = r"checkpoint-(\d+)"
STATE = "trainer_state.json"
WHAT = "each checkpoint of the Trainer is one commit"
_Stock = Callable[..., Any]


def hook(**options: Any) -> Hook:
    """Let the Trainer, and every class made from it, save and load through holdfast.

    Args:
        options: of `Saving`: ``codec``, ``stage``, ``options``.

    Raises:
        ImportError: transformers is not installed.
        OptionError: its version is not known, or another integration is active there.
    """
    version, saving = _version(), saving_of(options)
    trainer = module("transformers", NAME).Trainer
    ours: list[tuple[Any, str, Any]] = [(trainer, *pair) for pair in _methods(trainer).items()]
    ours.append((trainer, "holdfast", saving))
    for name in ("transformers.trainer_utils", "transformers.trainer"):
        owner = module(name, NAME)
        ours.append((owner, "get_last_checkpoint", _finding(owner.get_last_checkpoint)))
    return Hook(NAME, version, WHAT, ours)


def trainer_of(trainer: Any, saving: Saving | None = None) -> Any:
    """Return a class made from a Trainer that saves and loads through holdfast.

    Args:
        trainer: the class, such as ``transformers.Trainer`` or one of trl.
        saving: how it saves; an instance's attribute ``holdfast`` may be set to another.

    Raises:
        ImportError: transformers is not installed.
        OptionError: its version is not known, or `install` is active.

    Example:
        ``HoldfastSFTTrainer = trainer_of(trl.SFTTrainer, Saving(codec="lossless"))``
    """
    version = _version()
    if isinstance(vars(module("transformers", NAME).Trainer).get("holdfast"), Saving):
        raise OptionError(
            'install("transformers") is active, so every Trainer saves through holdfast, and '
            "trainer_of() would do so twice. Use the Trainer as it is, or do not call install()"
        )
    Hook(NAME, version, WHAT).remove()  # it says so in the log
    methods = _methods(trainer) | {"holdfast": saving or Saving(), "__module__": __name__}
    return type(f"Holdfast{trainer.__name__}", (trainer,), methods)


def __getattr__(name: str) -> Any:
    if name != "HoldfastTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = trainer_of(module("transformers", NAME).Trainer)
    return globals()[name]


def _version() -> str:
    known_version("accelerate", "1.7.0", "1.15.0", NAME)
    return known_version(NAME, OLDEST, NEWEST_TESTED)


def _methods(trainer: Any) -> dict[str, _Stock]:
    """Return what replaces the methods of a class, each made from that one."""
    makers = {
        "train": _training,
        "_prepare_for_training": _preparing,
        "_save_checkpoint": _saving,
        "_load_from_checkpoint": _loading_model,
        "_load_optimizer_and_scheduler": _loading,
        "_load_rng_state": _loading_random,
        "_load_best_model": _loading_best,
        "_finalize_training": _finishing,
    }
    return {name: make(getattr(trainer, name)) for name, make in makers.items()}


def _training(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **given: Any) -> Any:
        _check(self)
        vars(self).pop("_holdfast", None)
        place = resume_from_checkpoint or None
        if place is True:
            place = _newest(self)
        elif place is not None:
            _directories(self).check_whole(str(place))
        if place is not None and is_committed(place):
            _directories(self).open(place)
        try:
            result = stock(self, place, *args, **given)
        finally:
            _directories(self).wait()
        _directories(self).close()  # the model is trained, and in memory
        return result

    return train


def _directories(trainer: Any) -> Directories:
    """Return what saves for a Trainer; each call of ``train`` begins with a new one."""
    if "_holdfast" not in vars(trainer):
        trainer._holdfast = Directories(NAME, _version(), PATTERN, trainer.holdfast)
        trainer._holdfast_files = trainer._holdfast_base = None
    found: Directories = trainer._holdfast
    return found


def _check(trainer: Any) -> None:
    """Refuse what would save something else than the log says.

    Raises:
        ImportError: DeepSpeed is to be used, and is not installed.
        OptionError: an option that cannot be combined with holdfast, or a version of DeepSpeed.
    """
    args = trainer.args
    if not isinstance(trainer.holdfast, Saving):
        raise OptionError(
            f"trainer.holdfast is {shown(trainer.holdfast)}; expected a Saving of "
            'holdfast.integrations.transformers, such as Saving(codec="lossless")'
        )
    if trainer.is_deepspeed_enabled:
        over_deepspeed.check()
    if args.push_to_hub and getattr(args.hub_strategy, "value", args.hub_strategy) != "end":
        raise OptionError(
            f"hub_strategy is {args.hub_strategy}: it uploads the model files of each checkpoint, "
            'which a checkpoint of holdfast does not have. Use hub_strategy="end"'
        )


def _newest(trainer: Any) -> str:
    """Return the checkpoint that was committed last.

    Raises:
        NotCommittedError: there is none.
    """
    root = os.path.abspath(trainer.args.output_dir)
    found = _directories(trainer).newest(root)
    if found is not None:
        return str(found)
    others = [path.name for path in Path(root).glob("checkpoint-*")]
    there = f"; it has {', '.join(sorted(others)[:3])}" if others else ""
    raise NotCommittedError(
        f"{root} holds no committed checkpoint of holdfast{there}. Give the path of one that "
        "transformers saved by itself, or train from the start"
    )


def _finding(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def get_last_checkpoint(folder: Any) -> Any:
        known = Directories(NAME, "", PATTERN, Saving())
        committed = known.committed(folder)
        if committed:
            return committed[-1]
        found = stock(folder)
        return None if found is not None and known.is_torn(found) else found

    return get_last_checkpoint


def _preparing(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def _prepare_for_training(self: Any, max_steps: Any, loader: Any, checkpoint: Any) -> Any:
        # With DeepSpeed, what follows would look for files of its engine, and for nothing else.
        is_ours = self.is_deepspeed_enabled and checkpoint is not None and is_committed(checkpoint)
        found = stock(self, max_steps, loader, None if is_ours else checkpoint)
        if is_ours:
            _load(self, checkpoint)
        return found

    return _prepare_for_training


def _saving(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def _save_checkpoint(self: Any, model: Any, trial: Any = None) -> None:
        args, state, directories = self.args, self.state, _directories(self)
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        root = self._get_output_dir(trial=trial)
        path = os.path.join(root, f"checkpoint-{state.global_step}")
        if state.best_global_step:
            best = os.path.join(root, f"checkpoint-{state.best_global_step}")
            if best == path or is_committed(best):
                state.best_model_checkpoint = best
        more: dict[str, Any] = over_deepspeed.mark_of(self)
        if is_adapted(self.model):
            self._holdfast_base = self._holdfast_base or base_of(self.model)
            more["base"] = self._holdfast_base
        with over_deepspeed.saving(self):
            directories.save(
                _state_of(self) | ({} if args.save_only_model else {"random": RandomState()}),
                path,
                step=state.global_step,
                files=_files_of(self),
                limit=args.save_total_limit,
                spare=state.best_model_checkpoint,
                **more,
            )
        if not self.is_in_train:  # by hand: there is no later call that waits
            directories.wait()

    return _save_checkpoint


def _state_of(trainer: Any) -> dict[str, Any]:
    """Return all that a Trainer resumes, but for its random generators."""
    if trainer.is_deepspeed_enabled:
        found = over_deepspeed.state_of(trainer)
        return {"model": found["model"]} if trainer.args.save_only_model else found
    model = trainer.model
    state: dict[str, Any] = {"model": adapter_of(model) if is_adapted(model) else model}
    if trainer.args.save_only_model:
        return state
    state["optimizer"] = named_optimizer(trainer.optimizer)
    state["scheduler"] = trainer.lr_scheduler
    if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
        state["scaler"] = scaler
    return state


def _files_of(trainer: Any) -> dict[str, bytes]:
    """Return the small files that stand beside a checkpoint, on rank 0."""
    if find_group(None).rank != COORDINATOR:
        return {}
    state, handler = trainer.state, trainer.callback_handler
    exported: dict[str, Any] = {}
    kind = module("transformers.trainer_callback", NAME).ExportableState
    for callback in [*handler.callbacks, trainer.control]:
        if isinstance(callback, kind):
            exported.setdefault(type(callback).__name__, []).append(callback.state())
    for name, states in exported.items():
        before = state.stateful_callbacks.get(name)
        state.stateful_callbacks[name] = states if isinstance(before, list) else states[-1]
    text = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"
    if trainer._holdfast_files is None:
        trainer._holdfast_files = _constant_files(trainer)
    return {STATE: text.encode(), **trainer._holdfast_files}


def _constant_files(trainer: Any) -> dict[str, bytes]:
    """Return the files that `from_pretrained` needs besides the weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    parts: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None)]
    if is_adapted(model):
        parts = [*model.peft_config.values()][:1]
    parts.append(trainer.processing_class)
    with tempfile.TemporaryDirectory() as place:
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(place)
        return {path.name: path.read_bytes() for path in Path(place).iterdir() if path.is_file()}


def _loading_model(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def _load_from_checkpoint(self: Any, resume_from_checkpoint: Any, model: Any = None) -> None:
        if not is_committed(resume_from_checkpoint):  # else all is loaded together, later
            stock(self, resume_from_checkpoint, model)

    return _load_from_checkpoint


def _loading(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def _load_optimizer_and_scheduler(self: Any, checkpoint: Any) -> None:
        if checkpoint is None or not is_committed(checkpoint):
            stock(self, checkpoint)
            return
        _load(self, checkpoint)

    return _load_optimizer_and_scheduler


def _load(trainer: Any, path: str, *, model_only: bool = False) -> None:
    model: nn.Module = trainer.model
    known = marked(path)
    if is_adapted(model):
        check_base(model, known, path)
    if not model_only:
        over_deepspeed.check_mark(trainer, known, path)
    if trainer.is_deepspeed_enabled:
        over_deepspeed.fill(trainer, path, model_only=model_only)
        return
    into = _state_of(trainer)
    if model_only:
        into = {"model": into["model"]}
    load(path, into=into, include=tuple(into))


def _loading_random(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def _load_rng_state(self: Any, checkpoint: Any) -> None:
        if checkpoint is None or not is_committed(checkpoint):
            stock(self, checkpoint)
        else:
            load(checkpoint, into={"random": RandomState()}, include="random")

    return _load_rng_state


def _loading_best(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def _load_best_model(self: Any) -> None:
        best = self.state.best_model_checkpoint
        if not is_committed(best):
            if not os.path.isdir(best) or _directories(self).is_torn(best):
                logger.error("the best checkpoint %s is not saved; the model stays as it is", best)
            else:
                stock(self)
            return
        _load(self, best, model_only=True)
        _keep_best(self)

    return _load_best_model


def _finishing(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def _finalize_training(self: Any, trial: Any, *args: Any) -> Any:
        _directories(self).wait()
        if not self.args.load_best_model_at_end:
            _keep_best(self)
        return stock(self, trial, *args)

    return _finalize_training


def _keep_best(trainer: Any) -> None:
    """Delete all but the best checkpoint where only one is kept, as the Trainer does at its end.

    It would remove their trees by itself.
    """
    best = trainer.state.best_model_checkpoint
    is_one = trainer.args.save_total_limit == 1 and best is not None and is_committed(best)
    if is_one and find_group(None).rank == COORDINATOR:
        _directories(trainer).delete_others(os.path.dirname(os.path.abspath(best)), best)
