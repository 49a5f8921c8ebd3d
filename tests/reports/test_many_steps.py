"""A run with very many steps and saves: what looks at it opens a bounded number of them.

`benchmarks/many_steps.py` measures a million; here it runs with fewer.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.report import metrics, read
from holdfast.report.read import read_run
from holdfast.stores.local import LocalStore
from holdfast.tools import ls, watch

from .simulated_run import write_metrics

NewPath = Callable[[], Path]
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "many_steps.py"
STEPS = 3000


@pytest.fixture
def run(new_path: NewPath) -> Path:
    """The newest five of its steps are real."""
    run = new_path()
    for step in range(1, STEPS - 4):
        (run / f"step-{step:08d}").mkdir(parents=True)
        (run / f"step-{step:08d}" / "MANIFEST").touch()
    for step in range(STEPS - 4, STEPS + 1):
        holdfast.save({"n": step}, run / f"step-{step:08d}", step=step)
    write_metrics(run, 30, 2)
    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often stores were asked."""
    found: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(LocalStore, name)

        def call(*arguments: Any, **options: Any) -> Any:
            found[name] += 1
            return real(*arguments, **options)

        return call

    for name in ("exists", "list", "get", "modified_s"):
        monkeypatch.setattr(LocalStore, name, counted(name))
    return found


def test_check_run_and_watch_ask_for_few_steps(run: Path, calls: Counter[str]) -> None:
    assert holdfast.check_run(run, durable_min=60, disk_saves=None) == []
    assert sum(calls.values()) < 100, calls
    calls.clear()
    assert watch.look(str(run))["steps"] == STEPS
    assert sum(calls.values()) < 20, calls


def test_ls_and_report_open_the_newest_steps(
    run: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ls.ls(str(run))
    assert found is not None and found["steps"] == STEPS and len(found["shown"]) < 60
    assert sum(calls.values()) < 600, calls
    calls.clear()
    monkeypatch.setattr(read, "STEPS_MAX", 5)
    report = read_run(run)
    assert [step.step for step in report.steps] == [*range(STEPS - 4, STEPS + 1)]
    assert report.earlier_steps == STEPS - 5
    assert f"{STEPS - 5:,} older steps were not opened" in [f.title for f in report.findings]
    assert sum(calls.values()) < 200, calls


def test_the_oldest_metrics_of_very_many_are_not_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LINES_MAX", 150)
    (run / "metrics.jsonl").rename(run / "metrics-000003.jsonl")
    for number in (1, 2):
        write_metrics(run, 30, 2, seed=number)
        (run / "metrics.jsonl").rename(run / f"metrics-{number:06d}.jsonl")
    write_metrics(run, 30, 2)
    report = read_run(run)
    assert report.timing.unread_files == 2 and report.timing.counts == {"save": 30}
    assert "2 older files of metrics were not read" in [f.title for f in report.findings]
    monkeypatch.setattr(metrics, "LINES_MAX", 1)  # the newest file is read, whatever its size
    assert read_run(run).timing.unread_files == 3


def test_each_verb_answers_in_bounded_time_and_memory(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--steps", "2000", "--files", "1", "--real", "10"]
    command += ["--directory", str(tmp_path), "--only", "ls,watch,check-run,report"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = re.findall(r"^\| ([a-z-]+).*? \| [0-9.]+ \| ([0-9.]+) \| (\d+) \|", done.stdout, re.M)
    assert [name for name, *_ in rows] == ["ls", "watch", "check-run", "report"]
    for name, cpu_s, mb in rows:
        assert float(cpu_s) < 15 and int(mb) < 200, (name, cpu_s, mb)
