"""`holdfast ls`, `check-run` and `prune`: what is in a run, what is wrong, and what goes."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.format.progress import RankProgress, encode_slot
from holdfast.runs import alerts
from holdfast.runs.alerts import Facts, Limits, judge
from unit.test_plain_numbers import give_metric

from .conftest import Command, flip_bit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of five steps, whose job has ended."""
    root = tmp_path / "runs" / "a"
    for step in range(1, 6):
        metrics = {"loss": float(abs(step - 2))}
        holdfast.save(
            {"w": torch.arange(1000.0)}, root / f"step-{step:08d}", step=step, metrics=metrics
        )
    return root


def steps_of(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def test_ls_lists_runs_steps_and_what_is_in_one(run: Path, holdfast_command: Command) -> None:
    above = holdfast_command("ls", run.parent)
    assert above.out.splitlines()[1].split() == ["name", "steps", "newest", "durable"]
    assert above.out.splitlines()[2].split()[:3] == ["a", "5", "step-00000005"]
    steps = holdfast_command("ls", run)
    assert steps.out.splitlines()[0] == f"{run}: 5 steps"
    last = steps.out.splitlines()[-1]
    assert re.fullmatch("step-00000005  .* s ago  .* kB      1  loss 3", last)
    one = holdfast_command("ls", run / "step-00000001", "--json")
    assert one == holdfast_command("inspect", run / "step-00000001", "--json")
    assert holdfast_command("ls", run.parent.parent).out.splitlines()[2].startswith("runs/a  ")


def test_an_integer_that_no_float_holds_is_shown_as_infinite(
    run: Path, holdfast_command: Command
) -> None:
    give_metric(run / "step-00000002", 10**400)
    for words in (("ls", run), ("inspect", run), ("inspect", run / "step-00000002")):
        answer = holdfast_command(*words)
        assert answer.code == 0 and "loss inf" in answer.out
    assert holdfast_command("report", run, "-o", run.parent / "report.html").code == 0


def test_ls_opens_only_the_steps_that_it_shows(
    run: Path, holdfast_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", "9")
    flip_bit(run / "step-00000001" / "MANIFEST", 30)
    answer = holdfast_command("ls", run)
    assert answer.out.splitlines()[2] == "… 1 earlier; --all shows them"
    assert "damaged" not in answer.out and "damaged" in holdfast_command("ls", run, "--all").out


def test_ls_of_an_empty_directory_says_so(tmp_path: Path, holdfast_command: Command) -> None:
    answer = holdfast_command("ls", tmp_path)
    assert answer.code == 2 and "has no runs and no checkpoints" in answer.err


def test_prune_says_first_and_deletes_when_told(run: Path, holdfast_command: Command) -> None:
    rules = ("--keep", "latest=1", "--keep", "best=loss:1")
    dry = holdfast_command("prune", run, *rules)
    assert dry.code == 0 and re.search("3 steps of .* kB would be deleted: 1, 3, 4\n", dry.out)
    assert steps_of(run) == [1, 2, 3, 4, 5]
    done = holdfast_command("prune", run, *rules, "--delete", "--json")
    assert done.document["removed"] == [1, 3, 4] and done.document["kept"] == [2, 5]
    assert steps_of(run) == [2, 5]
    assert "nothing to delete" in holdfast_command("prune", run, *rules).out


def test_prune_keeps_the_bases_of_what_it_keeps(tmp_path: Path) -> None:
    weights = torch.randn(4096)
    for step in (1, 2, 3):
        codec = "raw" if step == 1 else holdfast.codecs.Delta(every=8)
        codec = holdfast.codecs.Delta(every=8)
        weights[step] += 1
        holdfast.save({"w": weights}, tmp_path / f"step-{step:08d}", step=step, codec=codec)
    found = holdfast.prune(tmp_path, holdfast.Keep.latest(1), dry_run=False)
    assert holdfast.open(tmp_path / "step-00000003").base is not None
    assert found.removed == () and steps_of(tmp_path) == [1, 2, 3]


def test_prune_refuses_a_metric_that_no_step_has(run: Path, holdfast_command: Command) -> None:
    answer = holdfast_command("prune", run, "--keep", "best=los:1", "--delete")
    assert answer.code == 2 and "no step of" in answer.err and "found loss" in answer.err
    assert steps_of(run) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("rule", ["latest", "latest=", "latest=x", "best=loss", "every=-1", "x=1"])
def test_prune_refuses_what_is_no_rule(run: Path, holdfast_command: Command, rule: str) -> None:
    answer = holdfast_command("prune", run, "--keep", rule)
    assert answer.code == 2 and f"--keep {rule} is no rule; expected latest=3" in answer.err


def test_prune_refuses_a_run_that_a_job_writes_to(run: Path, holdfast_command: Command) -> None:
    program = f"""
import sys, torch, holdfast
one = holdfast.Checkpointer({str(run)!r}, every=1)
state = {{"w": torch.arange(1000.0)}}
one.restore(state)
one.step(6, state)
one.wait()
print("saved", flush=True)
sys.stdin.read()
"""
    job = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None and job.stdin is not None
    try:
        assert job.stdout.readline() == "saved\n"
        answer = holdfast_command("prune", run, "--keep", "latest=1", "--delete")
        assert answer.code == 2 and f"is in use by process {job.pid} on" in answer.err
        assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    finally:
        job.stdin.close()
        job.wait(60)
        job.stdout.close()
    assert holdfast_command("prune", run, "--keep", "latest=1", "--delete").code == 0
    assert steps_of(run) == [6]


def test_a_job_that_was_pruned_under_is_refused_at_its_next_save(run: Path) -> None:
    state = {"w": torch.arange(1000.0)}
    program = f"""
import holdfast
holdfast.prune({str(run)!r}, holdfast.Keep.latest(2), dry_run=False)
"""
    with holdfast.Checkpointer(run) as frozen:
        frozen.restore(state)  # it knows which epoch there was, and is frozen here
        subprocess.run([sys.executable, "-c", program], check=True)
        with pytest.raises(holdfast.errors.FencedError):
            frozen.save(7, state)
    assert steps_of(run) == [4, 5]


def progress(root: Path, **changed: Any) -> None:
    known: dict[str, Any] = {"host": "h", "pid": 1, "rank": 0, "world_size": 1}
    said = RankProgress(**(known | {"time_s": time.time()} | changed))
    (root / ".progress-h").write_bytes(encode_slot(said))


def test_check_run_is_silent_about_a_good_run(run: Path, holdfast_command: Command) -> None:
    answer = holdfast_command("check-run", run, "--durable-min", "60")
    assert (answer.code, answer.out) == (0, f"{run}: ok\n")


def test_check_run_finds_each_fault(run: Path, holdfast_command: Command) -> None:
    def rules(*options: str) -> list[str]:
        answer = holdfast_command("check-run", run, "--json", *options)
        assert answer.code == bool(answer.document["alerts"])
        return [alert["rule"] for alert in answer.document["alerts"]]

    now_s = time.time()
    progress(run, failed_step=6, failed_s=now_s, failed="NoSpaceError: full", committed_s=1.0)
    assert rules() == ["failed"]
    progress(run, time_s=now_s - 3600)
    assert rules() == ["silent"]
    os.unlink(run / ".progress-h")
    os.utime(run / "step-00000005" / "MANIFEST", (now_s - 7200, now_s - 7200))
    assert rules("--durable-min", "60") == ["durable"] and rules() == []
    records = [
        {
            "verb": "save",
            "step": 5,
            "time": "t",
            "rank": rank,
            "stall_s": 3.0,
            "seconds": {"write": 9.0 if rank == 2 else 1.0, "wait": 0.0},
        }
        for rank in range(4)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    assert rules("--stall-s", "2") == ["stall", "straggler"]
    text = holdfast_command("check-run", run).out
    assert "rank 2 takes 9.00 s to write; the median is 1.00 s" in text
    records[0]["stored_bytes"] = 10**18
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    assert "disk" in rules()


def test_the_disk_rule_knows_what_retention_frees() -> None:
    facts = Facts(now_s=0.0, free_bytes=25, step_bytes=10, growth=1.0)
    assert [a.text for a in judge(facts, Limits())] == [
        "25 B are free, and a step takes 10 B: it is full in 2 saves"
    ]
    assert judge(facts, Limits(disk_saves=2)) == []
    steady = Facts(now_s=0.0, free_bytes=25, step_bytes=10, growth=0.0)
    assert judge(steady, Limits()) == []
    tight = Facts(now_s=0.0, free_bytes=9, step_bytes=10, growth=0.0)
    assert "the next save does not fit" in judge(tight, Limits())[0].text


def test_an_alert_is_told_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    told: list[holdfast.Event] = []
    observer = holdfast.Alerts(told.append, stall_s=1.0, durable_min=1e-9)
    observer._limits = Limits(stall_s=1.0)

    def commit(step: int, stall_s: float) -> None:
        ranks = ({"rank": 0, "stall_s": stall_s},)
        known: dict[str, Any] = {"run": "memory://x", "rank": 1, "world_size": 2, "time_s": 1.0}
        observer(holdfast.Event(kind="committed", step=step, ranks=ranks, **known))

    for step, stall_s in enumerate([2.0, 3.0, 0.5, 4.0]):
        commit(step, stall_s)
    assert [(event.kind, event.rule, event.step) for event in told] == [
        ("alert", "stall", 0),
        ("alert", "stall", 3),
    ]
    assert "alert stall: memory://x, step 3: the save held up training for 4.00 s" in caplog.text


def test_nothing_durable_is_noticed_by_the_clock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[holdfast.Event] = []
    observer = holdfast.Alerts(told.append, durable_min=10)
    event = holdfast.Event(
        kind="planned", run="r", step=1, rank=0, world_size=1, time_s=time.time()
    )
    observer(event)
    observer.tick()
    assert told == []
    later_s = time.time() + 601
    monkeypatch.setattr(alerts.time, "time", lambda: later_s)
    observer.tick()
    assert [event.rule for event in told] == ["durable"]


@pytest.mark.parametrize("limit", [0, -1, float("nan"), "x", True])
def test_a_limit_that_cannot_be_is_refused(run: Path, limit: Any) -> None:
    for make in (holdfast.Alerts, lambda **given: holdfast.check_run(run, **given)):
        with pytest.raises(holdfast.errors.OptionError, match=r"stall_s is .* above 0, or None"):
            make(stall_s=limit)
