"""One more save when training fails: of a whole step or none; the user's exception comes out."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import holdfast
from holdfast import Checkpointer, Options
from holdfast.errors import CorruptError
from holdfast.testing import Fault, faulty

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=32 << 20)


class Training:
    """A model that fails on demand, before its optimizer steps or in the middle of that."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(16, 16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, *, fails: type[BaseException] | None = None, late: bool = False) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 16)).sum().backward()
        if fails is not None and not late:
            raise fails("mine")
        self.optimizer.step()
        if fails is not None:
            raise fails("mine")


def run_until_it_fails(run: Path, *, every: int | None = None, **fails: Any) -> None:
    """Take two good steps, then one that fails."""
    training = Training()
    with Checkpointer(run, every=every, emergency=True, options=SMALL) as checkpointer:
        for step in (1, 2):
            training.step()
            checkpointer.step(step, training.state)
        training.step(**fails)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_last_whole_step_is_saved_when_training_fails(
    new_path: NewPath, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    run = new_path()
    with pytest.raises(error, match="mine"):
        run_until_it_fails(run, fails=error)
    checkpointer = Checkpointer(run)
    assert checkpointer.steps() == [2]
    expected = Training()
    for _ in range(2):
        expected.step()
    with holdfast.open(checkpointer.path(2)) as checkpoint:
        assert torch.equal(checkpoint.tensor("model.weight"), expected.model.weight)
    assert f"saved step 2 in an emergency, after {error.__name__}: mine" in caplog.text
    assert (run / "LATEST").read_text() == "step-00000002\n"


def test_a_state_that_an_optimizer_has_begun_to_change_is_not_saved(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_path()
    with pytest.raises(ValueError, match="mine"):
        run_until_it_fails(run, fails=ValueError, late=True)
    assert Checkpointer(run).steps() == []
    assert "no emergency save: StateError: an optimizer has changed the state since" in caplog.text


@pytest.mark.parametrize("damaged", [False, True], ids=["restored", "half restored"])
def test_a_state_that_restore_has_filled_is_not_saved_as_the_step_before(
    new_path: NewPath, caplog: pytest.LogCaptureFixture, damaged: bool
) -> None:
    run = new_path()
    state = {"a": torch.ones(4), "b": torch.ones(4)}
    with (
        pytest.raises(CorruptError if damaged else ValueError),
        Checkpointer(run, every=100, emergency=True, options=SMALL) as checkpointer,
    ):
        checkpointer.step(100, state)
        state["a"].fill_(2.0)
        state["b"].fill_(2.0)
        checkpointer.step(120, state)
        checkpointer.wait()
        if damaged:
            (file,) = (run / "step-00000100" / "data").rglob("*.hf")
            content = bytearray(file.read_bytes())
            content[128] ^= 1  # of b: by then, a is filled
            file.write_bytes(content)
        checkpointer.restore(state, step=100)
        raise ValueError
    assert checkpointer.steps() == [100]
    assert "no emergency save: StateError: there is no state of a step" in caplog.text


def test_a_step_that_is_saved_already_is_not_saved_again(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_path()
    with pytest.raises(ValueError, match="mine"):
        run_until_it_fails(run, every=1, fails=ValueError, late=True)
    assert Checkpointer(run).steps() == [1, 2]
    assert "emergency" not in caplog.text


def test_a_damaged_step_that_is_reached_again_is_replaced_in_an_emergency(
    new_path: NewPath,
) -> None:
    run = new_path()
    with Checkpointer(run, options=SMALL) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(4)})
        checkpointer.save(2, {"a": torch.ones(4)})
    (file,) = (run / "step-00000002" / "data").rglob("*.hf")
    file.write_bytes(b"")
    state = {"a": torch.zeros(4)}
    with (
        pytest.raises(ValueError),
        Checkpointer(run, emergency=True, options=SMALL) as checkpointer,
    ):
        assert checkpointer.restore(state) == 1
        checkpointer.step(2, state)
        raise ValueError
    with holdfast.open(checkpointer.path(2)) as checkpoint:
        assert checkpoint.verify() == []


def test_a_step_whose_save_failed_is_saved_in_an_emergency(new_path: NewPath) -> None:
    run, training = new_path(), Training()
    broken = Fault("write", nth=1, action="fail", argument=errno.EIO, persistent=True)
    with (
        pytest.raises(KeyError),
        Checkpointer(run, every=1, emergency=True, options=SMALL) as checkpointer,
    ):
        with faulty(broken):
            checkpointer.step(1, training.state)
            assert checkpointer._saver._flight is not None
            checkpointer._saver._flight.handle.wait_done()
        raise KeyError
    assert checkpointer.steps() == [1]


def test_a_forked_child_does_not_save_in_an_emergency(new_path: NewPath) -> None:
    """Else its parent could save no more."""
    run, training = new_path(), Training()
    with Checkpointer(run, emergency=True, options=SMALL) as checkpointer:
        checkpointer.save(1, training.state)
        checkpointer.step(2, training.state)
        child = os.fork()
        if not child:
            try:
                with contextlib.suppress(SystemExit), checkpointer:
                    raise SystemExit
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[0] == child
        assert checkpointer.steps() == [1]
        checkpointer.save(3, training.state)
    assert Checkpointer(run).steps() == [1, 3]


def test_an_emergency_save_that_fails_too_does_not_mask_the_exception(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_path()
    broken = Fault("write", nth=1, action="fail", argument=errno.EIO, persistent=True)
    with faulty(broken), pytest.raises(ValueError, match="mine"):
        run_until_it_fails(run, fails=ValueError)
    assert "no emergency save: StoreError" in caplog.text
    assert Checkpointer(run).steps() == []


@pytest.mark.parametrize("error", [GeneratorExit, ValueError])
def test_nothing_is_saved_when_a_generator_is_closed_or_nobody_asked(
    new_path: NewPath, error: type[BaseException]
) -> None:
    run, training = new_path(), Training()
    emergency = error is GeneratorExit
    with (
        pytest.raises(error),
        Checkpointer(run, emergency=emergency, options=SMALL) as checkpointer,
    ):
        checkpointer.step(1, training.state)
        raise error
    assert checkpointer.steps() == []


def test_an_exception_before_the_first_step_saves_nothing(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_path()
    with pytest.raises(ValueError, match="mine"), Checkpointer(run, emergency=True):
        raise ValueError("mine")
    assert not run.exists()
    assert "no emergency save: StateError: there is no state of a step" in caplog.text


def test_a_loop_that_ends_well_saves_nothing_more_and_leaves_no_hook(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    training, hooks = Training(), len(_global_optimizer_pre_hooks)
    with (
        caplog.at_level(logging.INFO, "holdfast"),
        Checkpointer(new_path(), emergency=True, options=SMALL) as checkpointer,
    ):
        training.step()
        checkpointer.step(1, training.state)
        assert len(_global_optimizer_pre_hooks) == hooks + 1
    assert len(_global_optimizer_pre_hooks) == hooks
    assert checkpointer.steps() == [] and not caplog.records
