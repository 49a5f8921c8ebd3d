"""A run of several real ranks: they decide alike, save together, and end together."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast import Checkpointer, Options
from holdfast.errors import HoldfastError, NoSpaceError
from holdfast.runs import emergency as emergency_module
from holdfast.testing import Fault, faulty

from .ranks import run_ranks

SMALL = Options(pool_bytes=32 << 20)
BROKEN = Fault("write", nth=1, action="fail", argument=errno.EIO, persistent=True)


LATE_S = 1.0


def state_at(step: int) -> dict[str, Any]:
    tensor = torch.full((64, 8), float(step))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(tensor, mesh, [Shard(0)]), "step": step}


def whole_steps(run: Path | str) -> list[int]:
    """Return the steps there are; each must be whole."""
    checkpointer = Checkpointer(run)
    for step in checkpointer.steps():
        with holdfast.open(checkpointer.path(step)) as checkpoint:
            assert checkpoint.verify() == []
            assert checkpoint.tensor("w").eq(step).all()
    return checkpointer.steps()


def signalled(rank: int, run: str, victim: int, aware: bool) -> list[tuple[int, bool, bool]]:
    """One rank gets SIGTERM in its third step; all leave the loop."""
    passed_on: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: passed_on.append(number))
    seen = []
    with Checkpointer(run, every=100, options=SMALL) as checkpointer:
        for step in range(1, 8):
            dist.barrier()  # what training does with its gradients
            if step == 3 and rank == victim:
                os.kill(os.getpid(), signal.SIGTERM)
            saved = checkpointer.step(step, state_at(step))
            seen.append((step, saved, checkpointer.stopping))
            if checkpointer.stopping and aware:
                break
    assert passed_on == ([signal.SIGTERM] if rank == victim and not aware else [])
    return seen


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_rank_makes_all_save_the_same_last_step(
    tmp_path: Path, victim: int
) -> None:
    first, second = run_ranks(2, signalled, str(tmp_path / "run"), victim, True)
    assert first == second
    assert first[-1] == (4, True, True) and not any(saved for _, saved, _ in first[:-1])
    assert whole_steps(tmp_path / "run") == [4]


def test_the_rank_that_got_a_signal_gets_it_again_when_it_goes_on(tmp_path: Path) -> None:
    first, second = run_ranks(2, signalled, str(tmp_path / "run"), 1, False)
    assert first == second
    assert [step for step, saved, _ in first if saved] == [4]
    assert len(first) == 7


def timed(rank: int, run: str, every: Any, busy: Any) -> list[int]:
    """Steps of a few milliseconds, that are not equally long on all ranks."""
    with Checkpointer(run, every=every, overhead=0.5, busy=busy, options=SMALL) as checkpointer:
        saved = []
        for step in range(1, 61):
            dist.barrier()
            torch.randn(200 * (1 + rank), 200) @ torch.randn(200, 200)
            if checkpointer.step(step, state_at(step)):
                saved.append(step)
    return saved


@pytest.mark.parametrize("every", [timedelta(milliseconds=20), "auto"], ids=["time", "auto"])
@pytest.mark.parametrize("busy", ["wait", "skip"])
def test_what_the_clock_decides_is_the_same_on_all_ranks(
    tmp_path: Path, every: Any, busy: str
) -> None:
    first, second = run_ranks(2, timed, str(tmp_path / "run"), every, busy)
    assert first == second == whole_steps(tmp_path / "run")
    assert len(first) >= 1 and (every != "auto" or first[0] == 1)


def ending(rank: int, run: str) -> tuple[list[int], bool]:
    """Only the coordinator's clock counts, and it says: not due yet, but the end is near."""
    every = timedelta(hours=1) if rank == 0 else timedelta(microseconds=1)
    ends_in_s = 4.9 if rank == 0 else 1e6  # less than the margin: at once
    with Checkpointer(run, every=every, ends_in_s=ends_in_s, options=SMALL) as checkpointer:
        saved = []
        for step in range(1, 10):
            dist.barrier()
            if checkpointer.step(step, state_at(step)):
                saved.append(step)
        return saved, checkpointer.stopping


def test_all_ranks_make_the_last_save_before_the_job_ends(tmp_path: Path) -> None:
    assert run_ranks(2, ending, str(tmp_path / "run")) == [([2], True)] * 2
    assert whole_steps(tmp_path / "run") == [2]


def untold(rank: int, run: str) -> list[str]:
    """The disk of rank 1 fails step 2; the next step tells both, and is saved."""
    told = []
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        for step in range(1, 5):
            with faulty(*([BROKEN] if rank == 1 and step == 2 else [])):
                try:
                    checkpointer.step(step, state_at(step))
                except HoldfastError as error:
                    told.append(f"{step} {type(error).__name__}")
                if checkpointer._saver._flight is not None:
                    checkpointer._saver._flight.handle.wait_done()
    return told


def test_a_failure_on_one_rank_is_told_to_all_and_keeps_no_step_from_being_saved(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, untold, str(tmp_path / "run")) == [["3 PeerError"], ["3 StoreError"]]
    assert whole_steps(tmp_path / "run") == [1, 3, 4]


def too_large(rank: int, run: str) -> list[str]:
    """There is no room for the state on the disk."""
    told = []
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        for use in (checkpointer.step, checkpointer.save):
            try:
                use(1, {"w": torch.ones(1 << 20)})
            except NoSpaceError as error:
                told.append(str(error))
    return told


def test_a_state_that_cannot_fit_is_refused_alike_on_all_ranks(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        first, second = run_ranks(2, too_large, str(tmp_path / "run"))
        assert first == second and len(first) == 2
        assert re.search(r"needs 4\.\d+ MB, and [\d.]+ [kM]B are free there", first[0])
        left = sorted(os.listdir(tmp_path / "run"))
        assert left == [".epoch-00000001", "metrics.jsonl"], "the run is this job's, which failed"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def failing(rank: int, run: str, failing_ranks: int, meeting_s: float) -> tuple[str, float]:
    """All ranks fail in their fourth step, or only the first ones."""
    emergency_module.MEETING_S = meeting_s
    started, told = time.monotonic(), ""
    try:
        with Checkpointer(run, emergency=True, options=SMALL) as checkpointer:
            for step in range(1, 4):
                dist.barrier()
                checkpointer.step(step, state_at(step))
            if rank < failing_ranks:
                started = time.monotonic()
                raise ValueError("mine")
    except ValueError as error:
        told = str(error)
    return told, time.monotonic() - started


def test_when_all_ranks_fail_alike_they_save_together(tmp_path: Path) -> None:
    results = run_ranks(2, failing, str(tmp_path / "run"), 2, 25.0)
    assert [told for told, _ in results] == ["mine", "mine"]
    assert whole_steps(tmp_path / "run") == [3]


def test_a_rank_that_fails_alone_waits_for_the_others_only_so_long(tmp_path: Path) -> None:
    (told, waited_s), (other, _) = run_ranks(2, failing, str(tmp_path / "run"), 1, 0.5)
    assert (told, other) == ("mine", "")
    assert waited_s < 10
    assert whole_steps(tmp_path / "run") == []


def in_step(rank: int, run: str) -> str:
    """Rank 1's optimizer has begun a step when both fail: rank 0 hears of it at once."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    started = time.monotonic()
    try:
        with Checkpointer(run, emergency=True, options=SMALL) as checkpointer:
            for step in range(1, 4):
                dist.barrier()
                checkpointer.step(step, state_at(step))
            if rank == 1:
                optimizer.step()
            raise ValueError
    except ValueError:
        assert time.monotonic() - started < 20
    return next(text for text in told if "emergency" in text)


def test_nobody_saves_when_the_optimizer_of_one_rank_has_begun_a_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, in_step, str(tmp_path / "run"))
    assert first.startswith("no emergency save: PeerError: rank 1 failed: StateError")
    assert "an optimizer has changed the state since step 3" in second
    assert whole_steps(tmp_path / "run") == []


def made_too_early(rank: int, run: str) -> str:
    """The Checkpointer was made before there was a process group."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # or the other may not be connected yet
    dist.destroy_process_group()
    checkpointer = Checkpointer(run, every=1, options=SMALL)
    dist.init_process_group("gloo", store=PrefixStore("again", store), rank=rank, world_size=2)
    with checkpointer:
        try:
            checkpointer.step(1, {"w": torch.ones(3)})
        except HoldfastError as error:
            return str(error)
    return ""


def test_a_checkpointer_made_before_the_process_group_is_refused(tmp_path: Path) -> None:
    for told in run_ranks(2, made_too_early, str(tmp_path / "run")):
        assert "was created before the process group of 2 ranks" in told
    assert not (tmp_path / "run").exists()


def noted(rank: int, run: str) -> None:
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        checkpointer.step(1, state_at(1))
        assert checkpointer.restore(state_at(0)) == 1


def test_every_rank_has_a_line_for_each_save_and_load(tmp_path: Path) -> None:
    run_ranks(3, noted, str(tmp_path / "run"))
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    expected = [(verb, 1, rank) for verb in ("save", "load") for rank in range(3)]
    assert [(row["verb"], row["step"], row["rank"]) for row in rows] == expected
    assert sum(row["bytes"] for row in rows[:3]) == 64 * 8 * 4
    assert all(row["stall_s"] > 0 for row in rows)


def late(rank: int, run: str, stage: Any) -> None:
    first, second = state_at(1), state_at(2)  # which is a collective itself
    with Checkpointer(run, every=1, stage=stage, options=SMALL) as checkpointer:
        checkpointer.step(1, first)
        dist.barrier()  # none is late already
        time.sleep(LATE_S if rank == 1 else 0)
        checkpointer.step(2, second)


@pytest.mark.parametrize("stage", ["sync", "eager"])
def test_the_wait_for_a_slow_rank_is_told_apart_from_the_work(tmp_path: Path, stage: str) -> None:
    run_ranks(3, late, str(tmp_path / "run"), stage)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    first, slow, third = (row for row in rows if row["step"] == 2)
    assert min(first["seconds"]["wait"], third["seconds"]["wait"]) > LATE_S / 2
    assert slow["seconds"]["wait"] < LATE_S / 2
    for row in (first, slow, third):
        assert row["seconds"]["plan"] < LATE_S / 2
        # Training waits until the ranks meet. The last wait of an eager save is in the background.
        waits = [end - start for part, start, end, _ in row["spans"] if part == "wait"]
        held_up = sum(waits[:-1] if stage == "eager" else waits)
        assert row["stall_s"] >= held_up - 1e-5
        assert row["seconds"]["total"] >= row["seconds"]["wait"]
