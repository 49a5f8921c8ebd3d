"""Clocks that jump, or that are ahead: no verb shows a negative age, and each says what it sees."""

import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.format.progress import RankProgress, encode_slot

from .conftest import Command

DAY_S = 86_400.0


def make_run(run: Path, *times_s: float, modified_s: float | None = None) -> Path:
    """Steps 1, 2, …, saved at these times by the clock of their machine."""
    lines = []
    for step, saved_s in enumerate(times_s, 1):
        holdfast.save({"n": step}, run / f"step-{step:08d}", step=step)
        when = saved_s if modified_s is None else modified_s
        os.utime(run / f"step-{step:08d}" / "MANIFEST", (when, when))
        row = {
            "time": datetime.fromtimestamp(saved_s, UTC).isoformat(timespec="milliseconds"),
            **{"verb": "save", "step": step, "rank": 0, "bytes": 10, "stored_bytes": 10},
            **{"seconds": {"write": 0.5, "total": 0.6}, "stall_s": 0.1, "clock": saved_s - 1},
        }
        lines.append(json.dumps(row) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    return run


def progress(run: Path, **said: Any) -> None:
    known = {"host": "h", "pid": 1, "rank": 0, "world_size": 1, "step": 9, "state": "writing"}
    slot = encode_slot(RankProgress(**(known | {"save_step": 9, "total_bytes": 100} | said)))
    (run / ".progress-h").write_bytes(slot)


def everything(command: Command, run: Path) -> dict[str, str]:
    """What each verb says; none of it may have a negative number of anything."""
    page = run.parent / "page.html"
    found = {
        "ls": command("ls", run),
        "inspect": command("inspect", run),
        "watch": command("watch", run, "--once"),
        "check-run": command("check-run", run, "--durable-min", "60", "--disk-saves", "0.001"),
        "report": command("report", run, "-o", page, "--trace", run.parent / "trace.json"),
        "json": command("report", run, "--json"),
    }
    text = {verb: answer.out for verb, answer in found.items()}
    command("report", run, "-o", page)
    text["page"] = re.sub(
        r"<style.*?</style>|<svg.*?</svg>|<script.*?</script>", "", page.read_text(), flags=re.S
    )
    for verb, answer in found.items():
        assert answer.code in (0, 1) and not answer.err, (verb, answer.err)
    for verb in ("ls", "watch", "check-run", "report", "page"):
        assert not re.search(r"(?<![\w-])-\d+(\.\d+)? ?(s|ms|min|h|d)\b", text[verb]), text[verb]
    return text


def test_a_step_from_the_future_is_shown_with_its_date(
    tmp_path: Path, holdfast_command: Command
) -> None:
    now_s = time.time()
    run = make_run(tmp_path / "run", now_s - 60, now_s + 3 * DAY_S)
    said = everything(holdfast_command, run)
    date = time.strftime("%Y-%m-%d", time.gmtime(now_s + 3 * DAY_S))
    assert f"step-00000002  {date} " in said["ls"]
    assert re.search(
        "min in the future, so its age is unknown;\\s+compare the clocks", said["check-run"]
    )
    assert "The newest save is dated 2 d 23 h in the future" in said["report"]
    assert "in the future: a clock is wrong" in said["page"] and "due in" not in said["page"]
    assert "training since step 2" in said["page"]


def test_times_that_go_backward_keep_their_order(tmp_path: Path, holdfast_command: Command) -> None:
    now_s = time.time()
    times_s = [now_s - 100, now_s - 5 * DAY_S, now_s - 50, now_s - 20 * DAY_S, now_s - 10]
    said = everything(holdfast_command, make_run(tmp_path / "run", *times_s))
    assert [save["step"] for save in json.loads(said["json"])["timing"]["saves"]] == [1, 2, 3, 4, 5]
    assert "The clock went backwards 2 times" in said["report"]
    steps = re.findall(r"^ *(\d)  save", said["watch"], re.M)
    assert steps == ["5", "4", "3", "2", "1"]
    assert said["check-run"] == f"{tmp_path / 'run'}: ok\n"


@pytest.mark.parametrize("when_s", [0.0, 1.0, 2.0**33, 2.0**40])
def test_dates_far_from_now_break_nothing(
    tmp_path: Path, holdfast_command: Command, when_s: float
) -> None:
    saved_s = min(when_s, 2.0**37)  # the last year that a datetime has is 9999
    said = everything(holdfast_command, make_run(tmp_path / "run", saved_s, modified_s=when_s))
    assert "step-00000001" in said["ls"]


@pytest.mark.parametrize("ahead_s", [-1e9, -3600.0, 3600.0, 1e15])
def test_a_job_whose_clock_is_wrong_is_shown(
    tmp_path: Path, holdfast_command: Command, ahead_s: float
) -> None:
    now_s = time.time()
    run = make_run(tmp_path / "run", now_s - 60)
    then_s = now_s + ahead_s
    progress(run, time_s=then_s, began_s=then_s - 5, due_s=then_s + 60, written_bytes=50)
    said = everything(holdfast_command, run)
    assert "saving step 9: 50 B of 100 B" in said["watch"]
    if ahead_s > 0:
        assert "s ahead of this one: times are not comparable" in said["watch"]
        assert "silent" not in said["check-run"]
    else:
        assert "has said nothing for" in said["watch"] and "silent" in said["check-run"]
