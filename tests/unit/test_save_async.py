"""Saves in the background: what they promise about the copy, about failures, about each other."""

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from descriptors import open_descriptors, opened_since
from holdfast.errors import (
    AlreadyCommittedError,
    BusyError,
    CancelledError,
    HoldfastError,
    NoSpaceError,
    OptionError,
    StateError,
    StoreError,
)
from holdfast.runs.fence import Fence
from holdfast.saving import handle as handle_module
from holdfast.saving import save as save_module
from holdfast.stores.base import Store
from holdfast.stores.local import LocalStore
from holdfast.testing.faults import Fault, faulty

from .mutations import mutate_and_check

SLOW = Fault("write", nth=1, action="delay", argument=1000, persistent=True)


def load(path: Path | str, like: dict[str, Any]) -> dict[str, Any]:
    target = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    holdfast.load(path, into=target)
    return target


def training() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    return model, optimizer, {"model": model, "optimizer": optimizer, "step": 1}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Leave nothing in flight, and no failure untold, to the next test."""
    yield
    handle = handle_module.in_flight()
    if handle is not None:
        handle.wait_done()
    if handle_module._last is not None:
        handle_module._last.untold()


@contextmanager
def copies_held_back() -> Iterator[threading.Event]:
    """Copy nothing in the background until the event is set."""
    release = threading.Event()
    original = holdfast.engine.staging.copy_held  # type: ignore[attr-defined]

    def waits(*held: Any) -> Any:
        release.wait()
        return original(*held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.engine.staging.copy_held", waits)
        yield release


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 20), "v": torch.randn(300, 7).t(), "n": torch.arange(5)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    handle = holdfast.save_async(state, tmp_path / "a", step=3)
    handle.wait_staged()
    for tensor in state.values():
        tensor.zero_()
    assert handle.result() == str(tmp_path / "a")
    assert handle.done() and handle.progress().state == "committed"
    assert handle.progress().written_bytes >= handle.progress().total_bytes
    found = load(tmp_path / "a", state)
    assert all(torch.equal(found[name], expected[name]) for name in state)
    assert holdfast.open(tmp_path / "a").verify() == []


@pytest.mark.parametrize("codec", ["raw", "lossless", "delta"])
def test_progress_ends_at_its_total(tmp_path: Path, codec: str) -> None:
    state = {"w": torch.zeros(100_000), "n": 1}
    handle = holdfast.save_async(state, tmp_path / "a", codec=codec)
    before = handle.progress()
    assert before.written_bytes <= before.total_bytes
    handle.result()
    after = handle.progress()
    assert after.state == "committed" and after.written_bytes == after.total_bytes > 0
    assert codec == "raw" or after.total_bytes < 400_000 == after.staged_bytes


def test_the_files_are_those_of_a_save(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(random.Random(i).randrange(1, 400_000)) for i in range(30)}
    options = holdfast.Options(chunk_elements=1 << 16)
    holdfast.save(state, tmp_path / "a", options=options)
    holdfast.save_async(state, tmp_path / "b", options=options).result()
    sizes = [
        sorted(f.stat().st_size for f in (tmp_path / name / "data").rglob("*.hf"))
        for name in ("a", "b")
    ]
    assert sizes[0] and abs(sizes[0][0] - sizes[1][0]) < 1 << 12
    found = load(tmp_path / "b", state)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_several_files_are_written_from_one_copy(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(50_000 + i) for i in range(40)}
    options = holdfast.Options(file_bytes=1 << 20, chunk_elements=10_000)
    holdfast.save_async(state, tmp_path / "a", options=options).result()
    assert len(list((tmp_path / "a" / "data").rglob("*.hf"))) > 5
    assert holdfast.open(tmp_path / "a").verify() == []
    found = load(tmp_path / "a", state)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_after_a_failed_fsync_the_copy_is_written_again(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(50_000) for i in range(30)}
    options = holdfast.Options(file_bytes=1 << 20, chunk_elements=10_000)
    with faulty(Fault("sync", nth=3, action="fail", argument=errno.EIO)):
        holdfast.save_async(state, tmp_path / "a", options=options).result()
    assert holdfast.open(tmp_path / "a").verify() == []
    found = load(tmp_path / "a", state)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_the_second_save_takes_the_same_memory(tmp_path: Path) -> None:
    from holdfast.engine import pool

    state = {"w": torch.randn(1 << 20)}
    holdfast.save_async(state, tmp_path / "a").result()
    held = next(iter(pool._staging.values())).pool
    holdfast.save_async(state, tmp_path / "b").result()
    assert next(iter(pool._staging.values())).pool is held


def test_a_lazy_save_holds_the_next_step_until_it_is_staged(tmp_path: Path) -> None:
    model, optimizer, state = training()
    for number in range(20):
        before, moments = snapshot(model), optimizer.state_dict()["state"][0]["exp_avg"].clone()
        handle = holdfast.save_async(state, tmp_path / f"{number}", stage="lazy")
        train_step(model, optimizer)
        handle.result()
        fresh, other, target = training()
        holdfast.load(tmp_path / f"{number}", into=target)
        assert all(torch.equal(snapshot(fresh)[name], before[name]) for name in before)
        assert torch.equal(other.state_dict()["state"][0]["exp_avg"], moments)


def test_a_lazy_save_fails_when_a_parameter_is_changed_behind_its_back(tmp_path: Path) -> None:
    model, _, state = training()
    with copies_held_back() as release:
        handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
        with torch.no_grad():
            model[0].weight.add_(1)
        release.set()
        with pytest.raises(StateError, match=r"model\.0\.weight was changed before it was copied"):
            handle.wait_staged()
    with pytest.raises(StateError):
        handle.result()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("steps", [True, False])
def test_a_copy_made_within_a_long_change_in_place_fails_the_save(
    tmp_path: Path, steps: bool
) -> None:
    """Torch counts a change when it is over: before, the copy looks as if nothing had happened."""
    model, optimizer, state = training()
    with faulty(SLOW):
        model[0].weight.data.add_(1)  # the change begins, uncounted
        handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
        handle._staged.wait()
        with torch.no_grad():
            model[0].weight.add_(1)  # it ends, and is counted
        if steps:
            train_step(model, optimizer)
        with pytest.raises(StateError, match=r"model\.0\.weight was changed before it was copied"):
            handle.result()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("steps", [True, False])
def test_after_a_step_or_after_waiting_anything_may_change(tmp_path: Path, steps: bool) -> None:
    model, optimizer, state = training()
    with faulty(SLOW):
        handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
        if steps:
            train_step(model, optimizer)
        else:
            handle.wait_staged()
        assert not handle.done()
        with torch.no_grad():
            model[0].weight.add_(1)
        handle.result()


def test_a_buffer_beside_a_parameter_in_one_memory_is_copied_at_the_call(tmp_path: Path) -> None:
    memory = torch.zeros(2000)
    weight, buffer = nn.Parameter(memory[:1000]), memory[1000:].detach()
    state = {"w": weight, "b": buffer, "optimizer": torch.optim.SGD([weight], lr=0.1)}
    with copies_held_back() as release:
        handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
        buffer.data.add_(1)
        release.set()
        handle.result()
    with holdfast.open(tmp_path / "a") as checkpoint:
        assert not checkpoint.tensor("b").any()


def test_a_rank_that_cannot_stage_trains_on_while_the_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, state = training()
    holdfast.save_async(state, tmp_path / "a", stage="lazy").result()  # holds the steps up
    release = threading.Event()
    original = holdfast.saving.save.raise_now

    def when_all_have_come(*arguments: Any) -> None:
        release.wait(60)
        original(*arguments)

    monkeypatch.setattr("holdfast.saving.save.raise_now", when_all_have_come)
    monkeypatch.setattr("holdfast.engine.pool.available_bytes", lambda: 1 << 20)
    monkeypatch.setattr("holdfast.engine.pool._staging", {})
    with pytest.raises(OptionError, match=r"and [\d.]+ [kMGT]?B are available"):
        holdfast.save_async(state, tmp_path / "b", stage="lazy")
    step = threading.Thread(target=train_step, args=(model, optimizer), daemon=True)
    step.start()
    step.join(10)
    stepped = not step.is_alive()
    release.set()
    assert stepped


def test_a_lazy_save_fails_when_a_parameter_is_freed(tmp_path: Path) -> None:
    model, _, state = training()
    with copies_held_back() as release:
        handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
        model[2].weight.untyped_storage().resize_(0)
        release.set()
        with pytest.raises(StateError, match=r"memory of model\.2\.weight was freed"):
            handle.result()


def test_memory_freed_in_the_middle_of_a_copy_fails_the_save_and_not_the_process(
    tmp_path: Path,
) -> None:
    """The copy runs into memory that is no longer there; whoever trains must not notice."""
    failed = 0
    for number in range(12):
        weight = nn.Parameter(torch.ones(32 << 20))  # so large that freeing it unmaps it
        optimizer = torch.optim.SGD([weight], lr=0.1)
        state = {"w": weight, "optimizer": optimizer}
        handle = holdfast.save_async(state, tmp_path / str(number), stage="lazy")
        for _ in range(number * 200):
            pass
        weight.untyped_storage().resize_(0)
        try:
            handle.result()
        except StateError as error:
            assert "freed" in str(error)
            failed += 1
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    assert failed


def test_a_tensor_dropped_while_it_is_staged_is_saved_nevertheless(tmp_path: Path) -> None:
    model, optimizer, state = training()
    expected = snapshot(model)
    handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
    del model, optimizer, state
    handle.result()
    fresh, _, target = training()
    holdfast.load(tmp_path / "a", into=target)
    assert all(torch.equal(snapshot(fresh)[name], expected[name]) for name in expected)


def test_a_failure_is_logged_and_raised_by_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty(Fault("write", nth=1, action="fail", argument=errno.ENOSPC, persistent=True)):
        handle = holdfast.save_async({"w": torch.ones(1000)}, tmp_path / "a")
        with pytest.raises(NoSpaceError, match="No space left"):
            handle.result()
    assert "No space left" in caplog.text
    assert not (tmp_path / "a").exists()
    holdfast.save_async({"w": torch.ones(10)}, tmp_path / "b").result()  # it has been told


def test_a_failure_nobody_asked_for_is_raised_by_the_next_save(tmp_path: Path) -> None:
    with faulty(Fault("write", nth=1, action="fail", argument=errno.EIO, persistent=True)):
        handle = holdfast.save_async({"w": torch.ones(1000)}, tmp_path / "a")
        handle.wait_done()
    with pytest.raises(StoreError) as raised:
        holdfast.save_async({"w": torch.ones(10)}, tmp_path / "b")
    assert "the error of the save of" in str(raised.value.__notes__)
    holdfast.save_async({"w": torch.ones(10)}, tmp_path / "b").result()


def test_busy_waits_skips_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, commit = {"w": torch.ones(1000)}, save_module.commit
    gates = {str(tmp_path / name): threading.Event() for name in "abc"}

    def held(store: Store, *given: Any, **more: Any) -> None:
        assert gates[store.location].wait(60)
        commit(store, *given, **more)

    monkeypatch.setattr(save_module, "commit", held)
    first = holdfast.save_async(state, tmp_path / "a")
    skipped = holdfast.save_async(state, tmp_path / "b", busy="skip")
    assert skipped.skipped and skipped.done() and not (tmp_path / "b").exists()
    with pytest.raises(BusyError, match="still in flight on rank 0"):
        skipped.result()
    with pytest.raises(BusyError):
        holdfast.save_async(state, tmp_path / "b", busy="fail")
    threading.Timer(0.2, gates[str(tmp_path / "a")].set).start()
    second = holdfast.save_async(state, tmp_path / "c", busy="wait")
    assert first.done() and not second.done()
    gates[str(tmp_path / "c")].set()
    assert second.result() == str(tmp_path / "c")
    assert first.result() == str(tmp_path / "a")


def test_a_cancelled_save_leaves_nothing(tmp_path: Path) -> None:
    with faulty(SLOW):
        handle = holdfast.save_async({"w": torch.ones(1000)}, tmp_path / "a")
        assert handle.cancel()
        with pytest.raises(CancelledError):
            handle.result()
    assert not (tmp_path / "a").exists()
    assert not handle.cancel()
    done = holdfast.save_async({"w": torch.ones(10)}, tmp_path / "b")
    done.result()
    assert not done.cancel()


def test_a_save_past_its_deadline_fails(tmp_path: Path) -> None:
    with faulty(SLOW):
        handle = holdfast.save_async({"w": torch.ones(1000)}, tmp_path / "a", deadline_s=0.1)
        with pytest.raises(StoreError, match="deadline"):
            handle.result()
    assert not (tmp_path / "a").exists()


def test_nothing_is_committed_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks take it by then that nothing was."""
    original = LocalStore.sync_above

    def until_too_late(store: LocalStore, name: str) -> None:
        """Do the last that is done before the MANIFEST appears."""
        original(store, name)
        handle_module._last.ledger.end_at(0.0)  # type: ignore[union-attr]

    monkeypatch.setattr(LocalStore, "sync_above", until_too_late)
    handle = holdfast.save_async({"w": torch.ones(1000)}, tmp_path / "a")
    with pytest.raises(StoreError, match="deadline passed"):
        handle.result()
    assert not (tmp_path / "a").exists()


def test_nothing_is_committed_when_the_look_for_a_newer_job_takes_until_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Fence.hold

    def until_too_late(fence: Fence) -> None:
        original(fence)
        if (tmp_path / "step-00000001" / "data").exists():  # the last look, not the first
            handle_module._last.ledger.end_at(0.0)  # type: ignore[union-attr]

    monkeypatch.setattr(Fence, "hold", until_too_late)
    with holdfast.Checkpointer(tmp_path, every=1, signals=()) as run:
        run.step(1, {"w": torch.ones(1000)})
        with pytest.raises(StoreError, match="deadline passed"):
            run.wait()
        assert run.steps() == []


@pytest.mark.parametrize("deadline_s", [1e12, float("inf")])
def test_a_deadline_may_be_further_away_than_a_clock_can_count(
    tmp_path: Path, deadline_s: float
) -> None:
    holdfast.save_async({"w": torch.ones(9)}, tmp_path / "a", deadline_s=deadline_s).result()
    assert holdfast.open(tmp_path / "a").verify() == []


def test_a_pool_too_small_is_refused_with_both_numbers(tmp_path: Path) -> None:
    options = holdfast.Options(pool_bytes=32 << 20)
    state = {"w": torch.zeros(12 << 20)}
    with pytest.raises(
        OptionError, match=r"pool_bytes is 33554432, but rank 0 has to copy \d+ bytes"
    ):
        holdfast.save_async(state, tmp_path / "a", options=options)
    assert not (tmp_path / "a").exists()


def test_memory_the_machine_has_not_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.pool.available_bytes", lambda: 1 << 20)
    monkeypatch.setattr("holdfast.engine.pool._staging", {})
    with pytest.raises(OptionError, match=r"and [\d.]+ [kMGT]?B are available"):
        holdfast.save_async({"w": torch.zeros(12 << 20)}, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_step_that_exists_is_refused_at_the_call(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(3)}, tmp_path / "a")
    with pytest.raises(AlreadyCommittedError):
        holdfast.save_async({"w": torch.ones(3)}, tmp_path / "a")


@pytest.mark.parametrize(
    ("argument", "value"),
    [("stage", "later"), ("busy", True), ("deadline_s", 0), ("deadline_s", "1 h")],
)
def test_an_argument_that_cannot_be_is_refused(tmp_path: Path, argument: str, value: Any) -> None:
    with pytest.raises(OptionError, match=argument):
        holdfast.save_async({"w": torch.ones(3)}, tmp_path / "a", **{argument: value})


def test_one_of_several_ranks_without_a_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for verb in (holdfast.save, holdfast.save_async):
        with pytest.raises(OptionError, match="rank 1 of 4"):
            verb({"w": torch.ones(3)}, tmp_path / "a")
    holdfast.save_async({"w": torch.ones(3)}, tmp_path / "a", group="alone").result()


def test_a_save_in_flight_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        holdfast.save_async({"w": torch.ones(3)}, tmp_path / "a").result()
    assert [r.message.split(":")[0] for r in caplog.records] == [f"saved {tmp_path / 'a'}"]


def test_where_no_thread_can_be_had_the_save_is_made_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", fails)
    niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for stage in ("eager", "lazy"):
        _, _, state = training()
        handle = holdfast.save_async(state, tmp_path / stage, stage=stage)  # type: ignore[arg-type]
        assert handle.done() and handle.result() == str(tmp_path / stage)
        assert holdfast.open(tmp_path / stage).verify() == []
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == niceness


@pytest.mark.parametrize("more", [0, 10, 18])
def test_a_save_stands_back_behind_a_training_that_is_niced_itself(more: int) -> None:
    training = min(os.getpriority(os.PRIO_PROCESS, 0) + more, 19)
    script = (
        "import os; from holdfast.threads import begin_behind; "
        "assert begin_behind(lambda: True); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    command = ["nice", "-n", str(more), sys.executable, "-c", script]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(printed) == min(training + 5, 19)


def test_threads_and_descriptors_do_not_pile_up(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}

    holdfast.save_async(state, tmp_path / "first").result()
    threads, descriptors = threading.active_count(), open_descriptors()
    for number in range(30):
        holdfast.save_async(state, tmp_path / str(number)).result()
    handle_module._last.wait_done()  # type: ignore[union-attr]
    assert threading.active_count() <= threads
    assert not opened_since(descriptors)


@pytest.mark.parametrize("stage", ["eager", "lazy"])
def test_random_changes_after_staging_reach_no_file(tmp_path: Path, stage: str) -> None:
    """`make mutations` makes 10,000 of each."""
    assert mutate_and_check(tmp_path, trials=250, stage=stage, seed=11) == []


def test_a_failure_that_no_generator_can_raise_is_told_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def stop(*_: object) -> None:
        raise StopIteration("of a codec")

    with monkeypatch.context() as planted:
        planted.setattr("holdfast.saving.save.write_shards", stop)
        handle = holdfast.save_async({"w": torch.ones(2)}, tmp_path / "a")
        handle.add_done_callback(lambda _: ended.set())
        assert ended.wait(20)
    with pytest.raises(HoldfastError, match=r"the save of .*a failed: StopIteration"):
        holdfast.save_async({"w": torch.ones(2)}, tmp_path / "b")
    holdfast.save_async({"w": torch.ones(2)}, tmp_path / "b").result()
