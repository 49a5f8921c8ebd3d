"""The last save of a run: when the job's time is up, and what it is made of."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Keep, Options
from holdfast.errors import AlreadyCommittedError, StoreError
from holdfast.testing import Fault, faulty

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=32 << 20)
BROKEN = Fault("write", nth=1, action="fail", argument=errno.EIO, persistent=True)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((4000,), float(step)), "step": step}


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
