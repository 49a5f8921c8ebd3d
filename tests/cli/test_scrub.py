"""`holdfast scrub`: every byte of a run is read, slowly, once, however often it is interrupted."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.engine.retire import retire
from holdfast.stores.local import LocalStore

from .conftest import Command, data_files, flip_bit

NewPath = Callable[[], Path]
OPTIONS = holdfast.Options(chunk_elements=1 << 20)  # a chunk is a read of 4 MiB
READ_BYTES = 3 * ((12 << 20) + 4096)  # of the fixture; whole pages
STATE, REPORT = ".scrub.json", "scrub.jsonl"


@pytest.fixture
def run(new_path: NewPath) -> Path:
    """Three steps of three reads each."""
    root = new_path()
    for step in range(3):
        holdfast.save(
            {"w": torch.full((3 << 20,), float(step)), "n": step}, at(root, step), options=OPTIONS
        )
    return root


def at(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def lines(root: Path) -> list[Any]:
    return [json.loads(line) for line in (root / REPORT).read_text().splitlines()]


def test_a_good_run(run: Path, holdfast_command: Command) -> None:
    answer = holdfast_command("scrub", run, "--mb-per-s", 0)
    assert answer.code == 0 and "3 steps, 37.8 MB read; 0 faults" in answer.out
    assert not (run / STATE).exists()
    *steps, whole = lines(run)
    assert [(s["step"], s["good"]) for s in steps] == [(f"step-{n:08d}", True) for n in range(3)]
    assert whole["verb"] == "pass" and whole["faults"] == 0 and whole["steps"] == 3
    assert holdfast_command("verify", run).code == holdfast_command("inspect", run).code == 0
    document = holdfast_command("scrub", run, "--mb-per-s", 0, "--json").document
    assert document["good"] and document["verified"] == 3 and len(lines(run)) == 8


def test_faults_are_found_and_told_by_the_exit_code(run: Path, holdfast_command: Command) -> None:
    flip_bit(data_files(at(run, 1))[0], 5 << 20)
    flip_bit(at(run, 2) / "MANIFEST", 100)
    answer = holdfast_command("scrub", run, "--mb-per-s", 0)
    assert answer.code == 1 and answer.out.count("BAD") == 2 and "holdfast repair" in answer.out
    assert "lost: w [1048576:2097152]" in answer.out
    assert [line["good"] for line in lines(run)[:-1]] == [True, False, False]
    assert lines(run)[1]["damage"][0]["tensor"] == "w" and lines(run)[-1]["faults"] == 2


@pytest.mark.parametrize("reads", range(1, 10))
def test_it_goes_on_where_it_was_interrupted(run: Path, reads: int) -> None:
    """What was read before is not read again, and a fault that was found before is told."""
    flip_bit(data_files(at(run, 0))[0], 4100)
    seen: list[int] = []

    def interrupt(size: int) -> None:
        seen.append(size)
        if sum(map(bool, seen)) == reads:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        holdfast.scrub(run, report=interrupt)
    assert (run / STATE).exists()
    target = {"w": torch.zeros(3 << 20), "n": 0}
    assert Checkpointer(run, every=1, keep=Keep.latest(9)).restore(target) == 2  # in nobody's way
    again: list[int] = []
    done = holdfast.scrub(run, report=again.append)
    assert sum(map(bool, again)) == 9 - reads
    assert (done.verified, len(done.damage), done.read_bytes) == (3, 1, sum(seen) + sum(again))
    assert not (run / STATE).exists()
    assert [line["step"] for line in lines(run)[:-1]] == [f"step-{n:08d}" for n in range(3)]
    assert sum(line["read_bytes"] for line in lines(run)[:-1]) == done.read_bytes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_costs_little(run: Path, number: signal.Signals) -> None:
    """A real process, at a rate at which it takes four seconds."""
    code = "from holdfast.integrity import scrub; scrub.SAVE_EVERY_S = 0; "
    code += "from holdfast.cli import main; "
    command = [sys.executable, "-c", code + "exit(main())", "scrub", str(run), "--mb-per-s", "10"]
    # A shell may have had this process ignore SIGINT, which children inherit.
    process = subprocess.Popen(
        command,
        preexec_fn=lambda: signal.signal(2, signal.SIG_DFL),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (run / STATE).exists() or json.loads((run / STATE).read_text())["place"][1] == 0:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -9)
    if number != signal.SIGKILL:
        assert re.fullmatch(
            r"holdfast: stopped after [012] of 3 steps; 0 faults so far; call again to go on\n",
            told,
        )
    state = json.loads((run / STATE).read_text())
    assert 0 < state["read_bytes"] < 37 << 20
    done = holdfast.scrub(run)
    assert done.started == state["started"] and done.verified == 3
    assert done.read_bytes == READ_BYTES and not done.damage
    assert [p for p in run.iterdir() if p.name.startswith(".scrub")] == []


def test_it_keeps_to_the_rate(run: Path) -> None:
    started = time.monotonic()
    holdfast.scrub(run, bytes_per_s=20e6)
    assert time.monotonic() - started > 36e6 / 20e6 - 1.1  # it may be a second ahead


@pytest.mark.parametrize("how", ["retired", "saved anew"])
def test_steps_that_go_meanwhile_are_no_faults(new_path: NewPath, how: str) -> None:
    """Each of several files, so that some are gone when they are looked for."""
    options = holdfast.Options(file_bytes=1 << 16)
    state = {name: torch.ones(12_000) for name in "abc"}
    retired: list[int] = []
    for reads in range(1, 100):
        root, seen = new_path(), list[int]()
        for step in range(3):
            holdfast.save(state, at(root, step), options=options)

        def let_go(
            size: int, root: Path = root, seen: list[int] = seen, reads: int = reads
        ) -> None:
            seen.append(size)
            if len(seen) == reads:
                retire(LocalStore(at(root, 1)))
                if how == "saved anew":
                    holdfast.save(state, at(root, 1), options=options)

        done = holdfast.scrub(root, report=let_go)
        assert done.damage == [] and done.unread == []
        assert done.verified + len(done.retired) == 3
        retired += [reads] * len(done.retired)
        if len(seen) < reads:
            break
    assert 3 <= len(retired) < reads < 99, retired


def test_a_base_that_is_gone_is_found(new_path: NewPath) -> None:
    root = new_path()
    for step in range(3):
        holdfast.save({"w": torch.arange(9000.0) + step / 64}, at(root, step), codec="delta")
    assert holdfast.scrub(root).damage == []
    shutil.rmtree(at(root, 0))
    ((step, fault),) = holdfast.scrub(root).damage
    assert step == "step-00000001" and "is missing" in fault.what and fault.lost[0].tensor == "w"


def test_what_cannot_be(run: Path, new_path: NewPath, holdfast_command: Command) -> None:
    for arguments in ([at(run, 0)], [new_path()], [run, "--mb-per-s", "-1"]):
        assert holdfast_command("scrub", *arguments).code == 2
    slow = holdfast_command("scrub", run, "--mb-per-s", "1e-9")
    assert slow.code == 2 and "expected at least 0.001, or 0 for no limit" in slow.err
    empty = new_path()
    (empty / "step-00000001").mkdir(parents=True)
    answer = holdfast_command("scrub", empty)
    assert answer.code == 2 and "no committed step" in answer.err
    with pytest.raises(holdfast.errors.OptionError):
        holdfast.scrub(run, bytes_per_s=0)


@pytest.mark.parametrize(
    "state",
    [b"", b"[]", b"{", b'{"todo": ["../elsewhere"]}', b'{"todo": 3}', b"\xff\xfe", b"[" * 100_000],
)
def test_a_state_file_that_is_damaged_only_costs_time(run: Path, state: bytes) -> None:
    (run / STATE).write_bytes(state)
    assert holdfast.scrub(run).verified == 3


def test_a_state_file_leads_nowhere_else(run: Path) -> None:
    outside = run.parent / "step-outside"
    holdfast.save({"x": torch.ones(3)}, outside)

    def interrupt(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        holdfast.scrub(run, report=interrupt)
    state = json.loads((run / STATE).read_text())
    state["todo"] = ["step-00000001", "../step-outside", "step-/../../step-outside", 7]
    (run / STATE).write_text(json.dumps(state))
    assert holdfast.scrub(run).verified == 1
