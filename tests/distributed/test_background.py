"""Saves in the background on several ranks: together or not at all, by the deadline."""

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import BusyError, HoldfastError, PeerError
from holdfast.testing.faults import Fault, faulty

from .ranks import run_ranks, run_survivor

DEADLINE_S = 1.0


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _train(model, optimizer)
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}


def sharded_run(rank: int, root: str, stage: Any) -> dict[str, torch.Tensor]:
    """Train on while every step is saved; return what the third step was."""
    model, optimizer = _model()
    found = {}
    for step in range(5):
        if step == 3:
            found = _full(model)
        state = {"model": model, "optimizer": optimizer}
        handle = holdfast.save_async(state, f"{root}/{step}", stage=stage)
        _train(model, optimizer)
    handle.result()
    return found


@pytest.mark.parametrize("stage", ["eager", "lazy"])
def test_every_step_of_a_sharded_run_is_saved_while_it_goes_on(tmp_path: Path, stage: str) -> None:
    expected = run_ranks(2, sharded_run, str(tmp_path), stage)[0]
    with holdfast.open(tmp_path / "3") as checkpoint:
        assert checkpoint.verify() == []
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.tensor(f"model.{name}"), tensor)


def failing_rank(rank: int, root: str) -> list[str]:
    """Rank 1's disk is full: both fail, at once; then both save."""
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(8)}
    full = Fault("write", nth=1, action="fail", argument=errno.ENOSPC, persistent=True)
    told = []
    with faulty(*([full] if rank == 1 else [])):
        handle = holdfast.save_async(state, f"{root}/a")
        try:
            handle.result()
        except HoldfastError as error:
            told.append(type(error).__name__)
    holdfast.save_async(state, f"{root}/b").result()
    return told


def test_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    assert run_ranks(2, failing_rank, str(tmp_path)) == [["PeerError"], ["NoSpaceError"]]
    assert not (tmp_path / "a").exists()
    assert holdfast.open(tmp_path / "b").verify() == []


def untold_failure(rank: int, root: str) -> str:
    """Nobody asks for the result; the next save tells all ranks, and the one after saves."""
    state = {"a": torch.ones(1000), "b": torch.ones(1000)}
    broken = Fault("write", nth=1, action="fail", argument=errno.EIO, persistent=True)
    with faulty(*([broken] if rank == 1 else [])):
        holdfast.save_async(state, f"{root}/a").wait_done()
    told = ""
    try:
        holdfast.save_async(state, f"{root}/b")
    except HoldfastError as error:
        told = type(error).__name__
    holdfast.save_async(state, f"{root}/c").result()
    return told


def test_a_failure_nobody_asked_for_is_raised_on_every_rank(tmp_path: Path) -> None:
    assert run_ranks(2, untold_failure, str(tmp_path)) == ["PeerError", "StoreError"]
    assert not (tmp_path / "b").exists()
    assert holdfast.open(tmp_path / "c").verify() == []


def busy_rank(rank: int, root: str) -> list[bool]:
    """Rank 1 is slow; rank 0 skips with it."""
    slow = Fault("write", nth=1, action="delay", argument=400, persistent=True)
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(8)}
    with faulty(*([slow] if rank == 1 else [])):
        first = holdfast.save_async(state, f"{root}/a")
        second = holdfast.save_async(state, f"{root}/b", busy="skip")
        try:
            holdfast.save_async(state, f"{root}/c", busy="fail")
        except BusyError:
            failed = True
        first.result()
    return [second.skipped, failed]


def test_all_ranks_skip_when_one_is_busy(tmp_path: Path) -> None:
    assert run_ranks(3, busy_rank, str(tmp_path)) == [[True, True]] * 3
    assert not (tmp_path / "b").exists() and not (tmp_path / "c").exists()


def cancelling_rank(rank: int, root: str) -> str:
    """Rank 2 cancels: nobody commits."""
    slow = Fault("write", nth=1, action="delay", argument=200, persistent=True)
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(8)}
    with faulty(slow):
        handle = holdfast.save_async(state, f"{root}/a")
        if rank == 2:
            assert handle.cancel()
        try:
            handle.result()
        except HoldfastError as error:
            return type(error).__name__
    return ""


def test_a_rank_that_cancels_ends_the_save_on_all(tmp_path: Path) -> None:
    told = run_ranks(3, cancelling_rank, str(tmp_path))
    assert told == ["PeerError", "PeerError", "CancelledError"]
    assert not (tmp_path / "a").exists()


def small_pool(rank: int, root: str) -> str:
    """Only rank 1 has set a limit; all ranks refuse alike, without waiting for anything."""
    options = holdfast.Options(pool_bytes=32 << 20) if rank == 1 else None
    state = {f"t{i}": torch.zeros(4 << 20) for i in range(8)}
    try:
        holdfast.save_async(state, f"{root}/a", options=options)
    except HoldfastError as error:
        return str(error)
    return ""


def test_a_pool_too_small_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, small_pool, str(tmp_path))
    assert "rank 1 has to copy" in first and "pool_bytes is 33554432" in first
    assert second == first


def stopped_rank(rank: int, root: str, victim: int) -> tuple[str, float, bool]:
    """The victim is stopped in the middle of a save, and goes on after the others' deadline."""
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(8)}
    slow = Fault("write", nth=1, action="delay", argument=500, persistent=True)
    told = ""
    with faulty(*([slow] if rank == victim else [])):
        handle = holdfast.save_async(
            state, f"{root}/a", options=holdfast.Options(deadline_s=DEADLINE_S)
        )
        started = time.monotonic()
        if rank == victim:
            pid = os.getpid()
            if os.fork() == 0:
                time.sleep(DEADLINE_S + 5)
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
            os.kill(pid, signal.SIGSTOP)
        try:
            handle.result()
        except HoldfastError as error:
            told = type(error).__name__
    waited = time.monotonic() - started
    assert handle._thread is not None
    handle._thread.join()  # ends when the coordinator, who keeps the store, goes on
    holdfast.save_async(state, f"{root}/b").result()
    return told, waited, threading.active_count() == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_noticed_by_the_deadline(tmp_path: Path, victim: int) -> None:
    results = run_ranks(2, stopped_rank, str(tmp_path), victim)
    told, waited, clean = results[1 - victim]
    assert told == "PeerError" and waited <= DEADLINE_S + 5
    assert results[victim][0] != ""
    assert clean and results[victim][2]
    assert not (tmp_path / "a" / "MANIFEST").exists()
    assert holdfast.open(tmp_path / "b").verify() == []


def killed_rank(rank: int, root: str, victim: int) -> tuple[str, float]:
    """The victim dies in the middle of a save; the survivor learns it, and saves alone."""
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(8)}
    dies = Fault("write", nth=1, action="kill")
    with faulty(*([dies] if rank == victim else [])):
        handle = holdfast.save_async(
            state, f"{root}/a", options=holdfast.Options(deadline_s=DEADLINE_S)
        )
        started = time.monotonic()
        try:
            handle.result()
            told = ""
        except PeerError as error:
            told = str(error)
    waited = time.monotonic() - started
    holdfast.save_async(state, f"{root}/b", group="alone").result()
    return told, waited


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_noticed_by_the_deadline(tmp_path: Path, victim: int) -> None:
    told, waited = run_survivor(2, victim, killed_rank, str(tmp_path), victim)
    assert told and waited <= DEADLINE_S + 5
    assert not (tmp_path / "a" / "MANIFEST").exists()
    assert holdfast.open(tmp_path / "b").verify() == []


def stuck_rank(rank: int, root: str) -> str:
    """Rank 1's disk hangs past the deadline of a save, and the next one is asked for meanwhile."""
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(8)}
    hangs = Fault("write", nth=1, action="delay", argument=9000)
    with faulty(*([hangs] if rank == 1 else [])):
        first = holdfast.save_async(state, f"{root}/a", deadline_s=1.5)
    told = ""
    try:
        holdfast.save_async(state, f"{root}/b")
    except HoldfastError as error:
        told = type(error).__name__
    assert first._thread is not None
    first._thread.join()
    holdfast.save_async(state, f"{root}/c").result()
    return told


def test_a_rank_that_cannot_begin_the_next_save_does_not_leave_the_others_waiting(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, stuck_rank, str(tmp_path)) == ["PeerError", "StoreError"]
    assert not (tmp_path / "b").exists()
    assert holdfast.open(tmp_path / "c").verify() == []


def no_connection(rank: int, root: str) -> tuple[str, float]:
    """Rank 1 cannot open another connection to the store, once."""
    told, started = "", time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("torch.distributed.Store.clone", _fails)
        try:
            holdfast.save_async({"w": torch.ones(9)}, f"{root}/a", deadline_s=20).result()
        except HoldfastError as error:
            told = f"{type(error).__name__}: {error}"
    waited = time.monotonic() - started
    holdfast.save_async({"w": torch.ones(9)}, f"{root}/b").result()
    return told, waited


def _fails(*_: Any) -> None:
    raise RuntimeError("Too many open files")


def test_a_rank_that_cannot_reach_the_store_does_not_leave_the_others_waiting(
    tmp_path: Path,
) -> None:
    (first, waited), (second, _) = run_ranks(2, no_connection, str(tmp_path))
    assert "PeerError: rank 1 failed: PeerError: lost contact" in first and waited < 10
    assert "PeerError: lost contact" in second and "Too many open files" in second
    assert holdfast.open(tmp_path / "b").verify() == []


def bad_argument(rank: int, root: str) -> str:
    """Rank 1 gives a deadline that cannot be."""
    told = ""
    try:
        holdfast.save_async({"w": torch.ones(9)}, f"{root}/a", deadline_s=60.0 * (rank == 0))
    except HoldfastError as error:
        told = f"{type(error).__name__}: {error}"
    holdfast.save_async({"w": torch.ones(9)}, f"{root}/b").result()
    return told


def test_a_bad_argument_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    told = run_ranks(2, bad_argument, str(tmp_path))
    assert "PeerError: rank 1 failed: OptionError: deadline_s is 0.0" in told[0]
    assert "OptionError: deadline_s is 0.0" in told[1]
    assert holdfast.open(tmp_path / "b").verify() == []
