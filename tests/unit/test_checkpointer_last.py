"""The last save of a run: when the job's time is up, and what it is made of."""

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Keep, Options
from holdfast.errors import AlreadyCommittedError, StoreError
from holdfast.runs.directory import Run
from holdfast.runs.schedule import MARGIN_S
from holdfast.saving.handle import SaveHandle
from holdfast.saving.save import start_save
from holdfast.testing import Fault, faulty

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=32 << 20)
BROKEN = Fault("write", nth=1, action="fail", argument=errno.EIO, persistent=True)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((4000,), float(step)), "step": step}


def fail_in_the_background(checkpointer: Checkpointer, step: int) -> None:
    """Save a step to a broken disk, and see it fail, without being told."""
    with faulty(BROKEN):
        assert checkpointer.step(step, state_at(step))
        assert checkpointer._saver._flight is not None
        checkpointer._saver._flight.handle.wait_done()


def value_of(checkpointer: Checkpointer, step: int) -> float:
    with holdfast.open(checkpointer.path(step)) as checkpoint:
        assert checkpoint.verify() == []
        return float(checkpoint.tensor("w")[0])


def test_the_end_of_the_job_is_met_with_one_last_save(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every=100, ends_in_s=3.0, options=SMALL) as checkpointer:
        assert not checkpointer.stopping
        assert checkpointer.step(1, state_at(1)) and checkpointer.stopping
        assert checkpointer.steps() == [1]
        assert not checkpointer.step(2, state_at(2)), "once"
    with Checkpointer(new_path(), every=100, ends_in_s=3600.0, options=SMALL) as checkpointer:
        assert not checkpointer.step(1, state_at(1)) and not checkpointer.stopping


def test_a_last_save_is_made_of_a_step_that_was_saved_before_and_retired(
    new_path: NewPath,
) -> None:
    with Checkpointer(new_path(), every=2, ends_in_s=1e6, options=SMALL) as checkpointer:
        assert checkpointer.step(2, state_at(2))
        assert checkpointer.retire_after(1) == [2]
        checkpointer._schedule._ends = 0.0
        assert checkpointer.step(2, state_at(7)) and checkpointer.stopping
        assert value_of(checkpointer, 2) == 7.0


def test_a_last_save_of_a_step_of_a_future_that_was_left_is_refused_loudly(
    new_path: NewPath,
) -> None:
    with Checkpointer(new_path(), every=2, ends_in_s=1e6, options=SMALL) as checkpointer:
        assert checkpointer.step(2, state_at(2)) and checkpointer.step(4, state_at(4))
        assert checkpointer.restore(state_at(0), step=2) == 2
        checkpointer._schedule._ends = 0.0
        with pytest.raises(AlreadyCommittedError, match=r"call retire_after\(step\) first"):
            checkpointer.step(4, state_at(7))
        assert value_of(checkpointer, 4) == 4.0


def test_what_save_takes_is_measured_too(new_path: NewPath) -> None:
    delay = Fault("sync", nth=1, action="delay", argument=150)
    with faulty(delay), Checkpointer(new_path(), ends_in_s=1e6, options=SMALL) as checkpointer:
        checkpointer.save(1, state_at(1))
    schedule = checkpointer._schedule
    schedule._made -= 1e6
    schedule._ends = schedule._clock() + 60.0
    assert not schedule.ending(), "measured: nothing like a minute"
    schedule._ends = schedule._clock() + MARGIN_S + 0.15
    assert schedule.ending()


def test_a_last_save_does_without_the_metrics_that_the_policy_looks_at(new_path: NewPath) -> None:
    keep = Keep.best("loss", 1)
    with Checkpointer(new_path(), keep=keep, ends_in_s=3.0, options=SMALL) as checkpointer:
        assert checkpointer.step(1, state_at(1))
    assert checkpointer.steps() == [1]


def test_a_last_save_that_fails_says_so_and_training_is_to_end_all_the_same(
    new_path: NewPath,
) -> None:
    with Checkpointer(new_path(), ends_in_s=3.0, options=SMALL) as checkpointer:
        with faulty(BROKEN), pytest.raises(StoreError, match="Input/output error"):
            checkpointer.step(1, state_at(1))
        assert checkpointer.stopping


def test_a_last_save_that_waits_for_another_ends_by_the_end_of_the_job_all_the_same(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = []

    def start(*arguments: Any) -> SaveHandle:
        handle = start_save(*arguments)
        deadlines.append(handle.deadline)
        return handle

    monkeypatch.setattr("holdfast.runs.saver.start_save", start)
    delay = Fault("sync", nth=1, action="delay", argument=1000)
    with Checkpointer(new_path(), every=1, ends_in_s=1e6, options=SMALL) as checkpointer:
        schedule = checkpointer._schedule
        with faulty(delay):
            assert checkpointer.step(1, state_at(1))
            ends = schedule._ends = schedule._clock() + MARGIN_S
            assert checkpointer.step(2, state_at(2)) and checkpointer.stopping
    assert checkpointer.steps() == [1, 2]
    assert deadlines[1] < ends + 0.5, "not so much later as the save before took"


@pytest.mark.parametrize("stage", ["eager", "sync"])
def test_a_last_save_tells_of_the_failure_of_the_save_before(new_path: NewPath, stage: Any) -> None:
    with Checkpointer(new_path(), every=1, ends_in_s=1e6, options=SMALL) as checkpointer:
        fail_in_the_background(checkpointer, 1)
        checkpointer._saver._request = replace(checkpointer._saver._request, stage=stage)
        checkpointer._schedule._ends = 0.0
        with pytest.raises(StoreError, match="Input/output error") as raised:
            checkpointer.step(2, state_at(2))
        assert "the background save of step 1" in str(raised.value.__notes__)
        assert checkpointer.stopping and checkpointer.steps() == [2]
        checkpointer.wait()


def test_save_of_a_step_that_is_being_saved_waits_for_it(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    delay = Fault("write", nth=1, action="delay", argument=200, persistent=True)
    with faulty(delay), Checkpointer(new_path(), every=2, options=SMALL) as checkpointer:
        assert checkpointer.step(2, state_at(2)) and checkpointer.steps() == []
        with caplog.at_level(logging.INFO, "holdfast"):
            checkpointer.save(2, state_at(2))
        assert checkpointer.steps() == [2] and "step 2 is saved already" in caplog.text
        checkpointer.save(3, state_at(3))
        checkpointer.save(3, state_at(3))
        assert checkpointer.restore(state_at(0), step=2) == 2
        checkpointer.save(2, state_at(2))
        with pytest.raises(AlreadyCommittedError, match=r"call retire_after\(step\) first"):
            checkpointer.save(3, state_at(3))


def test_save_of_a_step_whose_save_failed_saves_it_and_tells_of_that(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every=1, options=SMALL) as checkpointer:
        fail_in_the_background(checkpointer, 1)
        with pytest.raises(StoreError, match="Input/output error"):
            checkpointer.save(1, state_at(1))
        assert value_of(checkpointer, 1) == 1.0
        checkpointer.save(1, state_at(1))


def test_save_of_a_restored_step_tells_of_a_failure_too(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every=1, options=SMALL) as checkpointer:
        checkpointer.save(1, state_at(1))
        fail_in_the_background(checkpointer, 2)
        assert checkpointer.restore(state_at(0)) == 1
        with pytest.raises(StoreError, match="Input/output error"):
            checkpointer.save(1, state_at(1))
        checkpointer.save(1, state_at(1))


def test_what_follows_a_commit_may_take_longer_than_the_save_is_given(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, tidied = threading.Event(), threading.Event()
    tidy = Run.tidy

    def tidy_slowly(run: Run, step: int) -> None:
        committed.set()
        assert tidied.wait(30)
        tidy(run, step)

    monkeypatch.setattr(Run, "tidy", tidy_slowly)
    with Checkpointer(new_path(), every=1, keep=Keep.latest(1), options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
        assert checkpointer._saver._flight is not None and committed.wait(30)
        handle = checkpointer._saver._flight.handle
        handle.deadline -= 1e6  # it has passed long ago
        assert handle.progress().state == "committed" and not handle.done()
        threading.Timer(0.1, tidied.set).start()
        checkpointer.wait()
        assert tidied.is_set() and checkpointer.steps() == [1]
