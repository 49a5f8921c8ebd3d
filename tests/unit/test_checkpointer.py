"""A run of checkpoints: saved when due, kept by policy, restored from the newest good one."""

import errno
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    MismatchError,
    NotCommittedError,
    OptionError,
    VersionError,
)
from holdfast.runs.described import Described
from holdfast.stores.local import LocalStore
from holdfast.testing import Fault, faulty

NewPath = Callable[[], Path]
DAY_S = 24 * 3600.0


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((40,), float(step)), "step": step}


def save_steps(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, state_at(step))


def damage(run: Path, step: int) -> None:
    """Flip a bit of a step's first payload."""
    (file,) = (run / f"step-{step:08d}" / "data").rglob("*.hf")
    content = bytearray(file.read_bytes())
    content[64] ^= 1
    file.write_bytes(content)


def test_steps_are_saved_when_they_are_due(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run, every=3) as checkpointer:
        assert checkpointer.steps() == []
        assert checkpointer.restore(state_at(0)) is None
        assert not run.exists()
        saved = [step for step in range(10) if checkpointer.step(step, state_at(step))]
        checkpointer.wait()
        assert saved == [0, 3, 6, 9] == checkpointer.steps()
        assert checkpointer.path(6) == f"{run}/step-00000006"
        assert holdfast.open(checkpointer.path(6)).step == 6
        into = state_at(0)
        assert checkpointer.restore(into) == 9
        assert into["step"] == 9
        assert into["w"][0] == 9.0
        assert checkpointer.restore(into, step=3) == 3
        assert into["w"][0] == 3.0
        with pytest.raises(NotCommittedError, match="step-00000004 does not exist"):
            checkpointer.restore(into, step=4)
    with Checkpointer(run) as checkpointer:
        assert not checkpointer.step(12, state_at(12))
        assert checkpointer.steps() == saved


def test_what_the_policy_lets_go_is_gone_with_its_directory(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run, keep=Keep.latest(2) | Keep.every(4)) as checkpointer:
        save_steps(checkpointer, 1, 2, 3, 4, 5, 6)
        assert checkpointer.steps() == [4, 5, 6]
    names = {entry.name for entry in run.iterdir()}
    kept = {"step-00000004", "step-00000005", "step-00000006"}
    assert names == {".epoch-00000001", "LATEST", "metrics.jsonl"} | kept


def test_the_best_are_kept_by_recorded_metrics_across_restarts(new_path: NewPath) -> None:
    run = new_path()
    losses = {1: 5.0, 2: 1.0, 3: math.nan, 4: 2.0, 5: 9.0}
    for step, loss in losses.items():
        with Checkpointer(run, keep=Keep.best("loss", 2)) as checkpointer:
            checkpointer.save(step, state_at(step), metrics={"loss": loss})
    assert checkpointer.steps() == [2, 4, 5]
    assert holdfast.open(checkpointer.path(2)).metrics == {"loss": 1.0}


def test_a_step_that_is_saved_again_is_judged_again(new_path: NewPath) -> None:
    with Checkpointer(new_path(), keep=Keep.best("loss", 1)) as checkpointer:
        for step, loss in ((10, 5.0), (20, 0.1)):
            checkpointer.save(step, state_at(step), metrics={"loss": loss})
        assert checkpointer.steps() == [20]
        checkpointer.save(30, state_at(30), metrics={"loss": 4.0})
        assert checkpointer.retire_after(10) == [20, 30]
        for step, loss in ((20, 9.0), (30, 1.0), (40, 2.0)):
            checkpointer.save(step, state_at(step), metrics={"loss": loss})
        assert checkpointer.steps() == [30, 40]


def test_metrics_that_are_not_finite_do_not_harm_the_checkpoint(new_path: NewPath) -> None:
    with Checkpointer(new_path()) as checkpointer:
        checkpointer.save(1, state_at(1), metrics={"a": math.nan, "b": -math.inf, "c": 2**70})
        assert checkpointer.restore(state_at(0)) == 1
        checkpoint = holdfast.open(checkpointer.path(1))
    assert checkpoint.verify() == []
    assert math.isnan(checkpoint.metrics["a"])
    assert (checkpoint.metrics["b"], checkpoint.metrics["c"]) == (-math.inf, 2**70)


def test_a_policy_that_keeps_fewer_steps_than_it_says_is_logged(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    keep = Keep.latest(2) | Keep.every(200)
    Checkpointer(new_path(), every=50, keep=keep)
    Checkpointer(new_path(), keep=keep)
    assert caplog.records == []
    Checkpointer(new_path(), every=500, keep=keep)
    (record,) = caplog.records
    assert "Keep.every(200) keeps only multiples of 1000. Give" in record.message
    assert record.levelno == logging.WARNING


def test_a_damaged_newest_step_is_skipped_loudly_and_replaced_when_reached(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_path()
    with Checkpointer(run, every=10) as checkpointer:
        save_steps(checkpointer, 10, 20, 30)
        with pytest.raises(AlreadyCommittedError, match=r"call retire_after\(step\) first"):
            checkpointer.step(30, state_at(30))
    damage(run, 30)
    with Checkpointer(run, every=10) as checkpointer:
        into = state_at(0)
        assert checkpointer.restore(into) == 20
        assert (into["step"], into["w"][0]) == (20, 20.0)
        (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert "step-00000030 is damaged and is skipped" in record.message
        assert "tensor w, chunk 0" in record.message
        with pytest.raises(CorruptError):
            checkpointer.restore(into, step=30)
        assert checkpointer.step(30, state_at(31))
        assert "replacing step 30" in caplog.text
    with Checkpointer(run) as checkpointer:
        assert checkpointer.restore(into) == 30
        assert into["step"] == 31


def test_damage_does_not_use_up_what_is_kept(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
    damage(run, 2)
    damage(run, 3)
    with Checkpointer(run, keep=Keep.latest(2)) as checkpointer:
        assert checkpointer.restore(state_at(0)) == 1
        checkpointer.save(4, state_at(4))
        assert checkpointer.steps() == [1, 2, 3, 4]


def test_when_all_are_damaged_the_error_names_each(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        save_steps(checkpointer, 1, 2)
        damage(run, 1)
        (run / "step-00000002" / "MANIFEST").write_bytes(b"")
        with pytest.raises(
            CorruptError, match=r"every checkpoint .* is damaged\. step 2: .*step 1:"
        ):
            checkpointer.restore(state_at(0))


def test_a_target_that_does_not_fit_is_no_damage(new_path: NewPath) -> None:
    with Checkpointer(new_path()) as checkpointer:
        save_steps(checkpointer, 1, 2)
        with pytest.raises(MismatchError):
            checkpointer.restore({"other": torch.zeros(1)})


def test_a_step_of_a_newer_holdfast_is_neither_skipped_nor_removed(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run, keep=Keep.best("loss", 1)) as checkpointer:
        checkpointer.save(1, state_at(1), metrics={"loss": 5.0})
        manifest = run / "step-00000001" / "MANIFEST"
        content = bytearray(manifest.read_bytes())
        content[8] = 2
        manifest.write_bytes(content)
    with Checkpointer(run, keep=Keep.best("loss", 1)) as checkpointer:
        with pytest.raises(VersionError):
            checkpointer.restore(state_at(0))
        checkpointer.save(2, state_at(2), metrics={"loss": 1.0})
        checkpointer.save(3, state_at(3), metrics={"loss": 2.0})
        assert checkpointer.steps() == [1, 2, 3]


def test_one_step_that_cannot_be_read_does_not_stop_the_retention_of_others(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, state_at(1), metrics={"loss": 5.0})
    (run / "step-00000001" / "MANIFEST").write_bytes(b"x" * 200)
    with Checkpointer(run, keep=Keep.best("loss", 1)) as checkpointer:
        for step in (2, 3, 4):
            checkpointer.save(step, state_at(step), metrics={"loss": float(step)})
        assert checkpointer.steps() == [1, 2, 4]
    assert "step 1 cannot be read, and is not deleted" in caplog.text


def test_retire_after_makes_way_for_another_future(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every=1) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
        assert checkpointer.retire_after(1) == [2, 3]
        assert checkpointer.steps() == [1]
        assert checkpointer.retire_after(1) == []
        assert checkpointer.step(2, state_at(7))
        into = state_at(0)
        assert checkpointer.restore(into) == 2
        assert into["step"] == 7


def test_a_restore_of_a_step_that_is_not_the_newest_says_what_that_means(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(new_path()) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
        assert checkpointer.restore(state_at(0), step=3) == 3
        assert "later steps" not in caplog.text
        assert checkpointer.restore(state_at(0), step=1) == 1
        assert "up to step 3" in caplog.text
        assert "call retire_after(1) first" in caplog.text


def test_what_was_just_saved_is_kept_even_below_older_steps(new_path: NewPath) -> None:
    with Checkpointer(new_path(), keep=Keep.latest(1)) as checkpointer:
        save_steps(checkpointer, 30, 10)
        assert checkpointer.steps() == [10, 30]


def test_latest_is_a_hint_and_garbage_in_it_changes_nothing(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        save_steps(checkpointer, 1, 2)
    hint = run / "LATEST"
    assert hint.read_text() == "step-00000002\n"
    for content in (b"step-00000001\n", b"", b"\xff" * 99, b"../../etc\n", b"step-99999999\n"):
        hint.write_bytes(content)
        with Checkpointer(run) as checkpointer:
            assert checkpointer.restore(state_at(0)) == 2
    hint.unlink()
    os.symlink("/nowhere", hint)
    with Checkpointer(run) as checkpointer:
        assert checkpointer.restore(state_at(0)) == 2
        checkpointer.save(3, state_at(3))
    assert hint.read_text() == "step-00000003\n"
    assert not hint.is_symlink()


def test_what_else_lies_in_a_run_is_left_alone(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run, keep=Keep.latest(1)) as checkpointer:
        save_steps(checkpointer, 1)
        for name in ("notes.txt", "step-7", "step-00000009"):
            (run / name).write_text("mine")
        (run / "plots").mkdir()
        save_steps(checkpointer, 2, 3)
        assert checkpointer.steps() == [3]
    assert {"notes.txt", "step-7", "step-00000009", "plots"} < {p.name for p in run.iterdir()}


def test_a_closed_checkpointer_is_not_used(new_path: NewPath) -> None:
    with Checkpointer(new_path(), every=5) as checkpointer:
        save_steps(checkpointer, 5)
    checkpointer.close()
    uses: list[Callable[[], Any]] = [
        lambda: checkpointer.step(1, state_at(1)),
        lambda: checkpointer.step(10, state_at(10)),
        lambda: checkpointer.save(10, state_at(10)),
        lambda: checkpointer.restore(state_at(0)),
        lambda: checkpointer.retire_after(0),
    ]
    for use in uses:
        with pytest.raises(OptionError, match="is closed; create a new one"):
            use()
    assert checkpointer.steps() == [5]


@pytest.mark.parametrize(
    "arguments",
    [
        *({"every": 0}, {"every": 2.0}, {"every": True}, {"keep": 3}),
        *({"codec": "loss-less"}, {"codec": None}, {"options": {"io": "buffered"}}),
    ],
)
def test_an_argument_that_cannot_be_is_refused(
    new_path: NewPath, arguments: dict[str, Any]
) -> None:
    with pytest.raises(OptionError, match=r"every is|keep is|codec is|options is"):
        Checkpointer(new_path(), **arguments)


@pytest.mark.parametrize("step", [-1, 2.5, "7", True])
def test_a_step_that_cannot_be_is_refused(new_path: NewPath, step: Any) -> None:
    with Checkpointer(new_path(), every=1) as checkpointer:
        for use in (checkpointer.save, checkpointer.step):
            with pytest.raises(OptionError, match="expected an integer from 0"):
                use(step, state_at(1))
        assert checkpointer.steps() == []


@pytest.mark.parametrize("operation", ["rename", "unlink", "remove_directory"])
def test_a_save_is_good_even_when_tidying_up_fails(
    new_path: NewPath, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        save_steps(checkpointer, 1)
    fault = Fault(operation, 1, persistent=True, argument=errno.EIO)
    with faulty(fault), Checkpointer(run, keep=Keep.latest(1)) as checkpointer:
        save_steps(checkpointer, 2)
        assert 2 in checkpointer.steps()
    if operation != "remove_directory":
        assert "step 2 is saved, but tidying" in caplog.text
    with Checkpointer(run, keep=Keep.latest(1)) as checkpointer:
        assert checkpointer.restore(state_at(0)) == 2
        save_steps(checkpointer, 3)
        assert checkpointer.steps() == [3]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_policy_that_fails_fails_no_save(
    new_path: NewPath, caplog: pytest.LogCaptureFixture, *, in_background: bool
) -> None:
    def rule(steps: Sequence[int], _: object) -> set[int]:
        raise OverflowError("int too large to convert to float")

    keep = Keep((rule,), "of the user's own")
    with Checkpointer(new_path(), every=1, keep=keep) as checkpointer:
        for step in (1, 2):
            if in_background:
                assert checkpointer.step(step, state_at(step))
                checkpointer.wait()
            else:
                checkpointer.save(step, state_at(step))
        assert checkpointer.steps() == [1, 2]
    told = [r for r in caplog.records if "step 2 is saved, but tidying" in r.message]
    assert ["int too large" in record.message for record in told] == [True]
    assert told[0].exc_info is not None  # where it is the program's own fault, it shows where


@pytest.mark.parametrize("fault", ["the hint", "a step", "a judgement", "what a dead save left"])
def test_one_fault_in_tidying_up_keeps_nothing_else_from_being_done(
    new_path: NewPath, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_at(step), metrics={"loss": float(-step)})
    first, second = (run / f"step-0000000{n}" / "data" / ("aa" * 16) for n in (0, 9))
    first.mkdir(parents=True)
    second.mkdir(parents=True)
    if fault == "the hint":
        (run / "LATEST").unlink()
        (run / "LATEST").mkdir()
    elif fault == "a step":
        (run / "step-00000001" / "data" / "not ours" / "directory").mkdir(parents=True)
    elif fault == "a judgement":
        (run / "step-00000001" / "MANIFEST").unlink()
        (run / "step-00000001" / "MANIFEST").mkdir()
    else:
        (first / "directory").mkdir()
    for path in (first / "directory", first, second):
        for place in (path, path.parent, path.parent.parent) if path.exists() else ():
            os.utime(place, (time.time() - 2 * DAY_S,) * 2)
    with Checkpointer(run, keep=Keep.best("loss", 1)) as checkpointer:
        checkpointer.save(3, state_at(3), metrics={"loss": -3.0})
        assert checkpointer.steps() == ([1, 3] if fault == "a judgement" else [3])
    (warning,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith(
        ("step 3 is saved, but tidying", "step 1 cannot be read, and is not deleted")
    )
    assert (run / "LATEST").is_dir() or (run / "LATEST").read_text() == "step-00000003\n"
    # It is moved away before it is removed, and what cannot be removed stays there.
    left = [*(run / "step-00000000").rglob("directory")]
    assert bool(left) == (fault == "what a dead save left")
    assert not first.exists() and not second.exists()


def test_remains_of_dead_saves_are_swept_only_when_they_are_old(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        save_steps(checkpointer, 1)
        remains = {
            "beside a checkpoint": run / "step-00000001" / "data" / ("aa" * 16),
            "alone": run / "step-00000002" / "data" / ("bb" * 16),
        }
        for place in remains.values():
            place.mkdir(parents=True)
            (place / "00000-0.hf").write_bytes(b"part")
        save_steps(checkpointer, 3)
        assert all((place / "00000-0.hf").exists() for place in remains.values())
        for place in remains.values():
            for path in (place / "00000-0.hf", place, place.parent, place.parent.parent):
                os.utime(path, (time.time() - 2 * DAY_S,) * 2)
        (fresh := run / "step-00000004" / "data" / ("cc" * 16)).mkdir(parents=True)
        os.utime(fresh, (time.time() - 2 * DAY_S,) * 2)
        (fresh / "00000-0.hf").write_bytes(b"being written now")
        with caplog.at_level(logging.INFO, "holdfast"):
            save_steps(checkpointer, 5)
    assert not any(place.exists() for place in remains.values())
    assert not (run / "step-00000002").exists()
    assert (fresh / "00000-0.hf").exists()
    assert caplog.text.count("of a save that died") == 2
    assert holdfast.open(checkpointer.path(1)).verify() == []


def test_a_step_under_the_name_of_another_is_not_restored(new_path: NewPath) -> None:
    run = holdfast.Checkpointer(new_path())
    for step in (1, 2):
        run.save(step, {"n": step})
    first, second = Path(run.path(1)), Path(run.path(2))
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)
    for options in ({}, {"step": 1}, {"step": 2}):
        with pytest.raises(MismatchError, match=r"is named step \d, but holds step \d"):
            holdfast.Checkpointer(first.parent).restore({"n": 0}, **options)


def test_latest_never_names_a_step_that_was_let_go(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        save_steps(checkpointer, 1, 2)
        assert (run / "LATEST").read_text() == "step-00000002\n"
        checkpointer.retire_after(1)
        assert not (run / "LATEST").exists()
        save_steps(checkpointer, 3)
    assert (run / "LATEST").read_text() == "step-00000003\n"


def test_a_restore_says_that_the_newest_step_has_lost_its_manifest(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_path()
    with Checkpointer(run, every=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.full((4,), float(step))})
        Path(checkpointer.path(2), "MANIFEST").unlink()
    found = {"w": torch.zeros(4)}
    with caplog.at_level("ERROR", "holdfast"):
        assert Checkpointer(run).restore(found) == 1
    (record,) = caplog.records
    assert "a newer step was not restored" in record.message
    assert "MANIFEST is lost" in record.message


def test_a_restore_says_nothing_of_an_older_step_that_was_deleted(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    # A job that is stopped right before it moves LATEST moves it there when it goes on.
    run = new_path()
    with Checkpointer(run, every=1) as checkpointer:
        save_steps(checkpointer, 1, 2)
        Path(checkpointer.path(1), "MANIFEST").unlink()
        (run / "LATEST").write_text("step-00000001\n")
    with caplog.at_level("ERROR", "holdfast"):
        assert Checkpointer(run).restore(state_at(0)) == 2
    assert not caplog.records


def test_a_step_that_is_saved_again_keeps_the_base_of_its_new_delta(new_path: NewPath) -> None:
    run, delta = new_path(), holdfast.codecs.Delta(every=8)
    with Checkpointer(run, every=1) as earlier:
        for step in (2, 3, 4):
            earlier.save(step, {"w": torch.full((9000,), float(step))})
    with Checkpointer(run, every=1, codec=delta, keep=Keep.latest(1)) as checkpointer:
        for step in (1, 2, 3):  # the policy deletes 2 and 3 when it has looked at them
            checkpointer.save(step, {"w": torch.arange(9000.0) + step / 64})
            checkpointer.wait()
        assert all(not holdfast.verify(checkpointer.path(s)).damage for s in checkpointer.steps())
        assert holdfast.open(checkpointer.path(3)).base is not None


@pytest.mark.parametrize("keep", [Keep.all(), Keep.latest(9)])
def test_data_that_a_delta_needs_stays_when_its_manifest_is_lost(
    new_path: NewPath, keep: Keep
) -> None:
    run, delta = new_path(), holdfast.codecs.Delta(every=8)
    with Checkpointer(run, codec=delta, keep=keep) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.arange(9000.0) + step / 64})
        (first := run / "step-00000001" / "MANIFEST").unlink()
        for path in (*first.parent.rglob("*"), first.parent):
            os.utime(path, (time.time() - 2 * DAY_S,) * 2)
        checkpointer.save(9, {"w": torch.zeros(4)})
        assert holdfast.repair(first.parent, write=True).rebuilt
        assert holdfast.open(checkpointer.path(2)).tensor("w").equal(torch.arange(9000.0) + 2 / 64)


def test_why_a_step_cannot_be_read_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-00000001").mkdir()
    manifest = tmp_path / "step-00000001" / "MANIFEST"
    manifest.write_bytes(b"x" * 100)
    described = Described(LocalStore(tmp_path))
    assert not described.read(1) and not described.read(1)
    manifest.write_bytes(b"")
    assert not described.read(1)
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2


def test_a_step_that_has_just_gone_is_forgotten_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread, such as one that uploads, lets go of steps of the same run."""
    holdfast.save({"w": torch.ones(3)}, tmp_path / "step-00000001", step=1)
    described = Described(LocalStore(tmp_path))
    assert described.read(1)
    shutil.rmtree(tmp_path / "step-00000001")
    assert not described.read(1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not described._headers and not described._stamps
