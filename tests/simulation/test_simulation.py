"""A slice of the simulation: the promises hold in its worlds, and each planted fault is noticed."""

from collections import Counter

import pytest

from .campaign import first_noticed, play
from .plants import PLANTS
from .seams import installed
from .worlds import World

SEEDS = range(1, 501)
HAPPENINGS = (
    "acknowledged",
    "retired",
    "failed by FencedError",
    "power",
    "kill",
    "freeze",
    "cut off",
    "rebased",
    "replaced",
)
ENOUGH = 8000  # worlds; most are noticed within some hundred
# One of many thousand worlds notices it: where to begin looking.
FROM = {"retention leaves no mark": 322_001, "retention leaves pending links": 9_401}
# One of thousands of worlds notices it; `campaign.py --plant` finds it.
RARE = ("data of dead saves goes unbarred",)


def test_every_promise_holds_in_every_world() -> None:
    counts, failing = play(SEEDS)
    assert failing == []
    assert [what for what in HAPPENINGS if not counts[what]] == []


def test_a_seed_plays_the_same_world_again() -> None:
    traces = []
    with installed():
        for _ in range(2):
            world = World(2, Counter(), traced=True)
            world.play()
            traces.append(world.scheduler.trace)
    assert traces[0] and traces[0] == traces[1]


@pytest.mark.parametrize("name", [name for name in PLANTS if name not in RARE])
def test_a_planted_fault_is_noticed(name: str) -> None:
    first = FROM.get(name, 1)
    assert first_noticed(name, range(first, first + ENOUGH)) is not None
