"""Faults planted in holdfast, in each rank; the loop has to notice every one.

Each breaks one promise; beside it is the scenario that shows it.
"""

import time
import types
from dataclasses import dataclass
from typing import Any

import forked_ranks  # noqa: F401  before anything that makes pools
import planted
import pytest

import holdfast.engine.commit
import holdfast.engine.ledger
import holdfast.saving.handle
from holdfast.engine.ledger import Ledger
from holdfast.errors import PeerError
from holdfast.group import barrier
from holdfast.runs.fence import Fence

from .ranks import Prepare

NEVER_S = 1e4


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, and the scenario that is to show it."""

    scenario: str
    plant: Prepare


def no_deadline(rank: int) -> None:
    """Nobody gives up."""
    original = barrier.StoreGroup.__init__

    def wait(self: Any, store: Any, mine: int, size: int, deadline: float, *rest: Any) -> None:
        original(self, store, mine, size, deadline + NEVER_S, *rest)

    barrier.StoreGroup.__init__ = wait
    holdfast.saving.handle.OUTCOME_GRACE_S = NEVER_S


def no_fencing_look(rank: int) -> None:
    """A job takes no notice of a newer one, nor clears what an older one left."""
    Fence.hold = lambda self: None


def commit_without_a_rank(rank: int) -> None:
    """The coordinator takes what a rank wrote last time for what it has not heard from it."""
    collect = barrier.StoreGroup._collect
    last: dict[int, list[bytes]] = {}

    def collect_some(self: Any, data: bytes) -> Any:
        try:
            found = collect(self, data)
        except PeerError:
            return [data, *last[self._round][1:]]
        if found is not None:
            last[self._round] = found
        return found

    barrier.StoreGroup._collect = collect_some
    barrier.StoreGroup._give_up = lambda self: PeerError("", rank=-1, cause="")
    holdfast.engine.commit.check_present = lambda store, manifest, ranks=None: None
    Ledger.check = lambda self: None


def acknowledge_when_staged(rank: int) -> None:
    """A save counts as made before it is."""
    planted.say_saved_when_staged(pytest.MonkeyPatch())


def deadline_by_the_wall_clock(rank: int) -> None:
    """Deadlines are counted by a clock that people set."""
    shifted = types.SimpleNamespace(**vars(time))
    shifted.monotonic = lambda: time.time()
    for module in (barrier, holdfast.saving.handle, holdfast.engine.ledger):
        module.time = shifted


PLANTED: dict[str, Planted] = {
    "no deadline": Planted("stop", no_deadline),
    "no fencing look": Planted("zombie", no_fencing_look),
    "committed without a rank": Planted("stop", commit_without_a_rank),
    "acknowledged when staged": Planted("kill", acknowledge_when_staged),
    "deadline by the wall clock": Planted("clocks", deadline_by_the_wall_clock),
}
