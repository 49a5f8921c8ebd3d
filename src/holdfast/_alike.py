"""Are the arguments of a call the same on all ranks? If not, an error says which rank gave what.

Compares what the ranks told each other. Knows no files and no tensors.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .codecs.registry import find_codec, show_codec
from .errors import OptionError
from .group.base import COORDINATOR, Phase

if TYPE_CHECKING:
    from ._run import Run
    from ._schedule import Every
    from ._wanted import Wanted
    from .group.base import Group

CAMPS_MAX = 4  # in a text: of values, and of ranges of ranks
Arguments = dict[str, Any]  # JSON values by name


def check_alike(what: str, arguments: Sequence[Arguments]) -> None:
    """Check that all ranks gave the same arguments.

    Args:
        what: the call, as the error names it.
        arguments: by rank.

    Raises:
        OptionError: they did not; the same text on every rank.

    Example:
        ``[{"step": 1}, {"step": 2}]`` → "step: 1 on rank 0; 2 on rank 1"
    """
    differing = [
        f"{name}: {camps([repr(given.get(name)) for given in arguments])}"
        for name in dict.fromkeys(name for given in arguments for name in given)
        if any(given.get(name) != arguments[0].get(name) for given in arguments)
    ]
    if differing:
        raise OptionError(
            f"{what} was refused: the ranks gave different arguments. {'. '.join(differing)}. "
            "Give the same on all ranks"
        )


def camps(texts: Sequence[str]) -> str:
    """Say which ranks say what, those of the coordinator's opinion first.

    Example:
        ``["a", "a", "b"]`` → "a on 2 ranks (0-1); b on rank 2"
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    shown = [f"{text} on {_named(held)}" for text, held in [*ranks.items()][:CAMPS_MAX]]
    more = len(ranks) - CAMPS_MAX
    return "; ".join(shown) + (f"; and {more} others" if more > 0 else "")


def encode_arguments(what: str, arguments: Arguments, **more: Any) -> bytes:
    """Write what a rank tells first, as a line: other lines may follow it.

    Args:
        what: the call, as an error names it.
    """
    # What is no JSON is refused where it is used, on the rank that gave it.
    line = {"what": what, "arguments": arguments, **more}
    return json.dumps(line, default=repr).encode() + b"\n"


def first_line(answer: bytes) -> dict[str, Any]:
    """Read what `encode_arguments` wrote; a rank in another call may have told something else."""
    try:
        line: dict[str, Any] = json.loads(answer[: answer.index(b"\n")])
    except ValueError:
        return {"what": "a call", "arguments": {"call": "another"}}
    return line


class Alike:
    """Compares the arguments of a Checkpointer, and of its calls, before the ranks rely on them.

    Attributes:
        has_met: whether that was done: a step of training meets nobody for it again.
    """

    def __init__(
        self,
        ranks: "Group",
        run: "Run",
        wanted: "Wanted",
        *,
        every: "Every",
        given: Mapping[str, object],
    ) -> None:
        """Prepare; nothing is told yet.

        Args:
            given: further arguments. That they are given has to be the same on all ranks; of their
                values the coordinator's count.
        """
        self._ranks, self.has_met = ranks, False
        self._arguments: dict[str, Any] = {
            "root": run.root,
            "keep": repr(run.keep),
            # Of a time, the coordinator's counts.
            "every": "a timedelta" if isinstance(every, timedelta) else every,
            "codec": show_codec(find_codec(wanted.codec)),
            "stage": wanted.stage,
            "busy": wanted.busy,
            **{name: "given" if value else "not given" for name, value in given.items()},
        }

    def check(self, verb: str, **arguments: Any) -> None:
        """Meet the other ranks, and compare.

        Raises:
            OptionError: on every rank.
            PeerError: a rank was lost.
        """
        with Phase(self._ranks) as met:
            given = {"call": verb, **arguments, **self._arguments}
            met.answer = encode_arguments(f"{verb} of {self._arguments['root']}", given)
        firsts = [first_line(answer) for answer in met.answers]
        check_alike(firsts[COORDINATOR]["what"], [first["arguments"] for first in firsts])
        self.has_met = True


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    begins = [0, *(n for n, (a, b) in enumerate(pairwise(ranks), 1) if b > a + 1), len(ranks)]
    ranges = [(ranks[a], ranks[b - 1]) for a, b in pairwise(begins)]
    shown = [f"{a}-{b}" if a < b else f"{a}" for a, b in ranges[:CAMPS_MAX]]
    return f"{len(ranks)} ranks ({', '.join(shown)}{', …' * (len(ranges) > CAMPS_MAX)})"
