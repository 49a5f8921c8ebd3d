"""What the thread that calls a verb, and the worker that runs its body, are to each other."""

import threading
from contextlib import _GeneratorContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import worker
from holdfast.state.ambient import ordinary_torch
from holdfast.testing import Fault, faulty

WITHIN_S = 20.0


def test_a_second_interrupt_before_the_first_is_passed_on_leaves_no_save_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody answered the body any more; it waited for its hooks for ever, and all after it."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    state = {"w": torch.ones(3), "model": torch.nn.Linear(1, 1)}  # which has a hook
    with monkeypatch.context() as points:  # two at which a handler may raise
        points.setattr(worker._Call, "make", interrupted)
        points.setattr(worker._Job, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised:
            holdfast.save_async(state, tmp_path / "interrupted")
    holdfast.save_async(state, tmp_path / "next", deadline_s=WITHIN_S).result()
    assert list(tmp_path.iterdir()) == [tmp_path / "next"]
    assert worker.HELD_UP in raised.value.__notes__


def test_who_drops_a_body_and_lost_that_word_by_an_interrupt_ends_it() -> None:
    """It was taken by the caller, who waited for its end, and nobody ended it."""
    job = worker._Job(lambda: None)
    assert job._take()  # an interrupt comes right here
    job.leave(KeyboardInterrupt())
    assert job.ended.wait(0)


def test_an_interrupt_as_a_load_asks_for_its_last_hook_ends_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body raised the interrupt itself, whose notes were copied to their own end."""
    counter = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1)
    path, state = tmp_path / "a", {"w": torch.ones(3), "n": 1, "counter": counter}
    holdfast.save(state, path)
    make = worker._Call.make

    def interrupted(call: "worker._Call[Any]") -> None:
        if getattr(call.function, "func", None) == counter.load_state_dict:
            raise KeyboardInterrupt
        make(call)

    monkeypatch.setattr(worker._Call, "make", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        holdfast.load(path, into=state)
    assert ["partly filled" in note for note in raised.value.__notes__] == [True]


def test_a_save_that_failed_before_its_call_was_interrupted_is_no_failure_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has got an exception for it already."""
    serve = worker._Job.serve

    def interrupted(job: worker._Job) -> None:
        serve(job).wait_done()
        raise KeyboardInterrupt

    with monkeypatch.context() as points, faulty(Fault("sync", persistent=True)):
        points.setattr(worker._Job, "serve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            holdfast.save_async({"w": torch.ones(3)}, tmp_path / "a")
    holdfast.save_async({"w": torch.ones(3)}, tmp_path / "b").result()


@pytest.mark.parametrize("verb", ["save", "save_async", "load"])
def test_settings_of_torch_are_changed_in_no_thread_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """An exception as a ``with`` ends keeps them from being put back: training could not go on."""

    class Stateful:
        def state_dict(self) -> dict[str, Any]:
            hooks.append(threading.get_ident())
            return {"w": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            hooks.append(threading.get_ident())

    model = torch.nn.BatchNorm1d(4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "own": Stateful(), "t": torch.ones(3)}
    state["random"] = holdfast.RandomState()
    hooks, main, entered = list[int](), threading.get_ident(), list[int]()
    holdfast.save(state, tmp_path / "a")
    enter = _GeneratorContextManager.__enter__

    def entering(block: Any) -> Any:
        if block.gen.gi_code.co_name == ordinary_torch.__name__:
            entered.append(threading.get_ident())
        return enter(block)

    with monkeypatch.context() as points:
        points.setattr(_GeneratorContextManager, "__enter__", entering)
        if verb == "load":
            holdfast.load(tmp_path / "a", into=state)
        elif verb == "save":
            holdfast.save(state, tmp_path / "b")
        else:
            holdfast.save_async(state, tmp_path / "b").result()
    assert entered and main not in entered
    assert set(hooks) == {main}
