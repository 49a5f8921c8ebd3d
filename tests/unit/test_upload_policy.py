"""Which step goes up next, and which stay on the local disk."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Keep
from holdfast.errors import OptionError
from holdfast.runs.upload_policy import Tiers, lasting, next_up, spared, stays, wait_s, wanted


def tiers(
    local: Sequence[int], store: Sequence[int] = (), bases: Mapping[int, int] | None = None
) -> Tiers:
    return Tiers(local, store, {}, bases or {})


@pytest.mark.parametrize(
    ("local", "store", "keep", "expected"),
    [
        ([], [], Keep.all(), None),
        ([1, 2, 3], [], Keep.all(), 3),
        ([1, 2, 3], [3], Keep.all(), 2),
        ([1, 2, 3], [1, 2, 3], Keep.all(), None),
        ([1, 2, 3], [3], Keep.latest(1), None),
        ([1, 2, 3], [], Keep.latest(1), 3),
        ([10, 13, 14], [14], Keep.latest(1) | Keep.every(10), 10),
        ([1, 2], [5], Keep.latest(1), None),  # the store is ahead: another host saved that
    ],
)
def test_the_newest_step_goes_up_first_and_none_that_would_not_be_kept(
    local: list[int], store: list[int], keep: Keep, expected: int | None
) -> None:
    assert next_up(tiers(local, store), keep) == expected


def test_a_base_goes_up_before_its_deltas() -> None:
    keep = Keep.all()
    bases = {2: 1, 3: 2}
    assert next_up(tiers([1, 2, 3], [], bases), keep) == 1
    assert next_up(tiers([1, 2, 3], [1], bases), keep) == 2
    assert next_up(tiers([1, 2, 3], [1, 2], bases), keep) == 3
    assert next_up(tiers([2, 3], [], bases), keep) is None  # the base is nowhere


def test_a_step_that_a_metric_keeps_goes_up() -> None:
    keep = Keep.latest(1) | Keep.best("loss", 1)
    metrics = {1: {"loss": 0.1}, 2: {"loss": 0.5}, 3: {"loss": 0.3}}
    assert wanted(Tiers([1, 2, 3], [], metrics, {}), keep) == [3, 1]


def test_the_local_disk_keeps_the_newest_and_what_waits_for_its_upload() -> None:
    keep = Keep.every(10) | Keep.latest(1) | Keep.local(2)
    local = [10, 11, 12, 13]
    assert stays(tiers(local), keep, None, is_full=False) == {10, 12, 13}
    assert stays(tiers(local, [10]), keep, None, is_full=False) == {12, 13}
    assert stays(tiers(local, [10]), keep, 11, is_full=False) == {11, 12, 13}
    assert stays(tiers(local), keep, 11, is_full=True) == {11, 13}


@given(
    st.sets(st.integers(0, 40)),
    st.sets(st.integers(0, 40)),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([Keep.all(), Keep.latest(1), Keep.latest(3), Keep.every(4)]),
)
def test_the_local_disk_never_holds_more_than_it_may(
    local: set[int], store: set[int], count: int, is_full: bool, keep: Keep
) -> None:
    both = keep | Keep.local(count)
    found = Tiers(sorted(local), sorted(store), {}, {})
    going = next_up(found, both)
    kept = stays(found, both, going, is_full=is_full)
    lasts = going in lasting(found, both)
    assert len(kept) <= (3 if lasting(found, both) else 2) * count + 1
    if local:
        assert max(local) in kept
    if going is not None:
        assert going in kept
        # What is newer is in the store, or the policy lets go of it; or this one was passed over.
        newer = {s for s in local - store if s > going}
        is_next = not newer & both.kept(sorted(local | store), {})
        assert is_next or (lasts and going < max(store, default=-1))


@pytest.mark.parametrize("took_s", [4, 19, 25, 40, 45])
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_lasts_goes_up_however_fast_newer_ones_come(took_s: int, count: int) -> None:
    """Every 10 s a step is saved; of every tenth, the policy keeps all."""
    keep = Keep.latest(2) | Keep.every(10) | Keep.local(count)
    local, store, going, ends, oldest = list[int](), set[int](), None, 0, 0
    for now in range(10, 20_000):
        has_ended, has_saved = going is not None and now >= ends, now % 10 == 0
        if going is not None and has_ended:
            store.add(going)
            store &= keep.kept(sorted(store), {}) | spared(tiers(local, sorted(store)), keep)
            going = None
        if has_saved:
            local.append(now // 10)
        if has_ended or has_saved:  # else nothing has changed
            if going is None:
                going, ends = next_up(tiers(local, sorted(store)), keep), now + took_s
            local = sorted(stays(tiers(local, sorted(store)), keep, going, is_full=False))
        if now > 1000:
            oldest = max(oldest, now - 10 * max(store))
    assert {step for step in range(10, 1990, 10)} <= store
    assert oldest <= 3 * took_s + 10


ORDINARY = [
    Keep.latest(1),
    Keep.latest(1) | Keep.every(4),
    Keep.latest(2) | Keep.best("loss", 2),
    Keep.every(3) | Keep.best("loss", 1),
]
# What they keep of a step changes as others go, so a step may be wanted again.
FICKLE = [
    Keep((lambda steps, _: set(steps[::2]),), "every other"),
    Keep((lambda steps, _: set(steps[: len(steps) // 2]),), "the older half"),
]


@given(
    st.sets(st.integers(0, 30), max_size=12),
    st.sets(st.integers(0, 30), max_size=12),
    st.sets(st.integers(0, 30), max_size=8),
    st.sampled_from([*ORDINARY, *FICKLE]),
)
def test_uploads_come_to_an_end_and_no_step_goes_up_twice(
    local: set[int], store: set[int], deltas: set[int], keep: Keep
) -> None:
    here, before, ups = sorted(local), len(store), list[int]()
    metrics = {step: {"loss": float(step % 5)} for step in range(31)}
    bases = {s: older for older, s in pairwise(here) if s in deltas}

    def found() -> Tiers:
        return Tiers(here, sorted(store), metrics, bases)

    asked = set(wanted(found(), keep))
    while (step := next_up(found(), keep)) is not None:
        ups.append(step)
        store = store | {step}
        stay = keep.kept(sorted(store), metrics) | spared(found(), keep)
        while more := {bases[s] for s in stay & set(bases)} - stay:  # as `Run` adds them
            stay |= more
        store &= stay
        if keep in ORDINARY:
            assert len(ups) == len(set(ups)), ups
        assert len(ups) <= len(local) * (before + 1)
    if keep in ORDINARY:
        assert asked & set(ups) <= store
        assert {s for s in asked if bases.get(s) is None} <= store


def test_how_many_stay_is_said_beside_the_policy_of_the_store() -> None:
    for keep in (Keep.latest(3) | Keep.local(5), Keep.local(5) | Keep.latest(3)):
        assert keep.kept([1, 2, 3, 4], {}) == {2, 3, 4}
        assert keep.local_steps == 5
    assert (Keep.latest(3) | Keep.every(2)).local_steps == 2
    assert (Keep.all() | Keep.local(5)).keeps_all
    assert (Keep.local(1) | Keep.local(4)).local_steps == 4
    assert (Keep.local(1) | Keep.local(4) | Keep.latest(1)).kept([1, 2], {}) == {2}
    assert (Keep.latest(1) | Keep.all() | Keep.local(4)).keeps_all
    assert repr(Keep.latest(3) | Keep.local(5)) == "Keep.latest(3) | Keep.local(5)"
    with pytest.raises(OptionError, match=r"Keep.local is given 0; expected an integer from 1"):
        Keep.local(0)


@pytest.mark.parametrize(
    ("age_s", "interval_s", "took_s", "expected"),
    [
        (9.4, 10, 19.4, 0.6 + 2.5),  # the next save is near
        (4.9, 10, 19.4, 0.0),  # the last save is nearer
        (12.5, 10, 19.4, 0.0),  # it has not come in time
        (0.0, 10, 19.4, 0.0),
        (9.4, 10, 9.4, 0.0),  # uploads keep up with saves
        (9.4, 10, 10.1, 0.6 + 2.5),
        (50.0, 0.0, 19.4, 0.0),  # no other save, or no upload, was measured
        (9.4, 10, 0.0, 0.0),
    ],
)
def test_an_upload_waits_for_a_step_that_is_near(
    age_s: float, interval_s: float, took_s: float, expected: float
) -> None:
    assert wait_s(age_s, interval_s, took_s) == pytest.approx(expected)


@given(st.floats(1.0, 200.0))
def test_waits_for_fresher_steps_leave_the_store_no_older_on_average(took_s: float) -> None:
    waiting, _ = ages(took_s, waits=True)
    at_once, _ = ages(took_s, waits=False)
    assert waiting <= at_once * 1.005  # the last of 400 uploads ends somewhere


@given(st.integers(1, 20), st.floats(5.5, 9.9))
def test_waits_for_fresher_steps_pay_where_uploads_end_late_between_two_saves(
    count: int, more_s: float
) -> None:
    took_s = count * 10 + more_s
    mean_s, longest_s = ages(took_s, waits=True)
    assert mean_s == pytest.approx(took_s + (count + 1) * 5)
    assert longest_s == pytest.approx(took_s + (count + 1) * 10)
    assert mean_s < ages(took_s, waits=False)[0] - 1


def test_uploads_that_end_just_before_a_save_leave_the_store_no_two_saves_behind() -> None:
    assert ages(19.4, waits=True)[1] == pytest.approx(20 + 19.4)
    assert ages(19.4, waits=False)[1] > 48


def ages(took_s: float, *, waits: bool, interval_s: float = 10.0) -> tuple[float, float]:
    """Return how old the newest step in the store is on average, and at most."""
    now, longest, area, began, replaced, shown = 0.0, 0.0, 0.0, took_s, took_s, 0.0
    for number in range(400):
        while True:
            newest = floor(now / interval_s + 1e-9) * interval_s
            if number and newest <= shown:
                now = newest + interval_s
            elif waits and (wait := wait_s(now - newest, interval_s, took_s if number else 0.0)):
                now = min(now + wait, newest + interval_s)
            else:
                break
        now += took_s
        if number:
            longest = max(longest, now - shown)
            area += ((now - shown) ** 2 - (replaced - shown) ** 2) / 2
        shown, replaced = newest, now
    return area / (replaced - began), longest
