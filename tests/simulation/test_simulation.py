"""A slice of the simulation: the promises hold in its worlds, and each planted fault is noticed."""

from collections import Counter

import pytest

from .actors import Process
from .campaign import PLANTS, WORLDS, first_noticed, play
from .oracle import RestoreOracle
from .seams import installed

SEEDS = range(1, 201)
MORE_SEEDS = range(201, 501)
HAPPENINGS = (
    "acknowledged",
    "retired",
    "failed by FencedError",
    "power",
    "kill",
    "freeze",
    "cut off",
)
AND_ON = {
    "disk": ("rebased", "replaced"),
    "objects": ("calls late", "calls again", "calls lost", "replaced"),
    "tiers": (
        *("calls late", "calls again", "lost disks", "damaged files"),
        "the store does not answer",
    ),
    "tiers-disk": ("lost disks", "damaged files", "the store does not answer"),
    "tiers-hosts": ("lost disks", "damaged files", "went back"),
}
ENOUGH = 8000  # worlds; most are noticed within some hundred
# One of many thousand worlds notices it: where to begin looking.
FROM = {
    ("disk", "retention leaves no mark"): 47_001,
    ("disk", "retention leaves pending links"): 1_201,
    ("disk", "last check before the manifest is synced"): 1_901,
    ("disk", "pending manifests are not revoked"): 2_201,
    ("disk", "no fsync of directories that others made"): 1_001,
    ("objects", "a save puts no bar before its last look"): 38_301,
    ("objects", "no look at the deadline"): 5_301,
    ("objects", "a new job bars nothing"): 2_001,
    ("tiers", "nobody looks whether data is damaged"): 20,
    ("tiers", "the store is taken with the first upload"): 5_901,
    ("tiers", "local steps of another past count"): 2_751,
    ("tiers-disk", "the store is taken with the first upload"): 4_751,
    ("tiers-disk", "local steps of another past count"): 11_201,
    ("tiers-disk", "what another copy published is not synced"): 14_201,
}
# One of thousands of worlds notices it; `campaign.py --plant` finds it.
RARE = (
    "data of dead saves goes unbarred",
    "a removal is not announced",
    "copies share the name of what is pending",
    "an upload takes files away by their names",
    "what is in the store is not synced",
)


@pytest.mark.parametrize("on", WORLDS)
def test_every_promise_holds_in_every_world(on: str) -> None:
    counts, failing = play(SEEDS, on)
    assert failing == []
    assert [what for what in (*HAPPENINGS, *AND_ON[on]) if not counts[what]] == []


@pytest.mark.parametrize("on", WORLDS)
def test_every_promise_holds_in_more_worlds(on: str) -> None:
    _, failing = play(MORE_SEEDS, on)
    assert failing == []


@pytest.mark.parametrize(
    ("newest", "least"), [((1, 0, 1), 0), ((1, 0, 0), 0), ((1, 2, 3), 1), ((3, 2, 2), 2)]
)
def test_a_restore_has_to_find_what_was_promised_all_the_while(
    newest: tuple[int, ...], least: int
) -> None:
    process = Process("1.0", job=1, rank=0)
    oracle = RestoreOracle(None, None, "", Counter[str]())
    told = iter(newest)
    oracle.promised = lambda job: next(told)  # type: ignore[method-assign]
    oracle.restoring(process)
    oracle.lower()
    assert oracle.restored(process) == least


@pytest.mark.parametrize("on", WORLDS)
def test_a_seed_plays_the_same_world_again(on: str) -> None:
    traces = []
    with installed():
        for _ in range(2):
            world = WORLDS[on](2, Counter(), traced=True)
            world.play()
            traces.append(world.scheduler.trace)
    assert traces[0] and traces[0] == traces[1]


@pytest.mark.parametrize(
    ("on", "name"), [(on, name) for on in WORLDS for name in PLANTS[on] if name not in RARE]
)
def test_a_planted_fault_is_noticed(on: str, name: str) -> None:
    first = FROM.get((on, name), 1)
    found = first_noticed(name, range(first, first + ENOUGH), on)
    assert found is not None
    assert "Traceback" not in found[1]  # else what is planted is broken itself
