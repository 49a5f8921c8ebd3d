"""Sixteen processes save one path at once: one commits, the others say so and leave nothing."""

import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

from crash_content import OPTIONS, load_number, make_state

import holdfast
from holdfast.errors import AlreadyCommittedError
from holdfast.testing import Fault, faulty

RACERS, ROUNDS = 16, int(os.environ.get("CRASH_ROUNDS", "20"))
LINK_DELAY_MS = 30  # so that most are past the first look when the first one commits


def race(root: str, racer: int, barrier: Barrier, results: "multiprocessing.SimpleQueue") -> None:
    """Save in every round; tell what came of it."""
    for number in range(ROUNDS):
        barrier.wait()
        result = "committed"
        delay = LINK_DELAY_MS if number % 2 else 0
        with faulty(Fault("link", action="delay", argument=delay)):
            try:
                holdfast.save(make_state(racer), f"{root}/place-{number}", options=OPTIONS)
            except AlreadyCommittedError as error:
                result = "late" if "another save during" in str(error) else "refused"
            except BaseException as error:
                result = repr(error)
        results.put((number, racer, result))


def test_of_sixteen_that_race_exactly_one_commits(scratch: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(RACERS), context.SimpleQueue()
    processes = [
        context.Process(target=race, args=(str(scratch), racer, barrier, results))
        for racer in range(RACERS)
    ]
    for process in processes:
        process.start()
    told = [results.get() for _ in range(RACERS * ROUNDS)]
    for process in processes:
        process.join()
    assert {result for _, _, result in told} == {"committed", "late", "refused"}
    for number in range(ROUNDS):
        (winner,) = [racer for n, racer, result in told if (n, result) == (number, "committed")]
        place = scratch / f"place-{number}"
        assert load_number(place) == winner
        assert sorted(path.name for path in place.iterdir()) == ["MANIFEST", "data"]
        assert len(list((place / "data").iterdir())) == 1
