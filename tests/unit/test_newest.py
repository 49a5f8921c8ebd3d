"""A run by its steps: the newest and the best, what is called at a commit, a load of the run."""

import logging
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format.simulated_ranks import run_ranks
from holdfast import Checkpointer, Keep, Options
from holdfast.engine import newest
from holdfast.errors import (
    CorruptError,
    HoldfastError,
    MismatchError,
    NotCommittedError,
    OptionError,
)
from holdfast.loading import agreed, opening
from holdfast.runs import commit_hook

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=32 << 20)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((40,), float(step)), "n": step}


def a_run(path: Path, *steps: int) -> Path:
    with Checkpointer(path) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_at(step))
    return path


def test_a_run_tells_its_newest_and_its_best_step(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        assert checkpointer.latest() is None
        assert checkpointer.best("loss") is None
        losses = {1: 3.0, 2: 0.5, 3: math.nan, 4: 0.5, 5: 2.0}
        for step, loss in losses.items():
            metrics = {"loss": torch.tensor(loss), "n": step}
            checkpointer.save(step, state_at(step), metrics=metrics)
        checkpointer.save(6, state_at(6))
        assert checkpointer.latest() == 6
        assert checkpointer.metrics(2) == {"loss": 0.5, "n": 2}
        assert checkpointer.metrics(6) == {}
        assert checkpointer.best("loss") == 4, "of equal ones the newer"
        assert checkpointer.best("loss", mode="max") == 1
        assert checkpointer.best("none") is None
        with pytest.raises(NotCommittedError):
            checkpointer.metrics(7)
        with pytest.raises(OptionError, match="step"):
            checkpointer.metrics(-1)
        with pytest.raises(OptionError, match="mode"):
            checkpointer.best("loss", mode="most")
        with pytest.raises(OptionError, match=r'best\("loss"\)'):
            checkpointer.best()
    assert Checkpointer(run, keep=Keep.best("n", 2, mode="max")).best() == 5
    both = Keep.best("n", 2, mode="max") | Keep.best("loss", 1)
    assert Checkpointer(run, keep=both).best("n") == 5
    with pytest.raises(OptionError, match="2 of them"):
        Checkpointer(run, keep=both).best()


def test_a_step_that_cannot_be_read_is_not_the_best(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(run := new_path()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_at(step), metrics={"loss": 3.0 - step})
        (run / "step-00000002" / "MANIFEST").write_bytes(b"nothing")
        assert checkpointer.best("loss") == 1
        assert "step 2" in caplog.text
        with pytest.raises(CorruptError):
            checkpointer.metrics(2)


@pytest.mark.parametrize("stage", ["eager", "sync"])
def test_a_commit_is_told_when_the_step_is_durable(new_path: NewPath, stage: Any) -> None:
    told: list[tuple[Any, ...]] = []

    def on_commit(path: str, step: int, metrics: dict[str, float]) -> None:
        told.append((path, step, metrics, holdfast.open(path).step, threading.get_ident()))

    with Checkpointer(new_path(), every=2, stage=stage, on_commit=on_commit) as checkpointer:
        for step in range(1, 5):
            checkpointer.step(step, state_at(step), metrics={"loss": torch.tensor(0.5)})
        checkpointer.save(5, state_at(5))
        paths = [checkpointer.path(step) for step in (2, 4, 5)]
    assert [entry[:4] for entry in told] == [
        (paths[0], 2, {"loss": 0.5}, 2),
        (paths[1], 4, {"loss": 0.5}, 4),
        (paths[2], 5, {}, 5),
    ]
    assert threading.get_ident() not in {entry[4] for entry in told}
    with pytest.raises(OptionError, match="on_commit is 3"):
        Checkpointer(new_path(), on_commit=3)  # type: ignore[arg-type]


def test_what_is_told_of_a_commit_may_fail_or_hang(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(commit_hook, "WAIT_S", 0.2)
    release, calls = threading.Event(), list[int]()

    def on_commit(_path: str, step: int, _metrics: dict[str, float]) -> None:
        calls.append(step)
        if step == 1:
            raise KeyError("mine")
        if step == 2:
            release.wait(30)

    caplog.set_level(logging.ERROR, "holdfast")
    with Checkpointer(new_path(), every=1, on_commit=on_commit) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.step(step, state_at(step))
            checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
        assert calls == [1, 2]
        assert "on_commit of step 1 failed" in caplog.text
        assert "has not returned within 0.2 s" in caplog.text
        assert "still runs: not called for step 3" in caplog.text
        release.set()


CALLS: dict[str, Callable[[Checkpointer], object]] = {
    "restore": lambda own: own.restore(state_at(0)),
    "wait": lambda own: own.wait(),
    "close": lambda own: own.close(),
    "save": lambda own: own.save(9, state_at(9)),
    "step": lambda own: own.step(9, state_at(9)),
    "retire_after": lambda own: own.retire_after(0),
}


class CallsItsOwn:
    """An ``on_commit`` that calls its own Checkpointer, and keeps the answers."""

    def __init__(self, call: Callable[[Checkpointer], object]) -> None:
        self.call, self.answers = call, list[object]()
        self.own: Checkpointer | None = None

    def __call__(self, path: str, step: int, metrics: dict[str, float]) -> None:
        assert self.own is not None
        try:
            self.answers.append(self.call(self.own))
        except Exception as error:
            self.answers.append(error)

    def refused(self) -> bool:
        """Return whether it was called, and refused each time."""
        match = "was called from its on_commit"
        return bool(self.answers) and all(
            isinstance(one, OptionError) and match in str(one) for one in self.answers
        )


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Wait for a hook for a second; in the end, check that none was waited for so long."""
    monkeypatch.setattr(commit_hook, "WAIT_S", 1.0)
    yield
    assert "has not returned" not in caplog.text


@pytest.mark.usefixtures("short_wait")
@pytest.mark.parametrize("verb", CALLS)
def test_on_commit_may_not_wait_for_the_save_that_waits_for_it(
    new_path: NewPath, verb: str
) -> None:
    hook = CallsItsOwn(CALLS[verb])
    with Checkpointer(new_path(), every=1, on_commit=hook) as hook.own:
        for step in (1, 2):
            hook.own.step(step, state_at(step))
            hook.own.wait()
        assert hook.refused() and len(hook.answers) == 2
        assert hook.own.steps() == [1, 2], "and it is open"


@pytest.mark.usefixtures("short_wait")
def test_on_commit_of_an_upload_may_not_wait_for_it(new_path: NewPath) -> None:
    hook = CallsItsOwn(CALLS["wait"])
    given: dict[str, Any] = {"local": new_path(), "stage": "sync", "on_commit": hook}
    with Checkpointer(new_path(), every=1, **given) as hook.own:
        hook.own.step(1, state_at(1))
        hook.own.wait()
    assert hook.refused()


@pytest.mark.usefixtures("short_wait")
@pytest.mark.parametrize("verb", CALLS)
def test_on_commit_may_call_where_the_caller_waits_and_no_other_rank_is(
    new_path: NewPath, verb: str
) -> None:
    hook = CallsItsOwn(CALLS[verb])
    with Checkpointer(new_path(), every=1, stage="sync", on_commit=hook) as hook.own:
        hook.own.step(1, state_at(1))
    answers = {"restore": 1, "step": True, "retire_after": [1]}
    assert hook.answers == [answers.get(verb)]


def test_on_commit_may_not_call_what_other_ranks_do_not(new_path: NewPath) -> None:
    run, hook = new_path(), CallsItsOwn(CALLS["retire_after"])

    def work(group: Any) -> None:
        given: dict[str, Any] = {"stage": "sync", "group": group, "options": SMALL}
        given["on_commit"] = hook if group.rank == 0 else None
        with Checkpointer(run, every=1, signals=(), **given) as made:
            if group.rank == 0:
                hook.own = made
            made.step(1, state_at(1))

    run_ranks(2, work)
    assert hook.refused()


def test_a_load_or_an_open_of_a_run_takes_its_newest_step(new_path: NewPath) -> None:
    run = a_run(new_path(), 3, 12)
    into = state_at(0)
    report = holdfast.load(run, into=into)
    assert (report.step, report.path) == (12, f"{run}/step-00000012")
    assert into["n"] == 12
    assert holdfast.open(run).step == 12
    assert holdfast.open(run, include="n").state() == {"n": 12}
    for check in (holdfast.verify, holdfast.repair):  # of one step, no word about the others
        with pytest.raises(NotCommittedError, match="is a run"):
            check(run)
    empty = new_path()
    empty.mkdir()
    for place in (empty, empty / "none"):
        with pytest.raises(NotCommittedError):
            holdfast.load(place, into=into)
        with pytest.raises(NotCommittedError):
            holdfast.open(place)


def test_damage_of_the_newest_step_is_no_reason_to_take_an_older_one(new_path: NewPath) -> None:
    run = a_run(new_path(), 1, 2)
    (file,) = (run / "step-00000002" / "data").rglob("*.hf")
    content = file.read_bytes()
    file.write_bytes(content[:64] + bytes([content[64] ^ 1]) + content[65:])
    with pytest.raises(CorruptError):
        holdfast.load(run, into=state_at(0))
    file.write_bytes(content)
    (run / "step-00000002" / "MANIFEST").unlink()
    for call in (lambda: holdfast.load(run, into=state_at(0)), lambda: holdfast.open(run)):
        with pytest.raises(CorruptError, match=r"MANIFEST is lost.*step-00000001"):
            call()
    shutil.rmtree(run / "step-00000001")
    with pytest.raises(CorruptError, match="MANIFEST is lost"):
        holdfast.load(run, into=state_at(0))


def retired(monkeypatch: pytest.MonkeyPatch, run: Path, times: int) -> None:
    """Let the step that was found newest be deleted before it is read, so many times."""
    left, find = [times], newest.newest_in

    def found(*given: Any) -> str:
        name = find(*given)
        if left[0]:
            left[0] -= 1
            shutil.rmtree(run / name)
        return name

    for module in (agreed, opening):
        monkeypatch.setattr(module, "newest_in", found)


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_is_retired_meanwhile_is_looked_for_once_more(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    calls: tuple[Callable[[Path], int | None], ...] = (
        lambda run: holdfast.load(run, into=state_at(0)).step,
        lambda run: holdfast.open(run).step,
    )
    for call in calls:
        run = a_run(new_path(), 1, 2, 3)
        (run / "LATEST").unlink()
        with monkeypatch.context() as patched:
            retired(patched, run, times)
            if times == 1:
                assert call(run) == 2
            else:
                with pytest.raises(NotCommittedError):
                    call(run)


def test_the_coordinator_chooses_the_step_for_all_ranks(new_path: NewPath) -> None:
    ahead, behind = a_run(new_path(), 1, 2), new_path()
    shutil.copytree(ahead, behind)
    a_run(behind, 3)

    def load(group: Any) -> int | None:
        place = ahead if group.rank == 0 else behind
        return holdfast.load(place, into=state_at(0), group=group, options=SMALL).step

    assert run_ranks(2, load) == [2, 2]

    def mixed(group: Any) -> str:
        place = ahead / "step-00000002" if group.rank == 0 else behind
        with pytest.raises(HoldfastError) as refused:
            holdfast.load(place, into=state_at(0), group=group, options=SMALL)
        return f"{type(refused.value).__name__} {refused.value}"

    found = run_ranks(2, mixed)
    assert all(text.startswith(MismatchError.__name__) for text in found), found
    assert "a run on rank 1" in found[0]


def test_all_ranks_look_again_when_one_finds_the_step_gone(new_path: NewPath) -> None:
    ahead, behind = a_run(new_path(), 1, 2), new_path()
    shutil.copytree(ahead, behind)
    shutil.rmtree(behind / "step-00000002")
    (behind / "LATEST").unlink()

    def load(group: Any) -> str:
        place = ahead if group.rank == 0 else behind
        try:
            holdfast.load(place, into=state_at(0), group=group, options=SMALL)
        except HoldfastError as error:
            return type(error).__name__
        return ""

    assert run_ranks(2, load) == ["PeerError", "NotCommittedError"]
