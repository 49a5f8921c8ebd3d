"""What a Checkpointer is given: whether it is valid, and the same on all ranks. Knows no files."""

import logging
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..arguments import check_alike, decode_arguments, encode_arguments, is_positive
from ..engine.registry import find_codec, show_codec
from ..errors import OptionError, shown
from ..group.base import COORDINATOR, SingleGroup
from ..group.phase import Phase, find_group
from ..group.replies import decode_replies, encode_reply
from ..saving.request import SaveRequest
from .retention import Keep
from .schedule import Every

if TYPE_CHECKING:
    from ..group.base import Group
    from .directory import Run
    from .tiers import TieredRun

logger = logging.getLogger("holdfast")

DURABLE = ("store", "local")  # the tiers that a save can be durable in
_CHOICES = {"stage": ("eager", "lazy", "sync"), "busy": ("wait", "skip")}


def check_run(request: SaveRequest, keep: object, ranks: "Group", *, emergency: object) -> None:
    """Check what a `holdfast.Checkpointer` is given.

    Raises:
        OptionError: an invalid argument.
    """
    if keep is not None and not isinstance(keep, Keep):
        raise OptionError(f"keep is {shown(keep)}; expected a Keep, such as Keep.latest(3)")
    for name, choices in _CHOICES.items():
        if (value := getattr(request, name)) not in choices:
            raise OptionError(f"{name} is {shown(value)}; expected one of {', '.join(choices)}")
    if not is_positive(request.deadline_s):
        raise OptionError(
            f"deadline_s is {shown(request.deadline_s)}; expected a number of seconds above 0"
        )
    find_codec(request.codec)
    if not isinstance(emergency, bool):
        raise OptionError(f"emergency is {shown(emergency)}; expected True or False")
    if (request.stage != "sync" or emergency) and not hasattr(ranks, "background"):
        raise OptionError(
            f"group is a {type(ranks).__name__} without a method background(), which saves in the "
            'background need; give stage="sync" and emergency=False'
        )


def check_tier(tier: object) -> None:
    """Check which tier is waited for.

    Raises:
        OptionError: it is none.
    """
    if tier is not None and tier not in DURABLE:
        raise OptionError(f"tier is {shown(tier)}; expected one of {', '.join(DURABLE)}, or None")


def warn_of_intervals(keep: Keep, every: Every, ranks: "Group") -> None:
    """Log that `Keep.every` keeps fewer steps than it says, where ``every`` saves no others."""
    for steps in keep.intervals if ranks.rank == COORDINATOR else ():
        if isinstance(every, int) and steps % every:
            logger.warning(
                "every=%d saves few multiples of %d, so Keep.every(%d) keeps only multiples of %d. "
                "Give Keep.every a multiple of %d",
                *(every, steps, steps, math.lcm(steps, every), every),
            )


def check_found(root: str, ranks: "Group") -> None:
    """Check that a Checkpointer that found no process group was not created too early.

    Raises:
        OptionError: there is one by now.
    """
    if isinstance(ranks, SingleGroup) and (found := find_group(None, writing=True)).world_size > 1:
        raise OptionError(
            f"the Checkpointer of {root} was created before the process group of "
            f"{found.world_size} ranks, so each would save alone; create it afterwards, or "
            'give group="alone" and another directory to each rank'
        )


def check_process(root: str, process: int) -> None:
    """Check that this process created a Checkpointer.

    Raises:
        OptionError: it is a forked child.
    """
    if os.getpid() != process:
        raise OptionError(
            f"the Checkpointer of {root} belongs to process {process}, and this is its forked "
            f"child {os.getpid()}; create a new one here"
        )


class Alike:
    """Compares the arguments of a Checkpointer, and of its calls, before the ranks rely on them.

    Attributes:
        has_met: whether that was done: a step of training meets nobody for it again.
    """

    def __init__(
        self,
        ranks: "Group",
        run: "Run | TieredRun",
        request: SaveRequest,
        *,
        every: Every,
        given: Mapping[str, object],
    ) -> None:
        """Prepare; nothing is told yet.

        Args:
            given: further arguments. A text has to be the same on all ranks. Of others, that they
                are given has to be; of their values the coordinator's count.
        """
        self._ranks, self.has_met = ranks, False
        self._arguments: dict[str, Any] = {
            "root": run.root,
            "keep": repr(run.keep),
            # Of a time, the coordinator's counts.
            "every": "a timedelta" if isinstance(every, timedelta) else every,
            "codec": show_codec(find_codec(request.codec)),
            "stage": request.stage,
            "busy": request.busy,
            **{name: _told(value) for name, value in given.items()},
        }

    def check(self, verb: str, **arguments: Any) -> None:
        """Meet the other ranks, and compare.

        Raises:
            OptionError: on every rank.
            PeerError: a rank was lost.
        """
        with Phase(self._ranks) as met:
            given = {"call": verb, **arguments, **self._arguments}
            asks = encode_arguments(f"{verb} of {self._arguments['root']}", given)
            met.answer = encode_reply(arguments=asks)
        replies = decode_replies(met.answers)
        firsts = [decode_arguments(reply.get("arguments")) for reply in replies]
        check_alike(firsts[COORDINATOR]["what"], [first["arguments"] for first in firsts])
        self.has_met = True


def _told(value: object) -> str:
    return value if isinstance(value, str) and value else "given" if value else "not given"
