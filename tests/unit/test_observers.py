"""Observers of a run: what they are told, and that none of them fails or holds a save."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Event
from holdfast.runs import observers, progress_file

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))
try:
    import walk  # found above
finally:
    sys.path.remove(str(ROOT / "benchmarks"))


def state() -> dict[str, Any]:
    return {"w": torch.arange(64.0)}


def run(root: Path, steps: int, **options: Any) -> list[Event]:
    """Train for some steps with an observer; return what it was told."""
    events: list[Event] = []
    others = options.pop("others", [])
    with holdfast.Checkpointer(root, every=1, observe=[events.append, *others], **options) as one:
        for step in range(1, steps + 1):
            one.step(step, state(), metrics={"loss": 1.0 / step})
            one.wait()
    return events


def kinds(events: list[Event]) -> list[tuple[str, int | None]]:
    return [(event.kind, event.step) for event in events]


@pytest.mark.parametrize("stage", ["eager", "lazy", "sync"])
def test_each_stage_of_a_save_is_an_event(tmp_path: Path, stage: Any) -> None:
    events = run(tmp_path / "a", 1, stage=stage)
    staged = [] if stage == "sync" else [("staged", 1)]
    assert kinds(events) == [("planned", 1), *staged, ("written", 1), ("committed", 1)]
    last = events[-1]
    assert last.path == str(tmp_path / "a" / "step-00000001")
    assert last.bytes == 256 and last.stored_bytes > 0 and last.seconds["total"] > 0
    assert last.metrics == {"loss": 1.0} and last.ranks[0]["rank"] == 0
    assert (last.rank, last.world_size) == (0, 1)


def test_a_retired_and_a_restored_step_are_events(tmp_path: Path) -> None:
    events = run(tmp_path / "a", 2, keep=holdfast.Keep.latest(1))
    assert ("retired", 1) in kinds(events)
    again: list[Event] = []
    with holdfast.Checkpointer(tmp_path / "a", observe=[again.append]) as one:
        one.restore(state())
    assert kinds(again) == [("restored", 2)]
    assert again[0].bytes > 0


def test_a_failed_save_is_an_event_with_its_error(tmp_path: Path) -> None:
    events: list[Event] = []
    with holdfast.Checkpointer(tmp_path / "a", observe=[events.append]) as one:
        one.save(1, state())
        (tmp_path / "a").rename(tmp_path / "b")
        with pytest.raises(holdfast.errors.StoreError):
            one.save(2, state())
    failed = [event for event in events if event.kind == "failed"]
    assert [event.step for event in failed] == [2]
    assert failed[0].text.startswith("StoreError: ") and "is gone" in failed[0].text


def test_an_event_cannot_be_changed_and_is_json(tmp_path: Path) -> None:
    event = run(tmp_path / "a", 1)[-1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 7  # type: ignore[misc]
    with pytest.raises(TypeError):
        event.metrics["loss"] = 0.0  # type: ignore[index]
    assert json.loads(json.dumps(event.as_dict()))["path"] == event.path


def test_an_observer_that_raises_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(event: Event) -> None:
        raise SystemExit("no")

    events = run(tmp_path / "a", 2, others=[bad])
    assert ("committed", 2) in kinds(events)
    assert "the observer test_an_observer_that_raises_fails_nothing.<locals>.bad failed" in (
        caplog.text
    )


def test_an_observer_that_hangs_holds_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observers, "FLUSH_S", 0.05)
    monkeypatch.setattr(observers, "WAITING_MAX", 3)
    go_on = threading.Event()
    try:
        run(tmp_path / "a", 3, others=[lambda event: go_on.wait(60)])
        assert not holdfast.verify(tmp_path / "a" / "step-00000003").damage
        assert "is too slow" in caplog.text and "not waiting for it" in caplog.text
    finally:
        go_on.set()


def test_a_slow_observer_is_given_everything_when_the_run_is_closed(tmp_path: Path) -> None:
    seen: list[Event] = []

    def slow(event: Event) -> None:
        time.sleep(0.05)
        seen.append(event)

    events = run(tmp_path / "a", 2, others=[slow])
    assert seen == events


def test_what_was_told_is_delivered_when_python_ends(tmp_path: Path) -> None:
    program = f"""
import time, torch, holdfast
def slow(event):
    time.sleep(0.1)
    print(event.kind, flush=True)
one = holdfast.Checkpointer({str(tmp_path / "a")!r}, every=1, observe=[slow])
one.step(1, {{"w": torch.ones(8)}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["planned", "staged", "written", "committed"], done.stderr


def test_a_forked_child_tells_nothing_and_ends(tmp_path: Path) -> None:
    program = f"""
import os, time, torch, holdfast
def tell(event):
    print(os.getpid(), event.kind, flush=True)
one = holdfast.Checkpointer({str(tmp_path / "a")!r}, every=1, observe=[tell])
one.step(1, {{"w": torch.ones(8)}})
child = os.fork()
if child == 0:
    one._observers.tell("alert", None)
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
one.close()
print(os.getpid(), "end")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len({pid for pid, _ in lines}) == 1, done.stderr
    told = [kind for _, kind in lines]
    assert told == ["planned", "staged", "written", "committed", "end"], done.stderr


@pytest.mark.parametrize("given", [7, print, [7], "abc"])
def test_what_is_no_list_of_functions_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(holdfast.errors.OptionError, match=r"observe is .* expected a list"):
        holdfast.Checkpointer(tmp_path, observe=given)


def test_a_redacted_observer_sees_no_names(tmp_path: Path) -> None:
    seen: list[Event] = []
    events: list[Event] = []
    root = tmp_path / "secret"
    with holdfast.Checkpointer(root, observe=[events.append, holdfast.redacted(seen.append)]) as c:
        c.save(1, state(), metrics={"hidden": 0.5})
        root.rename(tmp_path / "elsewhere")
        with pytest.raises(holdfast.errors.StoreError):
            c.save(2, state())
    text = repr([event.as_dict() for event in seen])
    assert kinds(seen) == kinds(events)
    assert "secret" not in text and "hidden" not in text
    assert 0.5 in [*seen[-2].metrics.values()] or any(e.metrics for e in seen)
    assert seen[-1].text == "StoreError"
    assert len({event.run for event in seen}) == 1


def calls_of(root: Path, **options: Any) -> int:
    """Count the calls of one save of a Checkpointer, all threads included."""
    names = iter(range(1, 1000))
    with holdfast.Checkpointer(root, stage="sync", **options) as one:
        one._progress.has_begun = True  # its thread writes once a second, whatever is saved

        def save() -> None:
            one.save(next(names), state())
            time.sleep(0.02)  # for the threads of observers

        return walk.count(save, save).walk.calls


def test_a_save_that_nobody_observes_makes_no_call_for_observers(tmp_path: Path) -> None:
    nobody = calls_of(tmp_path / "a")
    one = calls_of(tmp_path / "b", observe=[lambda event: None])
    assert one - nobody <= 30, "three events: each is made once, put once and delivered once"

    def named(root: Path) -> set[str]:
        with holdfast.Checkpointer(root, stage="sync") as checkpointer:
            save = lambda: checkpointer.save(2, state())  # noqa: E731
            return set(walk.count(save, lambda: checkpointer.save(1, state())).entered)

    entered = named(tmp_path / "c")
    assert [file for file in entered if file.endswith(("events.py", "alerts.py"))] == []


def test_the_progress_file_shows_the_save_and_goes_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_file, "TICK_S", 0.02)
    monkeypatch.setenv("LOCAL_RANK", "3")
    from holdfast.format.progress import SLOT_BYTES, decode_slots

    root = tmp_path / "a"
    with holdfast.Checkpointer(root, every=5) as one:
        one.save(1, state())
        for step in range(2, 8):
            one.step(step, state())
        one.wait()
        (file,) = _await_file(root)
        data = _until(file, lambda data: any(s.committed_step == 5 for s in decode_slots(data)))
        (said,) = decode_slots(data)
        assert (said.step, said.save_step, said.due_step) == (7, 5, 10)
        assert said.committed_step == 5 and said.pid == os.getpid()
        assert data[: 3 * SLOT_BYTES] == bytes(3 * SLOT_BYTES), "a slot for each local rank"
    assert [p.name for p in root.iterdir() if p.name.startswith(".progress")] == []


def _await_file(root: Path) -> list[Path]:
    for _ in range(500):
        if found := sorted(root.glob(".progress-*")):
            return found
        time.sleep(0.01)
    raise AssertionError("no progress file")


def _until(file: Path, condition: Any) -> bytes:
    for _ in range(500):
        if condition(data := file.read_bytes()):
            return data
        time.sleep(0.01)
    raise AssertionError(data)


def test_a_run_that_cannot_be_written_to_has_no_progress_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress_file, "TICK_S", 0.01)
    caplog.set_level(logging.WARNING)
    root = tmp_path / "a"
    root.mkdir()
    with holdfast.Checkpointer(root) as one:
        os.symlink("/dev/null", root / os.path.basename(one._progress._place))
        one.save(1, state())
        one.step(2, state())
        time.sleep(0.05)
    assert caplog.text == ""
    assert Path("/dev/null").is_char_device()


def test_what_a_dead_job_left_of_its_progress_is_swept_after_a_day(tmp_path: Path) -> None:
    root = tmp_path / "a"
    root.mkdir()
    old, young = root / ".progress-dead", root / ".progress-alive"
    for file, age_s in ((old, 2 * 86400.0), (young, 60.0)):
        file.write_bytes(b"")
        os.utime(file, (time.time() - age_s,) * 2)
    run(root, 1)
    assert not old.exists() and young.exists()
