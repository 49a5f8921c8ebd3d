"""A run saved in the background: what `step` promises, who is told of failures, what is noted."""

import errno
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer, Keep, Options
from holdfast.errors import (
    AlreadyCommittedError,
    NoSpaceError,
    OptionError,
    StoreError,
)
from holdfast.testing import Fault, faulty

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=32 << 20)
SLOW = Fault("write", nth=1, action="delay", argument=200, persistent=True)
BROKEN = Fault("write", nth=1, action="fail", argument=errno.EIO, persistent=True)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((4000,), float(step)), "step": step}


def value_of(checkpointer: Checkpointer, step: int) -> float:
    with holdfast.open(checkpointer.path(step)) as checkpoint:
        assert checkpoint.verify() == []
        return float(checkpoint.tensor("w")[0])


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_step_returns_before_the_checkpoint_is_there(new_path: NewPath) -> None:
    with faulty(SLOW), Checkpointer(new_path(), every=1, options=SMALL) as checkpointer:
        state = state_at(1)
        assert checkpointer.step(1, state)
        assert checkpointer.steps() == []
        state["w"].zero_()
        checkpointer.wait()
        assert checkpointer.steps() == [1] and value_of(checkpointer, 1) == 1.0
        assert checkpointer.step(2, state_at(2))
    assert checkpointer.steps() == [1, 2], "close waits"


def test_a_sync_step_returns_when_it_is_durable(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every=1, stage="sync", options=SMALL) as checkpointer:
        for step in (1, 2):
            assert checkpointer.step(step, state_at(step))
            assert checkpointer.steps()[-1] == step


def test_a_lazy_step_saves_what_was_there_before_the_next_optimizer_step(
    new_path: NewPath,
) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    expected = []
    with Checkpointer(new_path(), every=1, stage="lazy", options=SMALL) as checkpointer:
        for step in range(1, 6):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            expected.append(model.weight.detach().clone())
            checkpointer.step(step, state)
    for step, weight in enumerate(expected, 1):
        with holdfast.open(checkpointer.path(step)) as checkpoint:
            assert torch.equal(checkpoint.tensor("model.weight"), weight)


def test_a_save_that_is_due_while_another_is_in_flight_waits_or_is_skipped(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty(SLOW):
        with Checkpointer(new_path(), every=1, options=SMALL) as checkpointer:
            assert all(checkpointer.step(step, state_at(step)) for step in (1, 2))
            assert checkpointer.steps() == [1]
        run = new_path()
        with Checkpointer(run, every=1, busy="skip", options=SMALL) as checkpointer:
            with caplog.at_level(logging.INFO, "holdfast"):
                assert [checkpointer.step(step, state_at(step)) for step in (1, 2)] == [True, False]
            assert "step-00000002 was not saved: the previous save is still in" in caplog.text
            checkpointer.wait()
            assert checkpointer.step(3, state_at(3))
            checkpointer.save(4, state_at(4))
    assert checkpointer.steps() == [1, 3, 4]
    assert [row["skipped"] for row in records(run)] == [0, 1, 0]


def test_save_and_restore_and_retire_after_wait_for_what_is_in_flight(new_path: NewPath) -> None:
    with faulty(SLOW), Checkpointer(new_path(), every=1, options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
        assert checkpointer.restore(into := state_at(0)) == 1 and into["step"] == 1
        checkpointer.step(2, state_at(2))
        checkpointer.save(5, state_at(5))
        assert checkpointer.steps() == [1, 2, 5]
        checkpointer.step(6, state_at(6))
        assert checkpointer.retire_after(2) == [5, 6]
        assert checkpointer.steps() == [1, 2]


def fail_in_the_background(checkpointer: Checkpointer, step: int) -> None:
    """Save a step to a broken disk, and see it fail, without being told."""
    with faulty(BROKEN):
        assert checkpointer.step(step, state_at(step))
        assert checkpointer._saver._flight is not None
        checkpointer._saver._flight.handle.wait_done()


def test_a_failure_is_told_once_by_the_next_step_which_saves_nevertheless(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(new_path(), every=1, options=SMALL) as checkpointer:
        checkpointer.save(1, state_at(1))
        fail_in_the_background(checkpointer, 2)
        assert "step-00000002 failed: StoreError" in caplog.text, "logged at once"
        with pytest.raises(StoreError, match="Input/output error") as raised:
            checkpointer.step(3, state_at(3))
        assert "the background save of step 2" in str(raised.value.__notes__)
        checkpointer.wait()
        assert checkpointer.step(4, state_at(4))
    assert checkpointer.steps() == [1, 3, 4]
    assert value_of(checkpointer, 1) == 1.0


@pytest.mark.parametrize("name", ["wait", "close", "save"])
def test_a_failure_is_told_by(new_path: NewPath, name: str) -> None:
    checkpointer = Checkpointer(new_path(), every=1, options=SMALL)
    fail_in_the_background(checkpointer, 1)
    arguments = (2, state_at(2)) if name == "save" else ()
    with pytest.raises(StoreError, match="Input/output error"):
        getattr(checkpointer, name)(*arguments)
    checkpointer.wait()
    checkpointer.close()
    assert checkpointer.steps() == ([2] if name == "save" else [])


def test_a_step_that_is_skipped_or_not_due_does_not_tell_of_a_failure(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every=2, options=SMALL) as checkpointer:
        fail_in_the_background(checkpointer, 2)
        assert not checkpointer.step(3, state_at(3))
        assert checkpointer.restore(state_at(0)) is None
        with pytest.raises(StoreError):
            checkpointer.step(4, state_at(4))


def test_a_failure_never_masks_an_exception_under_way(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        faulty(BROKEN),
        pytest.raises(KeyError, match="mine"),
        Checkpointer(new_path(), every=1, options=SMALL) as checkpointer,
    ):
        checkpointer.step(1, state_at(1))
        raise KeyError("mine")
    assert "the save in flight failed" in caplog.text
    with pytest.raises(OptionError, match="is closed"):
        checkpointer.step(2, state_at(2))


def test_nor_does_a_failure_that_is_no_error_of_ours(
    new_path: NewPath, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("holdfast.saving.save.write_shards", write)
    with (
        pytest.raises(KeyError, match="mine"),
        Checkpointer(new_path(), every=1, options=SMALL) as checkpointer,
    ):
        checkpointer.step(1, state_at(1))
        raise KeyError("mine")
    assert "the save in flight failed: CUDA error" in caplog.text


def test_retention_is_done_when_wait_returns(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run, every=1, keep=Keep.latest(2), options=SMALL) as checkpointer:
        for step in range(1, 6):
            checkpointer.step(step, state_at(step))
        checkpointer.wait()
        assert checkpointer.steps() == [4, 5]
        assert (run / "LATEST").read_text() == "step-00000005\n"


def test_an_older_step_that_exists_is_refused_at_the_call(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every=1, options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
        with pytest.raises(AlreadyCommittedError, match=r"call retire_after\(step\) first"):
            checkpointer.step(1, state_at(1))


def test_every_save_and_load_is_noted_in_one_line(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
        checkpointer.save(2, state_at(2))
        assert checkpointer.restore(state_at(0)) == 2
        assert checkpointer.restore(state_at(0), step=1) == 1
    found = records(run)
    assert [(row["verb"], row["step"], row["rank"]) for row in found] == [
        ("save", 1, 0),
        ("save", 2, 0),
        ("load", 2, 0),
        ("load", 1, 0),
    ]
    within = {"wait", "plan", "stage", "write", "sync", "commit", "other"}
    for row in found[:2]:
        parts = dict(row["seconds"])
        assert parts.keys() == within | {"encode", "retire", "total"} and row["bytes"] >= 16_000
        assert parts["total"] == pytest.approx(sum(parts[part] for part in within), abs=1e-5)
        assert datetime.fromisoformat(row["time"]).utcoffset() == timedelta(0)
    assert 0 < found[0]["stall_s"] <= found[0]["seconds"]["total"] + 1e-3
    assert found[1]["stall_s"] >= found[1]["seconds"]["total"], "save holds training up whole"
    for row in found[2:]:
        assert row["bytes"] >= row["bytes_needed"] >= 16_000 and row["seconds"]["total"] > 0


def test_the_wait_for_the_save_before_is_noted_as_a_stall(new_path: NewPath) -> None:
    delay = Fault("sync", nth=1, action="delay", argument=500)
    run = new_path()
    with faulty(delay), Checkpointer(run, every=1, options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
        checkpointer.step(2, state_at(2))
    first, second = records(run)
    assert first["stall_s"] < 0.4 < second["stall_s"]


@pytest.mark.parametrize("stage", ["sync", "eager"])
def test_the_time_of_retention_is_noted_and_is_a_stall_where_training_waits_for_it(
    new_path: NewPath, stage: Any
) -> None:
    delay = Fault("rename", nth=1, action="delay", argument=500)  # of LATEST
    run = new_path()
    with faulty(delay), Checkpointer(run, every=1, stage=stage, options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
    (record,) = records(run)
    assert record["seconds"]["retire"] > 0.4 > record["seconds"]["total"]
    assert record["stall_s"] > 0.4 if stage == "sync" else record["stall_s"] < 0.4


def test_the_notes_disturb_no_tool(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
    assert (run / "metrics.jsonl").is_file()
    for verb in ("inspect", "verify"):
        command = [sys.executable, "-m", "holdfast", verb, str(run)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "metrics.jsonl" not in done.stdout
    assert checkpointer.steps() == [1]


def test_notes_that_cannot_be_taken_are_only_a_warning(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_path()
    (run / "metrics.jsonl").mkdir(parents=True)
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
        assert checkpointer.restore(state_at(0)) == 1
    assert "metrics.jsonl lacks the save of step 1" in caplog.text
    assert "metrics.jsonl lacks the load of step 1" in caplog.text


def test_one_line_is_logged_for_a_save(new_path: NewPath, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "holdfast"),
        Checkpointer(new_path(), every=1, options=SMALL) as checkpointer,
    ):
        checkpointer.step(1, state_at(1))
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "held up for" in record.message


def test_time_makes_saves_due(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every=timedelta(hours=1), options=SMALL) as checkpointer:
        assert not any(checkpointer.step(step, state_at(step)) for step in range(1, 50))
    with Checkpointer(new_path(), every=timedelta(microseconds=1), options=SMALL) as checkpointer:
        assert all(checkpointer.step(step, state_at(step)) for step in range(1, 5))
        checkpointer.save(5, state_at(5))
        assert not checkpointer.step(5, state_at(5)), "saved already"
    assert checkpointer.steps() == [1, 2, 3, 4, 5]


def test_auto_measures_the_first_step_and_then_spaces_saves_out(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every="auto", overhead=1e-9, options=SMALL) as checkpointer:
        saved = [step for step in range(1, 200) if checkpointer.step(step, state_at(step))]
        assert saved == [1]
    run = new_path()
    with Checkpointer(run, every="auto", overhead=1e9, stage="sync", options=SMALL) as checkpointer:
        while len(saved) < 4:
            step = saved[-1] + 1
            saved += [step] if checkpointer.step(step, state_at(step)) else []
    lengths = [row["seconds"]["total"] for row in records(run)]
    assert len(lengths) == 3 and min(lengths) > 0


def test_a_run_that_vanishes_is_an_error_at_the_call_until_it_is_back(new_path: NewPath) -> None:
    run, aside = new_path(), new_path()
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
        checkpointer.wait()
        run.rename(aside)
        for step in (2, 3):
            with pytest.raises(StoreError, match=r"the directory is gone"):
                checkpointer.step(step, state_at(step))
        assert not run.exists()
        aside.rename(run)
        assert checkpointer.step(4, state_at(4))
    assert checkpointer.steps() == [1, 4] and value_of(checkpointer, 1) == 1.0


def test_a_run_where_something_else_lies_is_an_error_at_the_call(new_path: NewPath) -> None:
    file = new_path()
    file.write_text("mine")
    with pytest.raises(OptionError, match=f"root is {file}, which is a file"):
        Checkpointer(file)
    with Checkpointer(file / "run", every=1, options=SMALL) as checkpointer:
        with pytest.raises(StoreError, match=r"is not a directory|Not a directory"):
            checkpointer.step(1, state_at(1))
        with pytest.raises(StoreError, match=r"is not a directory|Not a directory"):
            checkpointer.save(1, state_at(1))


def test_a_full_disk_in_the_background_is_told_with_its_kind(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A disk that hangs would hold who waits.
    monkeypatch.setattr(
        "holdfast.runs.directory.Run.advice", lambda run: pytest.fail("asks the disk")
    )
    full = Fault("write", nth=1, action="fail", argument=errno.ENOSPC, persistent=True)
    checkpointer = Checkpointer(new_path(), every=1, options=SMALL)
    with faulty(full):
        checkpointer.step(1, state_at(1))
        with pytest.raises(NoSpaceError) as raised:
            checkpointer.wait()
    (step, advice) = raised.value.__notes__
    assert "step 1" in step and repr(holdfast.Keep.all()) in advice
    assert "n steps take the room of n + 1" in advice


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stage", "later"),
        ("busy", "fail"),
        ("deadline_s", 0),
        ("deadline_s", "1 h"),
        ("emergency", 1),
        ("overhead", -1),
        ("ends_in_s", 0),
        ("mtbf_s", 60),
        ("every", 1.5),
    ],
)
def test_an_argument_that_cannot_be_is_refused(new_path: NewPath, name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{name} is"):
        Checkpointer(new_path(), **{name: value})


def test_a_checkpointer_made_alone_does_not_save_for_one_of_several_ranks(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    run = new_path()
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        for use in (checkpointer.step, checkpointer.save):
            with pytest.raises(OptionError, match="rank 1 of 4"):
                use(1, state_at(1))
        assert checkpointer.restore(state_at(0)) is None
    with Checkpointer(run, every=1, group="alone", options=SMALL) as checkpointer:
        assert checkpointer.step(1, state_at(1))
