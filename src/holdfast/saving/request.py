"""What a save was asked for, and whether that can be. Knows no state and no files."""

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..codecs.base import Codec
from ..engine.registry import find_codec, show_codec
from ..errors import NoSpaceError, OptionError, shown
from ..options import Options

if TYPE_CHECKING:
    from ..group.base import Group

STEP_LIMIT = 1 << 53  # as docs/format.md says
_CHOICES = {"stage": ("eager", "lazy"), "busy": ("wait", "skip", "fail")}


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
