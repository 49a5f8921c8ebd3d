"""A job that was frozen comes back when another has taken its run over: it can do no harm.

The zombies are real processes, stopped by SIGSTOP in the middle of a save.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_state

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.engine import commit
from holdfast.engine.commit import check_present
from holdfast.errors import AlreadyCommittedError, FencedError, NotCommittedError
from holdfast.format.manifest import Manifest
from holdfast.stores.base import Store
from holdfast.testing import Fault, faulty

WAIT_S = 30.0
HELD_MS = 400  # a call is held so long for the signal to strike in it
RACERS = 8

Job = Callable[[], None]


def _wait_for(what: str, found: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < until, f"no {what} within {WAIT_S} s"
        time.sleep(0.001)


def fork(job: Job) -> tuple[int, int]:
    """Run a job in a process; return its number, and where to read the error it ends with."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        text = ""
        try:
            job()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    return child, reading


def done(job: Job) -> None:
    """Run a job in a process of its own, to a good end."""
    child, reading = fork(job)
    told = os.read(reading, 1 << 16).decode()
    os.close(reading)
    os.waitpid(child, 0)
    assert told == ""


@contextmanager
def zombie(job: Job, is_there: Callable[[], object]) -> Iterator[Callable[[], str]]:
    """Run a job in a process; stop it when it is there; what is yielded thaws it.

    That returns the error it ended with, or "".
    """
    child, reading = fork(job)
    try:
        _wait_for("place to stop at", is_there)
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED)

        def thaw() -> str:
            os.kill(child, signal.SIGCONT)
            return os.read(reading, 1 << 16).decode()

        yield thaw
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


def checkpointer(root: Path, keep: Keep | None = None) -> Checkpointer:
    return Checkpointer(root, keep=keep, options=OPTIONS)


@pytest.fixture
def root(scratch: Path) -> Path:
    """A run with step 1, of a job before."""
    done(lambda: checkpointer(scratch / "run").save(1, make_state(1)))
    return scratch / "run"


def pending(root: Path, step: int) -> list[Path]:
    return list(root.glob(f"step-{step:08d}/.manifest-*"))


def took_over(root: Path, step: int, number: int) -> Checkpointer:
    """Restore the run as a new job, and save a step."""
    state = make_state(-1)
    new = checkpointer(root)
    new.restore(state)
    new.save(step, make_state(number))
    return new


def test_what_was_not_published_is_revoked_where_another_save_stands_too(root: Path) -> None:
    """That one may be let go, and then there would be room for it."""
    pending_name = root / "step-00000001" / ".manifest-0123"
    pending_name.touch()
    took_over(root, 2, 2)
    assert not pending_name.exists()


@pytest.mark.parametrize("held", ["sync_directory", "link"])
def test_a_zombie_stopped_before_it_publishes_publishes_nothing(root: Path, held: str) -> None:
    """At "link" it has looked already: its manifest is gone from under it."""

    def job() -> None:
        with faulty(Fault(held, persistent=True, action="delay", argument=HELD_MS)):
            old = checkpointer(root)
            old.restore(make_state(-1))
            old.save(2, make_state(22))

    with zombie(job, lambda: pending(root, 2)) as thaw:
        new = took_over(root, 2, 2)
        told = thaw()
    assert re.match(
        r"FencedError: .* epoch 3, taken at 20.* by process \d+ on .* has epoch 2", told
    )
    assert f"process {os.getpid()} " in told
    assert load_number(Path(new.path(2))) == 2
    assert len(list((root / "step-00000002" / "data").iterdir())) == 1  # the zombie's are gone
    new.save(3, make_state(3))
    assert new.steps() == [1, 2, 3]


def test_a_step_that_the_zombie_alone_has_begun_is_nowhere(root: Path) -> None:
    def job() -> None:
        with faulty(Fault("link", action="delay", argument=HELD_MS)):
            checkpointer(root).save(4, make_state(4))

    with zombie(job, lambda: pending(root, 4)) as thaw:
        new = took_over(root, 2, 2)
        assert thaw().startswith("FencedError")
    assert new.steps() == [1, 2]
    with pytest.raises(NotCommittedError):
        load_number(Path(new.path(4)))


def test_a_job_whose_files_the_next_one_has_let_go_of_is_told_of_that_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was frozen before it looked whether they are all there; another rank writes on."""

    def next_job() -> None:
        monkeypatch.undo()
        new = checkpointer(root, Keep.latest(1))
        new.restore(make_state(-1))
        for step in (2, 3):
            new.save(step, make_state(step))

    def check_late(store: Store, manifest: Manifest, ranks: object) -> None:
        done(next_job)
        (Path(store.location) / "data" / manifest.table.header.save_id).mkdir(parents=True)
        check_present(store, manifest)

    old = checkpointer(root)
    monkeypatch.setattr(commit, "check_present", check_late)
    with pytest.raises(FencedError, match="epoch 3"):
        old.save(2, make_state(22))
    assert old.steps() == [3]


def test_a_zombie_in_the_background_is_refused_too(root: Path) -> None:
    def job() -> None:
        with (
            faulty(Fault("sync_directory", persistent=True, action="delay", argument=HELD_MS)),
            Checkpointer(root, every=1, options=OPTIONS) as old,
        ):
            old.step(2, make_state(22))

    with zombie(job, lambda: pending(root, 2)) as thaw:
        new = took_over(root, 2, 2)
        assert thaw().startswith("FencedError")
    assert load_number(Path(new.path(2))) == 2


def test_a_zombie_retires_nothing_and_lets_latest_be(root: Path) -> None:
    """It was stopped between its commit and what follows; the new job has gone back since."""

    def job() -> None:
        with faulty(Fault("unlink", persistent=True, action="delay", argument=HELD_MS)):
            checkpointer(root, Keep.latest(1)).save(2, make_state(22))

    with zombie(job, lambda: (root / "step-00000002" / "MANIFEST").exists()) as thaw:
        new = checkpointer(root)
        assert new.restore(make_state(-1), step=1) == 1
        assert new.retire_after(1) == [2]
        new.save(2, make_state(2))
        latest = (root / "LATEST").stat().st_ino
        assert thaw() == ""
    assert new.steps() == [1, 2]
    assert [load_number(Path(new.path(step))) for step in (1, 2)] == [1, 2]
    assert (root / "LATEST").stat().st_ino == latest


def test_a_zombie_that_had_not_begun_to_write_takes_no_epoch(root: Path) -> None:
    """It restored, and was frozen; who restored later and was there first goes on."""
    stopped = root.parent / "stopped"

    def job() -> None:
        old = checkpointer(root)
        old.restore(make_state(-1))
        stopped.touch()
        _wait_for("newer step", (root / "step-00000002" / "MANIFEST").exists)
        old.save(2, make_state(22))

    with zombie(job, stopped.exists) as thaw:
        new = took_over(root, 2, 2)
        told = thaw()
    assert told.startswith("FencedError") and "this one saw epoch 1" in told
    new.save(3, make_state(3))


def test_a_fenced_job_that_restores_again_may_write(root: Path) -> None:
    old = checkpointer(root)
    old.restore(make_state(-1))
    done(lambda: took_over(root, 2, 2) and None)
    for fenced in (
        lambda: old.save(3, make_state(3)),
        lambda: old.save(2, make_state(2)),  # not AlreadyCommittedError, which has other advice
        lambda: old.retire_after(1),
    ):
        with pytest.raises(FencedError, match=r"epoch 2, .* this one saw epoch 1"):
            fenced()
    assert old.restore(make_state(-1)) == 2
    old.save(3, make_state(3))
    assert old.steps() == [1, 2, 3]


def test_an_older_job_adds_no_step_behind_one_that_goes_back(root: Path) -> None:
    old = checkpointer(root)
    old.restore(make_state(-1))

    def go_back() -> None:
        new = checkpointer(root)
        new.restore(make_state(-1))
        assert new.retire_after(1) == []

    done(go_back)
    with pytest.raises(FencedError, match=r"epoch 2, .* this one saw epoch 1"):
        old.save(2, make_state(2))


def test_the_first_step_of_training_takes_the_run_over(root: Path) -> None:
    """Not the first save, which may be an hour later."""
    (root / ".epoch-00000001").rename(root / ".epoch-00000007")  # as if by others before
    with Checkpointer(root, every=100, options=OPTIONS) as new:
        new.restore(make_state(-1))
        new.step(2, make_state(2))
        assert new.steps() == [1]
        assert [path.name for path in root.glob(".epoch-*")] == [".epoch-00000008"]


def test_a_run_that_is_only_read_belongs_to_whom_it_did(root: Path) -> None:
    checkpointer(root).restore(make_state(-1))
    checkpointer(root).restore(make_state(-1), partial=True)
    assert [path.name for path in root.glob(".epoch-*")] == [".epoch-00000001"]


def test_checkpointers_of_one_process_go_together(root: Path) -> None:
    first, second = checkpointer(root), checkpointer(root)
    for step, saver in enumerate([first, second, first, second], 2):
        saver.save(step, make_state(step))
    assert [path.name for path in root.glob(".epoch-*")] == [".epoch-00000002"]


def test_a_save_without_a_run_knows_no_epochs(root: Path) -> None:
    holdfast.save(make_state(2), root / "step-00000002", options=OPTIONS)
    assert load_number(root / "step-00000002") == 2
    with pytest.raises(AlreadyCommittedError, match="retire_after"):
        checkpointer(root).save(2, make_state(2))


def test_of_jobs_that_start_at_once_exactly_one_goes_on(root: Path) -> None:
    reading, writing = os.pipe()
    waiting, opening = os.pipe()
    children = []
    for racer in range(RACERS):
        children.append(os.fork())
        if children[-1]:
            continue
        word = "?"
        try:
            os.close(opening)
            mine = checkpointer(root)
            mine.restore(make_state(-1))
            os.write(writing, b"r")
            os.read(waiting, 1)
            mine.save(2 + racer, make_state(2 + racer))
            word = "s"
        except FencedError:
            word = "f"
        finally:
            os.write(writing, word.encode())
            os._exit(0)
    os.close(waiting)
    text = b""
    while text.count(b"r") < RACERS:
        text += os.read(reading, 100)
    os.close(opening)
    for child in children:
        os.waitpid(child, 0)
    os.close(writing)
    while part := os.read(reading, 100):
        text += part
    os.close(reading)
    assert sorted(text.decode().replace("r", "")) == ["f"] * (RACERS - 1) + ["s"]
    assert len(checkpointer(root).steps()) == 2
    assert [path.name for path in root.glob(".epoch-*")] == [".epoch-00000002"]
