"""What a save was asked for, and whether that can be. Knows no state and no files."""

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._keep import Keep
from ._schedule import is_positive
from .codecs.base import Codec
from .codecs.registry import find_codec, show_codec
from .errors import NoSpaceError, OptionError, StateError, shown
from .options import Options

if TYPE_CHECKING:
    from .group.base import Group

STEP_LIMIT = 1 << 53  # as docs/format.md says
_CHOICES = {"stage": ("eager", "lazy"), "busy": ("wait", "skip", "fail")}
_RUN_CHOICES = {"stage": ("eager", "lazy", "sync"), "busy": ("wait", "skip")}


class NoRoomError(NoSpaceError):
    """A state cannot fit on the disk: found by all ranks alike, before anything is written."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a save was asked for; see `save` and `save_async`.

    Attributes:
        free_bytes: called on the coordinator: checks what its caller has to, the place too, and
            returns what may be written there. None: that is not looked at.
        check_last: called on the coordinator right before the commit; raises when there may be
            none.
    """

    path: str | os.PathLike[str]
    step: int | None
    metrics: Mapping[str, float] | None
    codec: str | Codec
    options: Options
    stage: str = "eager"
    busy: str = "wait"
    deadline_s: float = 1800.0
    free_bytes: Callable[[], int | None] | None = None
    check_last: Callable[[], None] = lambda: None

    def arguments(self, place: str, *, background: bool) -> dict[str, Any]:
        """Return what all ranks have to give alike, as values of JSON.

        Args:
            place: the absolute path.
        """
        call = "save_async" if background else "save"
        codec = show_codec(find_codec(self.codec))
        alike = {"call": call, "path": place, "step": self.step, "codec": codec}
        return alike | ({"stage": self.stage, "busy": self.busy} if background else {})


def check_wanted(wanted: Wanted) -> None:
    """Check what every save is given.

    Raises:
        OptionError: an argument that cannot be.
    """
    step, metrics, codec = wanted.step, wanted.metrics, wanted.codec
    find_codec(codec)
    if metrics is not None and not isinstance(metrics, Mapping):
        raise OptionError(f"metrics is a {type(metrics).__name__}; expected a dict of numbers")
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or type(value) is bool or not isinstance(value, (int, float)):
            kind = type(value).__name__
            raise OptionError(
                f"metrics[{shown(name)}] is a {kind}; expected a number, such as loss.item()"
            )
    if step is not None and (type(step) is not int or not 0 <= step < STEP_LIMIT):
        raise OptionError(f"step is {shown(step)}; expected an integer from 0 below 2^53, or None")


def check_order(path: object, state: object, usage: str) -> None:
    """Refuse a path and a state that stand in each other's place.

    Args:
        usage: how it is written.

    Raises:
        OptionError: they do.
    """
    if _is_path(state) and not _is_path(path):
        raise OptionError(f"{usage}; here the path is {shown(path)} and the state {shown(state)}")


def check_state(state: object, named: str = "state") -> None:
    """Check that a state is a dict.

    Args:
        named: the argument that a user gave it as.

    Raises:
        StateError: it is not; the text says what to write.
    """
    if isinstance(state, Mapping):
        return
    example = '{"weight": tensor}' if hasattr(state, "shape") else '{"model": model}'
    if hasattr(state, "param_groups"):
        example = '{"optimizer": optimizer}'
    raise StateError(f"{named} is {shown(state)}; expected a dict, such as {named}={example}")


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


def check_room(place: str, size_bytes: int, free_bytes: int | None) -> None:
    """Check that a state can fit on the disk, before anything is written.

    Raises:
        NoRoomError: it cannot; the text has both numbers.
    """
    needed = size_bytes + size_bytes // 100  # names, shapes, checksums, blocks that are not full
    if free_bytes is not None and needed > free_bytes:
        error = NoRoomError(
            f"{place} needs {needed / 1e9:.3f} GB, and {free_bytes / 1e9:.3f} GB are free there; "
            "nothing was written"
        )
        error.errno = errno.ENOSPC
        raise error


def check_background(wanted: Wanted, ranks: "Group") -> None:
    """Check what a save in the background is given besides.

    Raises:
        OptionError: an argument that cannot be.
    """
    for name, choices in _CHOICES.items():
        if getattr(wanted, name) not in choices:
            raise OptionError(
                f"{name} is {shown(getattr(wanted, name))}; there are {', '.join(choices)}"
            )
    seconds = wanted.deadline_s
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise OptionError(f"deadline_s is {shown(seconds)}; expected a number of seconds above 0")
    if not hasattr(ranks, "background"):
        raise OptionError(
            f"group is a {type(ranks).__name__} without a method background(), so its ranks cannot "
            "meet in the background; use holdfast.save"
        )


def check_run(wanted: Wanted, keep: object, ranks: "Group", *, emergency: object) -> None:
    """Check what a `holdfast.Checkpointer` is given.

    Raises:
        OptionError: an argument that cannot be.
    """
    if keep is not None and not isinstance(keep, Keep):
        raise OptionError(f"keep is {shown(keep)}; expected a Keep, such as Keep.latest(3)")
    for name, choices in _RUN_CHOICES.items():
        if (value := getattr(wanted, name)) not in choices:
            raise OptionError(f"{name} is {shown(value)}; there are {', '.join(choices)}")
    if not is_positive(wanted.deadline_s):
        raise OptionError(
            f"deadline_s is {shown(wanted.deadline_s)}; expected a number of seconds above 0"
        )
    find_codec(wanted.codec)
    if not isinstance(emergency, bool):
        raise OptionError(f"emergency is {shown(emergency)}; expected True or False")
    if (wanted.stage != "sync" or emergency) and not hasattr(ranks, "background"):
        raise OptionError(
            f"group is a {type(ranks).__name__} without a method background(), so its ranks cannot "
            'meet in the background; give stage="sync", and no emergency'
        )
