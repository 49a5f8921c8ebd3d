"""Hugging Face accelerate: ``save_state`` makes one commit of holdfast, ``load_state`` takes it.

``install("accelerate")``. See docs/frameworks/accelerate.md.
"""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..convert.export import export_checkpoint
from ..data.random_state import RandomState, place_of_group
from ..errors import NotCommittedError, OptionError
from ..group.base import COORDINATOR
from ..loading.checkpoint import Checkpoint
from ..loading.load import load
from ..state.value import Value
from .adapter import MARK, Hook, delete, is_committed, known_version, module
from .directories import FILES, Directories, saving_of
from .optimizers import named_optimizer

logger = logging.getLogger("holdfast")

NAME = "accelerate"
OLDEST, NEWEST_TESTED = "1.7.0", "1.15.0"
PATTERN = r"checkpoint_(\d+)"
LOADERS = "dataloaders"  # of a state: those of each rank
WHAT = "save_state makes one commit"
_Stock = Callable[..., Any]


def hook(**options: Any) -> Hook:
    """Let every Accelerator save and load through holdfast.

    Args:
        options: of `Saving`: ``codec``, ``stage``, ``options``.

    Raises:
        ImportError: accelerate is not installed.
        OptionError: its version is not known, or another integration is active there.
    """
    version, saving = known_version(NAME, OLDEST, NEWEST_TESTED), saving_of(options)
    kind = module("accelerate.accelerator", NAME).Accelerator
    known = Directories(NAME, version, PATTERN, saving)
    ours: list[tuple[Any, str, Any]] = [
        (kind, "save_state", _saving(kind.save_state, known)),
        (kind, "load_state", _loading(kind.load_state, known)),
        (kind, "end_training", _ending(kind.end_training, known)),
    ]
    for name in ("utils.fsdp_utils", "utils", "commands.merge"):
        owner = module(f"accelerate.{name}", NAME)
        ours.append((owner, "merge_fsdp_weights", _merging(owner.merge_fsdp_weights)))
    return Hook(NAME, version, WHAT, ours)


def _saving(stock: _Stock, known: Directories) -> _Stock:
    @functools.wraps(stock)
    def save_state(self: Any, output_dir: Any = None, *_: Any, **__: Any) -> Path:
        _check(self)
        project = self.project_configuration
        path, limit = _place(self, output_dir, known)
        with contextlib.suppress(OSError):  # that fails the save, which says so
            os.makedirs(path, exist_ok=True)
        weights = (
            []
            if _is_sharded(self)
            else [self.get_state_dict(m, unwrap=False) for m in self._models]
        )
        before = list(weights)
        for call in self._save_model_state_pre_hook.values():
            call(self._models, weights, path)
        taken = {at for at, each in enumerate(before) if not any(each is left for left in weights)}
        number = re.search(r"(\d+)/?$", path)
        known.save(
            _state_of(self, taken, saving=True),
            path,
            step=int(number[1]) if number else None,
            files={},
            limit=limit,
        )
        project.iteration += 1
        return Path(path)

    return save_state


def _check(accelerator: Any) -> None:
    """Refuse what saves by itself.

    Raises:
        OptionError: an engine that holdfast does not serve here.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise OptionError(
            f"this Accelerator uses {kind}, which saves by itself. Call remove() of the hook that "
            'install("accelerate") returned, and see the pages of holdfast on frameworks'
        )


def _is_sharded(accelerator: Any) -> bool:
    return getattr(accelerator.distributed_type, "value", "") == "FSDP"


def _place(accelerator: Any, output_dir: Any, known: Directories) -> tuple[str, int | None]:
    """Return the directory of the next checkpoint, and how many are kept there.

    Raises:
        OptionError: an earlier run has later checkpoints there, or no directory was given.
    """
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise OptionError(
                "save_state() needs a directory: give output_dir, or "
                "ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        return os.path.expanduser(output_dir), None
    root = os.path.join(accelerator.project_dir, "checkpoints")
    path = os.path.join(root, f"checkpoint_{project.iteration}")
    loaded = getattr(accelerator, "_holdfast_loaded", None)
    if loaded is None or project.iteration <= loaded:
        last = max(known.numbers(root), default=-1)
        if last >= project.iteration:
            raise OptionError(
                f"{root} has checkpoint_{last} of an earlier run, and the next one would be "
                f"checkpoint_{project.iteration}. Nothing was saved or deleted. Call load_state() "
                "before save_state(), choose another project directory, or set "
                f"ProjectConfiguration(iteration={last + 1})"
            )
    return path, project.total_limit


def _state_of(accelerator: Any, taken: set[int], *, saving: bool) -> dict[str, Any]:
    """Return all that an Accelerator saves and loads.

    Args:
        taken: numbers of models that hooks of the program save and load by themselves.
        saving: leave out, except on rank 0, what all ranks have alike: rank 0's counts.
    """
    state = {_nth("model", at): m for at, m in enumerate(accelerator._models) if at not in taken}
    optimizers = map(named_optimizer, accelerator._optimizers)
    state |= {_nth("optimizer", at): each for at, each in enumerate(optimizers)}
    rank, world_size = place_of_group()
    if not saving or rank == COORDINATOR:
        state |= {_nth("scheduler", at): s for at, s in enumerate(accelerator._schedulers)}
        state |= {f"custom_{at}": each for at, each in enumerate(accelerator._custom_objects)}
        state["step"] = accelerator.step
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
    if saving:
        loaders = {str(at): each.state_dict() for at, each in _stateful_loaders(accelerator)}
        if loaders:
            state[LOADERS] = {f"{rank} of {world_size}": loaders}
    state["random"] = RandomState()  # the last: what comes before may draw
    return state


def _nth(name: str, at: int) -> str:
    return name if at == 0 else f"{name}_{at}"


def _stateful_loaders(accelerator: Any) -> list[tuple[int, Any]]:
    loaders = enumerate(accelerator._dataloaders)
    return [pair for pair in loaders if getattr(pair[1], "use_stateful_dataloader", False)]


def _loading(stock: _Stock, known: Directories) -> _Stock:
    @functools.wraps(stock)
    def load_state(self: Any, input_dir: Any = None, *args: Any, **given: Any) -> Any:
        _check(self)
        known.wait()
        project = self.project_configuration
        root = os.path.join(self.project_dir, "checkpoints") if self.project_dir else ""
        if input_dir is None and project.automatic_checkpoint_naming:
            input_dir = known.newest(root)
            if input_dir is None:
                raise NotCommittedError(
                    f"{os.path.abspath(root)} holds no committed checkpoint of holdfast. Give the "
                    "path of one that accelerate saved by itself, or train from the start"
                )
        path = os.path.expanduser(str(input_dir)) if input_dir is not None else ""
        if not path or not is_committed(path):
            known.check_whole(path)
            return stock(self, input_dir, *args, **given)
        known.open(path)
        _fill(self, path, strict=given.get("strict", True))
        number = re.fullmatch(PATTERN, os.path.basename(os.path.normpath(path)))
        if number and project.automatic_checkpoint_naming:
            self._holdfast_loaded = int(number[1])
            project.iteration = int(number[1]) + 1
        return None

    return load_state


def _fill(accelerator: Any, path: str, *, strict: bool) -> None:
    """Load a checkpoint into all that an Accelerator has."""
    models = [] if _is_sharded(accelerator) else list(accelerator._models)
    before = list(models)
    for call in accelerator._load_model_state_pre_hook.values():
        call(models, path)
    taken = {at for at, each in enumerate(before) if not any(each is left for left in models)}
    into = _state_of(accelerator, taken, saving=False)
    names = Checkpoint(path)
    there = {name.partition(".")[0] for name in names}
    kept_out = {FILES, MARK, LOADERS, *(_nth("model", at) for at in taken)} & there
    load(path, into=into, strict=strict, exclude=tuple(sorted(kept_out)))
    accelerator.step = into["step"]
    loaders = _stateful_loaders(accelerator)
    if not loaders:
        return
    place = "{} of {}".format(*place_of_group())
    if not any(name.startswith(f"{LOADERS}.{place}.") for name in names):
        logger.warning(
            "stateful data loaders start from the beginning: %s has none for these ranks", path
        )
        return
    states = {str(at): Value() for at, _ in loaders}
    wanted = {LOADERS: {place: states}}
    load(path, into=wanted, include=f"{LOADERS}.{place}")
    for at, loader in loaders:
        loader.load_state_dict(states[str(at)])


def _ending(stock: _Stock, known: Directories) -> _Stock:
    @functools.wraps(stock)
    def end_training(self: Any) -> None:
        known.wait()  # the ranks still meet
        stock(self)
        known.close()

    return end_training


def _merging(stock: _Stock) -> _Stock:
    @functools.wraps(stock)
    def merge_fsdp_weights(
        checkpoint_dir: Any,
        output_path: Any,
        safe_serialization: bool = True,
        remove_checkpoint_dir: bool = False,
    ) -> None:
        if not is_committed(checkpoint_dir):
            stock(checkpoint_dir, output_path, safe_serialization, remove_checkpoint_dir)
            return
        os.makedirs(output_path, exist_ok=True)
        name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
        target = os.path.join(output_path, name)
        export_checkpoint(checkpoint_dir, target, include="model", strip="model.")
        if remove_checkpoint_dir:
            delete(checkpoint_dir)

    return merge_fsdp_weights
