"""`holdfast watch`: what it shows, to the letter, at two widths; and what others put into a run."""

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import holdfast
from holdfast.format.progress import SLOT_BYTES, RankProgress, decode_slots, encode_slot
from holdfast.tools import watch
from holdfast.tools.watch_screen import draw

from .conftest import Command

NOW_S = 1_800_000_000.0
HOSTILE = "\x1b[2J\u202ee[bold]vil\n"


def rank(number: int, **changed: Any) -> RankProgress:
    known: dict[str, Any] = {
        "host": f"node-{number // 2}",
        "pid": 100 + number,
        "rank": number,
        "world_size": 4,
        "time_s": NOW_S - 0.5,
        "step": 1234,
        "due_step": 1300,
        "save_step": 1200,
        "state": "writing",
        "began_s": NOW_S - 10.0,
        "staged_bytes": 10**9,
        "written_bytes": 25 * 10**7 * (number + 1),
        "total_bytes": 10**9,
        "committed_step": 1100,
        "committed_s": NOW_S - 300.0,
    }
    return RankProgress(**(known | changed))


def make_run(root: Path, *said: RankProgress) -> Path:
    """A run whose job has four ranks on two hosts, and saved steps 1000 and 1100."""
    for host in {one.host for one in said}:
        there = [one for one in said if one.host == host]
        name = "".join(c if c.isalnum() or c == "-" else "_" for c in host)
        (root / f".progress-{name}").write_bytes(b"".join(map(encode_slot, there)))
    lines = []
    for step in (1000, 1100):
        (root / f"step-{step:08d}").mkdir()
        for number in range(4):
            record = {
                "time": f"2027-01-15T07:{step // 100}:00.000+00:00",
                "verb": "save",
                "step": step,
                "rank": number,
                "stored_bytes": 10**9,
                "seconds": {"total": 5.0 + number},
                "stall_s": 0.25,
            }
            lines.append(json.dumps(record))
    (root / "metrics.jsonl").write_text("\n".join([*lines, '{"time": "torn']))
    return root


def shown(root: Path, width: int, lines: int = 24, **changed: Any) -> list[str]:
    document = watch.look(str(root)) | {"now_s": NOW_S, "free_bytes": 2 * 10**12, "path": "runs/a"}
    stream = io.StringIO()
    console = Console(file=stream, width=width, no_color=True, highlight=False, markup=False)
    console.print(draw(document | changed, width, lines))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_a_save_in_flight_at_80_columns(tmp_path: Path) -> None:
    root = make_run(tmp_path, rank(0), rank(1), rank(2), rank(3, state="committing"))
    assert shown(root, 80) == [
        "runs/a   2 steps   2.00 TB free",
        "step 1,234 of training   4 ranks on 2 hosts   next save at step 1,300",
        "",
        "saving step 1,200: 2.50 GB of 4.00 GB   250 MB/s   10 s",
        f"rank 0  node-0  {bar(0.25, 45)}   25 %  writing",
        f"rank 1  node-0  {bar(0.5, 45)}   50 %  writing",
        f"rank 2  node-1  {bar(0.75, 45)}   75 %  writing",
        f"rank 3  node-1  {bar(1.0, 45)}  100 %  committing",
        "",
        " step        at (UTC)               took   stall  written  ranks",
        "1,100  save  2027-01-15 07:11:00  8.00 s  0.25 s  4.00 GB      4",
        "1,000  save  2027-01-15 07:10:00  8.00 s  0.25 s  4.00 GB      4",
    ]


def bar(share: float, width: int) -> str:
    """A bar of rich, which has eighths of a character."""
    eighths = int(width * 8 * share)
    full = "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
    return full.ljust(width)


@pytest.mark.parametrize(("width", "lines"), [(40, 24), (80, 24), (200, 50)])
def test_it_fits_on_the_screen(tmp_path: Path, width: int, lines: int) -> None:
    said = [rank(n, world_size=64, written_bytes=n * 10**6) for n in range(64)]
    found = shown(make_run(tmp_path, *said), width, lines)
    assert len(found) < lines and max(map(len, found)) <= width
    assert any("rank 0 " in line for line in found), "the rank that is behind comes first"
    assert any("further ahead" in line for line in found)


def test_a_silent_job_and_a_failed_save_are_said(tmp_path: Path) -> None:
    failed = {"failed_step": 1200, "failed_s": NOW_S - 40, "failed": f"StoreError: {HOSTILE}"}
    said = [rank(n, time_s=NOW_S - 60, state="failed", **failed) for n in range(3)]
    text = "\n".join(shown(make_run(tmp_path, *said), 80))
    assert "the job has said nothing for 60 s: it hangs, or was killed" in text
    assert "last known: step 1,234 of training" in text and "next save" not in text
    assert "1 rank not heard of" in text
    assert "the save of step 1,200 failed: StoreError: \\x1b[2J\\u202ee[bold]vil\\x0a" in text
    assert "\x1b" not in text and "\u202e" not in text


def test_names_from_a_run_are_shown_and_never_run(
    tmp_path: Path, holdfast_command: Command
) -> None:
    root = tmp_path / HOSTILE
    root.mkdir()
    make_run(root, *(rank(n, host=HOSTILE, state=HOSTILE) for n in range(4)))
    answer = holdfast_command("watch", root, "--once")
    assert answer.code == 0 and "\x1b" not in answer.out and "\u202e" not in answer.out
    assert "\\x1b[2J" in answer.out
    for verb in (["ls", tmp_path], ["ls", root], ["check-run", root]):
        answer = holdfast_command(*verb)
        assert "\x1b" not in answer.out + answer.err and "\\x1b[2J" in answer.out + answer.err


def decoded(slot: bytes) -> RankProgress:
    (said,) = decode_slots(slot)
    return said


def test_a_slot_that_is_torn_or_strange_is_left_out() -> None:
    good = encode_slot(rank(1))
    assert [one.rank for one in decode_slots(good)] == [1]
    strange = [
        b"",
        good[: SLOT_BYTES // 8],
        bytes(SLOT_BYTES),
        b"\xff" * SLOT_BYTES,
        b"[" * SLOT_BYTES,
        good.replace(b'"version": 1', b'"version": 2'),
        good.replace(b'"rank": 1', b'"rank": "1"'),
        good.replace(b'"rank": 1', b'"rank": -7'),
        good.replace(b'"step": 1234', b'"step": 1e999'),
    ]
    for slot in strange:
        assert [*decode_slots(slot.ljust(SLOT_BYTES))] == [], slot
        assert [one.rank for one in decode_slots(slot.ljust(SLOT_BYTES) + good)] == [1]
    long = encode_slot(rank(1, failed="\U0001f40d" * 5000, host="x" * 500))
    assert len(long) == SLOT_BYTES and decoded(long).failed.startswith("\U0001f40d")


@pytest.mark.parametrize(
    "metrics",
    [b"", b"\x00\xff\n{}\n[1]\n", b'{"step": 1, "time": 7, "seconds": [], "stall_s": "x"}\n'],
)
def test_a_run_with_strange_metrics_or_none_is_shown(tmp_path: Path, metrics: bytes) -> None:
    make_run(tmp_path, *(rank(n, time_s=time.time() + 1e6) for n in range(4)))
    (tmp_path / "metrics.jsonl").write_bytes(metrics)
    assert any("saving step 1,200" in line for line in shown(tmp_path, 80))
    (tmp_path / "metrics.jsonl").unlink()
    assert "metrics.jsonl has no save yet" in shown(tmp_path, 80)


def test_what_is_no_run_is_said(tmp_path: Path, holdfast_command: Command) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        for verb in ("watch", "check-run"):
            answer = holdfast_command(verb, path)
            assert answer.code == 2 and answer.err.startswith(f"holdfast: {path} is")


def test_saves_before_the_metrics_were_split_are_shown_and_judged(tmp_path: Path) -> None:
    root = make_run(tmp_path)
    lines = (root / "metrics.jsonl").read_text().splitlines()
    (root / "metrics-000001.jsonl").write_text("\n".join(lines[:4]) + "\n")
    (root / "metrics.jsonl").write_text("\n".join(lines[4:]) + "\n")
    assert [save["step"] for save in watch.look(str(root))["saves"]] == [1000, 1100]
    (root / "metrics.jsonl").unlink()
    assert [save["step"] for save in watch.look(str(root))["saves"]] == [1000]
    for step in (1000, 1100):
        holdfast.save({"n": 1}, root / f"step-{step:08d}", step=step)
    (alert,) = holdfast.check_run(root, stall_s=0.2, disk_saves=None, straggler=None)
    assert (alert.rule, alert.step) == ("stall", 1000)


TRAINING = """
import sys, time, torch, holdfast
store, local = sys.argv[1:]
state = {"w": torch.ones(1000)}
with holdfast.Checkpointer(store, local=local or None, every=1) as checkpointer:
    checkpointer.step(1, state)
    checkpointer.wait()
    print("saved", flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def tiered_job(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A job that has saved to a local disk, whose store has the step, and that runs on."""
    words = [sys.executable, "-c", TRAINING, str(tmp_path / "store"), str(tmp_path / "local")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "saved\n"
        while not [*(tmp_path / "local").glob(".progress-*")]:
            assert job.poll() is None
        yield job
        job.kill()


def test_the_store_of_a_job_with_a_local_disk_says_that_it_runs(
    tiered_job: "subprocess.Popen[str]", tmp_path: Path, holdfast_command: Command
) -> None:
    out = holdfast_command("watch", tmp_path / "store", "--once").out
    assert f"process {tiered_job.pid} on this machine has this run" in out
    assert "no job" not in out
    assert "step 1 of training" in holdfast_command("watch", tmp_path / "local", "--once").out
    tiered_job.kill()
    tiered_job.wait()
    assert "no job says" in holdfast_command("watch", tmp_path / "store", "--once").out


def test_a_killed_job_is_said_to_have_ended_and_nothing_else(
    tiered_job: "subprocess.Popen[str]", tmp_path: Path, holdfast_command: Command
) -> None:
    tiered_job.kill()
    tiered_job.wait()
    out = holdfast_command("watch", tmp_path / "local", "--once").out
    assert f"process {tiered_job.pid} has ended" in out and "last known: step 1 of training" in out
    assert "in flight" not in out and "next save" not in out


def test_a_save_of_a_silent_job_has_no_rate_and_no_bars(tmp_path: Path) -> None:
    text = "\n".join(shown(make_run(tmp_path, *(rank(n, time_s=NOW_S - 60) for n in range(4))), 80))
    assert "\nlast known: saving step 1,200: 2.50 GB of 4.00 GB\n" in text
    assert "/s " not in text and "writing" not in text


def test_a_long_error_is_cut_after_a_word(tmp_path: Path, holdfast_command: Command) -> None:
    words = "StoreError: " + "elephant " * 200
    failed = {"failed_step": 1200, "failed_s": NOW_S - 4, "failed": words, "state": "failed"}
    root = make_run(tmp_path, *(rank(n, **failed) for n in range(4)))
    text = " ".join(shown(root, 120))
    assert re.findall(r"(\S*) ?…", text) == ["elephant"]
    with (root / "metrics.jsonl").open("a") as file:
        at = "2027-01-15T08:00:00.000+00:00"
        row = {"time": at, "verb": "failure", "step": 1200, "rank": 0, "error": words}
        file.write(f"\n{json.dumps(row)}\n")
    found = holdfast_command("report", root, "--json").document["findings"]
    (text,) = [one["text"] for one in found if one["kind"] == "failed"]
    assert text.endswith("elephant …") and len(text) <= 300
