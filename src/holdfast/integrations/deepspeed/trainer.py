"""The Trainer of transformers over DeepSpeed: what of its engine is in the Trainer's checkpoint.

Knows a Trainer and its engine by their attributes; imports neither framework.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import MismatchError
from ..adapter import known_version
from ..directories import FILES
from ..peft import is_adapted
from . import content
from .engine import NEWEST_TESTED, OLDEST
from .tags import NAME

ENGINE = "engine"  # of a mark: what trains
SCHEDULER = "scheduler"  # of a state: one that the engine does not know


def check() -> None:
    """Check the version of DeepSpeed.

    Raises:
        ImportError: it is not installed.
        OptionError: its version is not known.
    """
    known_version(NAME, OLDEST, NEWEST_TESTED)


def mark_of(trainer: Any) -> dict[str, Any]:
    """Return what the mark of a Trainer's checkpoint says of the engine."""
    return {ENGINE: NAME} if trainer.is_deepspeed_enabled else {}


def check_mark(trainer: Any, found: Mapping[str, Any], path: str) -> None:
    """Check that a Trainer resumes over DeepSpeed what was saved so, and nothing else.

    Args:
        found: the mark of the checkpoint.

    Raises:
        MismatchError: the one is over DeepSpeed, and the other is not.
    """
    there, here = found.get(ENGINE) == NAME, bool(trainer.is_deepspeed_enabled)
    if there != here:
        words = {True: "with DeepSpeed", False: "without DeepSpeed"}
        raise MismatchError(
            f"{path} was saved {words[there]}, and this Trainer trains {words[here]}; it cannot "
            "resume from it. Train as it was saved; or load its weights alone, before the Trainer "
            f'is made: holdfast.load({path!r}, into={{"model": model}}, include="model")'
        )


@contextlib.contextmanager
def saving(trainer: Any) -> Iterator[None]:
    """Keep the engine as it is saved meanwhile; nothing without DeepSpeed."""
    with contextlib.ExitStack() as stack:
        if trainer.is_deepspeed_enabled:
            stack.enter_context(content.partitioned(trainer.deepspeed))
        yield


def state_of(trainer: Any) -> dict[str, Any]:
    """Return what is saved of a Trainer's engine, and a schedule that is not the engine's.

    Of an adapted model, the frozen base is left out.

    Raises:
        HoldfastError: an engine that cannot be described.
    """
    engine = trainer.deepspeed
    state = content.state_of(engine, frozen=not is_adapted(trainer.model))
    return state | _schedule(trainer)


def fill(trainer: Any, path: str, *, model_only: bool = False) -> None:
    """Fill a Trainer's engine from a checkpoint; random generators are left for later.

    Raises:
        HoldfastError: as for `holdfast.load`, or an engine that cannot be described.
    """
    frozen = not is_adapted(trainer.model)
    if model_only:
        content.fill(trainer.deepspeed, path, frozen=frozen, include="model")
        return
    exclude = ("random", FILES)
    more = _schedule(trainer)
    content.fill(trainer.deepspeed, path, frozen=frozen, more=more, exclude=exclude)


def _schedule(trainer: Any) -> dict[str, Any]:
    """Return the schedule where transformers steps it, and not the engine."""
    schedule = trainer.lr_scheduler
    inner = getattr(schedule, "scheduler", schedule)  # accelerate's wrapper of the engine's
    return {} if inner is trainer.deepspeed.lr_scheduler else {SCHEDULER: schedule}
