"""When a save is due: pure, with a clock that goes only when it is told to."""

import math
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import OptionError, StoreError
from holdfast.runs.schedule import (
    FREE_STEPS,
    MARGIN_S,
    RECENT_SAVES,
    RECENT_STEPS,
    STEPS_AHEAD,
    UNMEASURED_S,
    Schedule,
    interval_s,
)


class Clock:
    """Stands still between calls of `go`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def go(self, seconds: float) -> None:
        self.now_s += seconds


def take_step(schedule: Schedule, clock: Clock, seconds: float) -> None:
    """Train for so long, between the end of one call of `step` and the begin of the next."""
    schedule.end_step()
    clock.go(seconds)
    schedule.begin_step()


def make_save(
    schedule: Schedule,
    clock: Clock,
    *,
    stall_s: float,
    steps_s: list[float],
    held_s: float = 0.0,
) -> None:
    """Save with a stall at the call, in flight during some steps."""
    started = clock.now_s
    schedule.try_save()
    clock.go(stall_s - held_s)
    schedule.begin_flight()
    for seconds in steps_s:
        take_step(schedule, clock, seconds)
    schedule.end_flight(clock.now_s - started, stall_s, held_s)


def test_steps_are_due_by_their_number_alone() -> None:
    schedule = Schedule(50)
    assert [step for step in range(1, 201) if schedule.due_at(step)] == [50, 100, 150, 200]
    assert not schedule.due_now() and not schedule.by_clock


def test_none_is_due_when_only_save_saves() -> None:
    schedule = Schedule(None)
    assert not schedule.due_at(0) and not schedule.due_now() and not schedule.ending()


def test_a_time_is_counted_from_the_start_of_the_save_before() -> None:
    clock = Clock()
    schedule = Schedule(timedelta(minutes=10), clock=clock)
    assert schedule.by_clock and not schedule.due_at(0)
    clock.go(599)
    assert not schedule.due_now()
    clock.go(1)
    assert schedule.due_now()
    make_save(schedule, clock, stall_s=60.0, steps_s=[])
    clock.go(539)
    assert not schedule.due_now()
    clock.go(1)
    assert schedule.due_now()


def test_a_save_that_fails_is_not_tried_again_at_once() -> None:
    clock = Clock()
    both: list[Any] = [timedelta(seconds=60), "auto"]
    for every in both:
        schedule = Schedule(every, clock=clock)
        clock.go(60)
        schedule.try_save()
        assert not schedule.due_now() and not schedule.due_at(1)
        clock.go(max(60.0, UNMEASURED_S))
        assert schedule.due_now()


def test_auto_saves_the_first_step_to_measure() -> None:
    clock = Clock()
    schedule = Schedule("auto", clock=clock)
    assert schedule.due_at(7) and not schedule.due_now()
    schedule.try_save()
    schedule.begin_flight()
    clock.go(1e6)
    assert not schedule.due_at(8)
    assert not schedule.due_now(), "the first is in flight"


def test_auto_keeps_to_the_share_of_training_it_may_cost() -> None:
    clock = Clock()
    schedule = Schedule("auto", overhead=0.03, clock=clock)
    make_save(schedule, clock, stall_s=0.6, steps_s=[1.0] * 5)
    assert schedule.interval_s() == pytest.approx(0.6 / 0.03)
    for _ in range(FREE_STEPS):
        take_step(schedule, clock, 1.0)
    clock.go(20.0 - 5.7 - FREE_STEPS)
    assert not schedule.due_now()
    clock.go(0.2)
    assert schedule.due_now()


def test_auto_counts_what_a_save_slows_down_the_steps_beside_it() -> None:
    clock = Clock()
    schedule = Schedule("auto", overhead=0.01, clock=clock)
    for _ in range(10):
        take_step(schedule, clock, 1.0)
    make_save(schedule, clock, stall_s=0.5, steps_s=[1.2, 1.2, 1.2])
    take_step(schedule, clock, 1.0)
    assert schedule.interval_s() == pytest.approx((0.5 + 3 * 0.2) / 0.01)


def run_auto(clock: Clock, *, step_s: float, slowed_s: float, save_steps: int) -> float:
    """Train with saves that hold nothing up, but slow down steps; return what they cost of all."""
    schedule, flying, cost_s, began_s = Schedule("auto", clock=clock), 0, 0.0, clock.now_s
    for step in range(1, 3000):
        if flying == 0 and schedule._flight is not None:
            schedule.end_flight(save_steps * slowed_s, 0.0)
        if schedule.due_at(step) or schedule.due_now():
            schedule.try_save()
            schedule.begin_flight()
            flying = save_steps
        seconds = slowed_s if flying else step_s
        cost_s += seconds - step_s
        take_step(schedule, clock, seconds)
        flying = max(0, flying - 1)
    return cost_s / (clock.now_s - began_s)


def test_auto_keeps_to_that_share_though_it_begins_with_a_save() -> None:
    """Saves back to back would leave no step to compare with."""
    share = run_auto(Clock(), step_s=1.0, slowed_s=1.5, save_steps=10)
    assert 0.01 < share <= 0.031


def test_what_a_save_has_cost_stays_what_it_was_when_steps_change() -> None:
    clock = Clock()
    schedule = Schedule("auto", overhead=0.01, clock=clock)
    make_save(schedule, clock, stall_s=0.5, steps_s=[1.2, 1.2, 1.2])
    for _ in range(FREE_STEPS):
        take_step(schedule, clock, 1.0)
    assert schedule.interval_s() == pytest.approx((0.5 + 3 * 0.2) / 0.01)
    for _ in range(RECENT_STEPS):
        take_step(schedule, clock, 4.0)
    assert schedule.interval_s() == pytest.approx((0.5 + 3 * 0.2) / 0.01)


def test_auto_counts_a_step_that_waited_for_a_lazy_copy_once() -> None:
    clock = Clock()
    schedule = Schedule("auto", overhead=0.01, clock=clock)
    for _ in range(10):
        take_step(schedule, clock, 1.0)
    make_save(schedule, clock, stall_s=0.5, held_s=0.4, steps_s=[1.4, 1.0])
    assert schedule.interval_s() == pytest.approx(0.5 / 0.01)


def test_auto_never_lets_saves_overlap() -> None:
    clock = Clock()
    schedule = Schedule("auto", overhead=0.5, clock=clock)
    make_save(schedule, clock, stall_s=0.0, steps_s=[1.0] * 30)
    assert schedule.interval_s() == pytest.approx(30.0)


def test_auto_is_not_misled_by_one_dear_save() -> None:
    """The first one touches new memory; another meets an evaluation."""
    clock = Clock()
    schedule = Schedule("auto", overhead=0.1, clock=clock)
    make_save(schedule, clock, stall_s=50.0, steps_s=[1.0])
    assert schedule.interval_s() == pytest.approx(500.0)
    for _ in range(3):
        make_save(schedule, clock, stall_s=0.5, steps_s=[1.0])
    assert schedule.interval_s() == pytest.approx(5.0)
    make_save(schedule, clock, stall_s=0.5, steps_s=[1.0, 600.0])
    assert schedule.interval_s() == pytest.approx(5.0)


def test_with_a_mean_time_between_failures_the_interval_is_that_of_young_and_daly() -> None:
    assert interval_s(2.0, 1.0, overhead=1.0, mtbf_s=10_000.0) == pytest.approx(200.0)
    assert interval_s(2.0, 1.0, overhead=0.001, mtbf_s=10_000.0) == pytest.approx(2000.0)
    assert interval_s(2.0, 1.0, overhead=1.0, mtbf_s=None) == pytest.approx(2.0)
    assert interval_s(0.0, 7.0, overhead=1.0, mtbf_s=10_000.0) == pytest.approx(7.0)


@pytest.mark.parametrize("mtbf_s", [600.0, 86_400.0])
def test_no_other_interval_loses_less_to_saves_and_failures(mtbf_s: float) -> None:
    """Young's first order: C / T for saves, T / 2 M for work done again."""
    cost_s = 3.0
    best_s = interval_s(cost_s, 0.0, overhead=1e9, mtbf_s=mtbf_s)

    def lost(seconds: float) -> float:
        return cost_s / seconds + seconds / (2 * mtbf_s)

    assert all(lost(best_s) <= lost(best_s * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_the_last_save_begins_in_time() -> None:
    clock = Clock()
    schedule = Schedule(None, ends_in_s=1000.0, clock=clock)
    for _ in range(5):
        take_step(schedule, clock, 2.0)
    make_save(schedule, clock, stall_s=1.0, steps_s=[2.0] * 10)
    needed_s = 21.0 * 1.5 + STEPS_AHEAD * 2.0 + MARGIN_S
    clock.go(schedule.left_s - needed_s - 0.1)
    assert not schedule.ending()
    clock.go(0.2)
    assert schedule.ending()


def test_the_last_save_leaves_time_for_the_one_in_flight() -> None:
    clock = Clock()
    schedule = Schedule(None, ends_in_s=1000.0, clock=clock)
    make_save(schedule, clock, stall_s=1.0, steps_s=[2.0] * 10)
    schedule.try_save()
    schedule.begin_flight()
    clock.go(schedule.left_s - 2 * 21.0 * 1.5 - STEPS_AHEAD * 2.0 - MARGIN_S - 0.1)
    assert not schedule.ending()
    clock.go(0.2)
    assert schedule.ending()


def test_the_longest_of_all_saves_counts_whoever_made_it() -> None:
    clock = Clock()
    schedule = Schedule(None, ends_in_s=10_000.0, clock=clock)
    schedule.measure(300.0)
    for _ in range(RECENT_SAVES + 1):
        make_save(schedule, clock, stall_s=1.0, steps_s=[2.0] * 10)
    clock.go(schedule.left_s - 300.0 * 1.5 - STEPS_AHEAD * 2.0 - MARGIN_S - 0.1)
    assert not schedule.ending()
    clock.go(0.2)
    assert schedule.ending()


def test_a_job_that_has_saved_nothing_yet_ends_in_time_too() -> None:
    clock = Clock()
    for ends_in_s, needed_s in ((100.0, 10.0), (10_000.0, UNMEASURED_S)):
        schedule = Schedule(None, ends_in_s=ends_in_s, clock=clock)
        clock.go(ends_in_s - needed_s * 1.5 - MARGIN_S - 0.1)
        assert not schedule.ending()
        clock.go(0.2)
        assert schedule.ending()


def upload(schedule: Schedule, clock: Clock, seconds: float) -> None:
    schedule.uploads.measure(lambda step: clock.go(seconds), 1)


def ends_within(schedule: Schedule, clock: Clock, needed_s: float) -> bool:
    """Return whether the last save begins when so much time is left, and not before."""
    clock.go(schedule.left_s - needed_s - 0.1)
    is_early = schedule.ending()
    clock.go(0.2)
    return schedule.ending() and not is_early


def test_the_last_save_leaves_time_for_two_uploads() -> None:
    clock = Clock()
    schedule = Schedule(None, ends_in_s=10_000.0, clock=clock)
    schedule.uploads.limit_s = 1800.0
    schedule.measure(20.0)
    for seconds in (100.0, 300.0, 50.0):
        upload(schedule, clock, seconds)
    assert ends_within(schedule, clock, 20.0 * 1.5 + 2 * 300.0 * 1.5 + MARGIN_S)


def test_before_the_first_upload_the_last_save_leaves_time_for_its_own() -> None:
    clock = Clock()
    schedule = Schedule(None, ends_in_s=10_000.0, clock=clock)
    schedule.uploads.limit_s = 1800.0
    schedule.measure(20.0)
    assert ends_within(schedule, clock, 20.0 * 1.5 + UNMEASURED_S * 1.5 + MARGIN_S)


def test_an_upload_under_way_counts_as_soon_as_it_is_the_longest() -> None:
    clock = Clock()
    schedule = Schedule(None, ends_in_s=10_000.0, clock=clock)
    schedule.uploads.limit_s = 9000.0
    schedule.measure(20.0)
    upload(schedule, clock, 100.0)
    seen: list[bool] = []

    def slow(step: int) -> None:
        for seconds in (1000.0, 2000.0):
            clock.go(seconds)
            seen.append(schedule.ending())

    schedule.uploads.measure(slow, 2)
    assert seen == [False, True]


def test_nobody_leaves_more_time_for_uploads_than_they_are_waited_for() -> None:
    clock = Clock()
    schedule = Schedule(None, ends_in_s=10_000.0, clock=clock)
    schedule.uploads.limit_s = 100.0
    schedule.measure(20.0)
    upload(schedule, clock, 1000.0)
    assert ends_within(schedule, clock, 20.0 * 1.5 + 100.0 + MARGIN_S)


def test_an_upload_that_fails_says_nothing_of_others() -> None:
    clock = Clock()
    schedule = Schedule(None, ends_in_s=10_000.0, clock=clock)
    schedule.uploads.limit_s = 1800.0
    schedule.measure(20.0)
    upload(schedule, clock, 10.0)

    def fail(step: int) -> None:
        clock.go(500.0)
        raise StoreError("it is away")

    with pytest.raises(StoreError):
        schedule.uploads.measure(fail, 2)
    assert ends_within(schedule, clock, 20.0 * 1.5 + 2 * 10.0 * 1.5 + MARGIN_S)


def test_without_an_end_there_is_no_last_save() -> None:
    schedule = Schedule(10)
    assert schedule.left_s == math.inf and not schedule.ending()


@pytest.mark.parametrize(
    "arguments",
    [
        {"every": 0},
        {"every": 2.0},
        {"every": True},
        {"every": "often"},
        {"every": timedelta(0)},
        {"every": "auto", "overhead": 0},
        {"every": "auto", "overhead": "3 %"},
        {"every": "auto", "mtbf_s": -1},
        {"every": 10, "mtbf_s": 3600},
        {"every": 10, "ends_in_s": 0},
        {"every": 10, "ends_in_s": True},
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=list(arguments)[-1]):
        Schedule(**arguments)
