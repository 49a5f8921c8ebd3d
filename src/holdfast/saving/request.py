"""What a save was asked for, and whether that can be. Knows no state and no files."""

import errno
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..arguments import plain_number
from ..brief import show_bytes
from ..codecs.base import Codec
from ..engine.registry import show_codec
from ..errors import NoSpaceError, OptionError, shown
from ..options import Options
from ..version import __version__

if TYPE_CHECKING:
    from ..engine.ledger import Ledger
    from ..group.base import Group

STEP_LIMIT = 1 << 53  # as docs/format.md says
_CHOICES = {"stage": ("eager", "lazy"), "busy": ("wait", "skip", "fail")}


class NoRoomError(NoSpaceError):
    """A state cannot fit on the disk: found by all ranks alike, before anything is written."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a save was asked for; see `save` and `save_async`.

    Attributes:
        free_bytes: called on the coordinator: checks what its caller has to, the place too, and
            returns what may be written there. None: that is not looked at.
        check_last: called on the coordinator right before the commit, and before on the ranks that
            do not share its disk; raises when there may be none.
        here: ranks that share the coordinator's disk, where each host has its own; None: all share
            one.
        tell_ranks: called on the coordinator after the commit; ``heed`` is given its result, on
            every rank. Neither raises.
        tell: called with each stage that the save has come to, and its ledger.
    """

    path: str | os.PathLike[str]
    step: int | None
    metrics: Mapping[str, float] | None
    codec: str | Codec
    options: Options
    stage: str = "eager"
    busy: str = "wait"
    deadline_s: float = 1800.0
    replace: bool = False
    free_bytes: Callable[[], int | None] | None = None
    check_last: Callable[[], object] = bytes
    here: frozenset[int] | None = None
    tell_ranks: Callable[[], bytes] = bytes
    heed: Callable[[bytes], object] = bytes
    tell: "Callable[[str, Ledger], object] | None" = None

    def arguments(self, place: str, codec: Codec, *, background: bool) -> dict[str, Any]:
        """Return what all ranks have to give alike, as values of JSON.

        Args:
            place: the absolute path.
            codec: the one that was named.
        """
        call = "save_async" if background else "save"
        alike = {"call": call, "path": place, "step": self.step, "codec": show_codec(codec)}
        alike["replace"] = self.replace
        return alike | ({"stage": self.stage, "busy": self.busy} if background else {})

    def settings(self, codec: Codec, world_size: int, *, background: bool) -> dict[str, Any]:
        """Return what a plan depends on besides the state, as values of JSON but for the codec.

        The same on all ranks, but for ``pool_bytes``; of ``writers`` the coordinator's count.

        Args:
            codec: the one that was named.
        """
        options = self.options
        return {
            "chunk_elements": options.chunk_elements,
            "file_bytes": options.file_bytes,
            "codec": codec,
            "writers": options.writers,
            "written_by": f"holdfast {__version__}",
            "world_size": world_size,
            "metrics": sorted(self.metrics or ()),
            "pool_bytes": options.pool_bytes if background else None,
        }


def checked_request(request: SaveRequest) -> SaveRequest:
    """Check what every save is given; return it, its numbers as Python's.

    Raises:
        OptionError: an invalid argument.
    """
    step, metrics = request.step, request.metrics
    if metrics is not None and not isinstance(metrics, Mapping):
        raise OptionError(f"metrics is a {type(metrics).__name__}; expected a dict of numbers")
    if metrics:
        metrics = {name: plain_number(value) for name, value in metrics.items()}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or type(value) is bool or not isinstance(value, (int, float)):
            kind = type(value).__name__
            raise OptionError(
                f"metrics[{shown(name)}] is a {kind}; expected a number, such as loss.item()"
            )
        try:
            float(value)
        except OverflowError as error:  # which every policy and table would meet later
            raise OptionError(
                f"metrics[{shown(name)}] is an integer that no float holds; expected a number from "
                "-1.8e308 to 1.8e308"
            ) from error
    if step is not None and type(step) is not int:
        step = plain_number(step)
    if step is not None and (type(step) is not int or not 0 <= step < STEP_LIMIT):
        raise OptionError(f"step is {shown(step)}; expected an integer from 0 below 2^53, or None")
    if type(request.replace) is not bool:
        raise OptionError(f"replace is {shown(request.replace)}; expected True or False")
    if step is request.step and not metrics:
        return request
    return replace(request, step=step, metrics=metrics)


def moved_deadline(moved: Mapping[str, Any]) -> Any:
    """Return ``deadline_s``, which was an argument of `save_async` once.

    Raises:
        OptionError: something else was given.
    """
    if unknown := [name for name in moved if name != "deadline_s"]:
        raise OptionError(
            f"save_async() has no argument {unknown[0]}; expected one of step, metrics, codec, "
            "stage, busy, replace, group, options"
        )
    text = "deadline_s= of save_async is a field of Options: options=Options(deadline_s=…)"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return moved["deadline_s"]


def check_room(place: str, size_bytes: int, free_bytes: int | None) -> None:
    """Check that a state can fit on the disk, before anything is written.

    Raises:
        NoRoomError: it cannot; the text has both numbers.
    """
    needed = size_bytes + size_bytes // 100  # names, shapes, checksums, blocks that are not full
    if free_bytes is not None and needed > free_bytes:
        error = NoRoomError(
            f"not enough space to save {place}: it needs {show_bytes(needed)}, and "
            f"{show_bytes(free_bytes)} are free there. Nothing was written"
        )
        error.errno = errno.ENOSPC
        raise error


def check_background(request: SaveRequest, ranks: "Group") -> None:
    """Check what a save in the background is given besides.

    Raises:
        OptionError: an invalid argument.
    """
    for name, choices in _CHOICES.items():
        if (value := getattr(request, name)) not in choices:
            raise OptionError(f"{name} is {shown(value)}; expected one of {', '.join(choices)}")
    seconds = request.deadline_s
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise OptionError(f"deadline_s is {shown(seconds)}; expected a number of seconds above 0")
    if not hasattr(ranks, "background"):
        raise OptionError(
            f"group is a {type(ranks).__name__} without a method background(), which a save in the "
            "background needs; use holdfast.save"
        )
