"""Saves that failed: each leaves a line in metrics.jsonl, and every verb that reads it says so."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Options
from holdfast.report.document import page_of
from holdfast.report.read import read_run
from holdfast.saving.handle import SaveHandle
from holdfast.testing import Fault, faulty

from .conftest import Command

SMALL = Options(pool_bytes=48 << 20)
STATE = {"w": torch.arange(4096.0)}
NO_SPACE = Fault("write", nth=1, persistent=True, argument=28)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(run: Path, stage: Any, *, recovers: bool) -> None:
    """Save step 1; fail at step 2; save step 3 if the run ``recovers``."""
    with Checkpointer(run, every=1, stage=stage, options=SMALL) as one:
        one.step(1, STATE)
        one.wait()
    with (
        faulty(NO_SPACE),
        Checkpointer(run, every=1, stage=stage, options=SMALL) as one,
        pytest.raises(holdfast.errors.NoSpaceError),
    ):
        one.step(2, STATE)
        one.wait()
    if recovers:
        with Checkpointer(run, every=1, stage=stage, options=SMALL) as one:
            one.step(3, STATE)


@pytest.mark.parametrize("stage", ["sync", "eager", "lazy"])
def test_a_failed_save_leaves_one_line(tmp_path: Path, stage: str) -> None:
    train(tmp_path, stage, recovers=True)
    lines = lines_of(tmp_path)
    assert [(line["verb"], line["step"]) for line in lines] == [
        ("save", 1),
        ("failure", 2),
        ("save", 3),
    ]
    assert lines[1].keys() == {"time", "verb", "step", "rank", "host", "error"}
    assert lines[1]["error"].startswith("NoSpaceError: ") and lines[1]["rank"] == 0


def test_a_save_that_fails_before_its_call_returns_leaves_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may end before the call has said who wants to know of that."""
    start = SaveHandle.start

    def start_and_end(handle: SaveHandle, *given: Any) -> None:
        start(handle, *given)
        handle.wait_done()

    monkeypatch.setattr(SaveHandle, "start", start_and_end)
    train(tmp_path, "eager", recovers=False)
    assert [line["verb"] for line in lines_of(tmp_path)] == ["save", "failure"]


def test_every_verb_says_that_the_newest_save_failed(
    tmp_path: Path, holdfast_command: Command
) -> None:
    train(tmp_path, "eager", recovers=False)
    answer = holdfast_command("check-run", tmp_path, "--disk-saves", "1")
    assert answer.code == 1 and (
        "ALERT  failed    step 2: the newest save failed: NoSpaceError" in answer.out
    )
    shown = holdfast_command("watch", tmp_path, "--once").out
    assert "the save of step 2 failed: NoSpaceError" in shown and "2  failed" in shown
    reported = holdfast_command("report", tmp_path, "-o", tmp_path / "run.html")
    assert "bad: The newest save failed: step 2" in reported.out
    assert "The newest save failed: step 2" in (tmp_path / "run.html").read_text()


def test_a_save_that_failed_before_a_good_one_wakes_nobody(
    tmp_path: Path, holdfast_command: Command
) -> None:
    train(tmp_path, "eager", recovers=True)
    assert holdfast_command("check-run", tmp_path, "--disk-saves", "1").code == 0
    found = read_run(tmp_path)
    assert [f.level for f in found.findings if f.kind == "failures"] == ["note"]
    assert "1 earlier save failed" in page_of(found) and found.timing.skipped_lines == 0
    assert found.timing.counts == {"save": 2, "failure": 1}
    assert [save.step for save in found.timing.saves] == [1, 3]


def test_a_job_that_another_has_taken_over_from_writes_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=SMALL) as old:
        old.save(1, STATE)
        job = f"with holdfast.Checkpointer({str(tmp_path)!r}) as one: one.save(2, {{'n': 1}})"
        subprocess.run([sys.executable, "-c", f"import holdfast\n{job}"], check=True)
        before = lines_of(tmp_path)
        with pytest.raises(holdfast.errors.FencedError):
            old.save(3, STATE)
    assert lines_of(tmp_path) == before


@pytest.mark.parametrize("error", [None, 7, "x" * 10**6, "\x1b[2J<script>", ["a"]])
def test_strange_lines_of_failures_break_nothing(
    tmp_path: Path, holdfast_command: Command, error: Any
) -> None:
    train(tmp_path, "sync", recovers=False)
    line = lines_of(tmp_path)[1] | {"error": error, "time": 7}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n" + json.dumps(line | {"step": -1}) + "\n")
    for verb in ("check-run", "watch", "report"):
        options = {"watch": ["--once"], "report": ["-o", tmp_path / "a.html"]}
        answer = holdfast_command(verb, tmp_path, *options.get(verb, []))
        assert answer.code in (0, 1) and "\x1b" not in answer.out, answer.err
    page = (tmp_path / "a.html").read_text()
    assert "2J<script>" not in page and len(page) < 300_000
