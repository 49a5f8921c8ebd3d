"""What is read of metrics: torn and hostile lines, older versions, clocks that jump, long runs."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.report import metrics
from holdfast.report.data import Timing
from holdfast.report.document import document_of, page_of
from holdfast.report.read import read_run
from holdfast.report.rules import stragglers_of
from holdfast.stores.url import open_store

from .simulated_run import lines_of, without_spans, write_metrics

NewPath = Callable[[], Path]


def written(run: Path, *rows: Any, name: str = "metrics.jsonl", end: str = "\n") -> Timing:
    run.mkdir(parents=True, exist_ok=True)
    with (run / name).open("a") as file:
        file.write("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + end)
    return metrics.read_metrics(open_store(run))


def test_each_save_is_summarised_over_its_ranks(new_path: NewPath) -> None:
    run = new_path()
    write_metrics(run, 3, 8, slow={5: {"write": 3.0}})
    timing = metrics.read_metrics(open_store(run))
    assert [(save.step, save.ranks) for save in timing.saves] == [(100, 8), (200, 8), (300, 8)]
    save = timing.saves[0]
    assert save.phases["write"].slowest_rank == save.slowest_rank == 5
    assert 3.7 < save.phases["write"].median_s < 4.3 and save.phases["write"].max_s > 11
    assert save.bytes == 8 * 2_000_000_000
    assert [row.local_rank for row in timing.heat] == list(range(8))
    assert [s.rank for s in stragglers_of(timing.heat)] == [5]


def test_ranks_are_numbered_within_their_host(new_path: NewPath) -> None:
    timing = written(new_path(), *lines_of(1, 20))
    assert [row.local_rank for row in timing.heat] == [*range(8), *range(8), *range(4)]
    assert [row.host for row in timing.heat][::8] == ["node-000", "node-001", "node-002"]


def test_the_offset_of_a_clock_is_known_and_changes_no_span(new_path: NewPath) -> None:
    timing = written(new_path(), *lines_of(1, 3, clocks={2: 7.5}))
    records = timing.saves[0].records
    assert [round(record.clock_offset_s, 3) for record in records] == [0.0, 0.0, 7.5]
    assert timing.clocks == pytest.approx(7.5)
    assert max(span.end_s for span in records[2].spans) < 6


def test_a_torn_last_line_is_counted_and_costs_nothing_else(new_path: NewPath) -> None:
    rows = lines_of(1, 4)
    torn = json.dumps(rows[3])[:-40]
    timing = written(new_path(), *rows[:3], torn, end="")
    assert timing.skipped_lines == 1 and timing.saves[0].ranks == 3


def test_lines_of_an_older_holdfast_have_estimated_spans(new_path: NewPath) -> None:
    timing = written(new_path(), *without_spans(lines_of(1, 2)))
    record = timing.saves[0].records[0]
    assert record.is_estimated and record.host == ""
    assert [span.phase for span in record.spans][:2] == ["plan", "stage"]
    assert record.spans[1].start_s == record.spans[0].end_s


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 5},
        {"seconds": {"write": "x", "total": None, "stage": -1, "sync": 1e400, "plan": True}},
        {"seconds": {"write": math.nan, "total": math.inf}},
        {"spans": {"a": 1}},
        {"spans": [["write", 0], ["write", 5, 1, 0], ["evil", 0, 1, 2], ["sync", 0, 1e300, 0], 3]},
        {"spans": [["write", 0.0, 1.0, -5], ["write", "0", [], None]]},
        {"spans": [["write", 0.0, 1.0, 1]] * 100_000},
        {"host": 7},
        {"host": "x" * 100_000},
        {"clock": "now"},
        {"clock": 1e308},
        {"bytes": -1, "stored_bytes": 10**30},
        {"time": 12},
        {"time": "yesterday"},
        {"stall_s": []},
        {"rank": -1},
        {"rank": 10**12},
        {"rank": "0"},
        {"step": 2**70},
        {"step": True},
        {"verb": "explode"},
    ],
)
def test_no_line_breaks_a_report(new_path: NewPath, change: dict[str, Any]) -> None:
    run = new_path()
    rows = lines_of(1, 3)
    rows[1] |= change
    written(run, *rows, *lines_of(2, 3))
    found = read_run(run)
    assert found.timing.saves[-1].step == 2 and found.timing.saves[-1].ranks == 3
    assert len(page_of(found)) < 300_000
    json.dumps(document_of(found), allow_nan=False)


def test_random_changes_to_the_text_break_no_report(new_path: NewPath) -> None:
    chance = random.Random(7)
    text = "\n".join(json.dumps(row) for row in lines_of(1, 3)).encode() + b"\n"
    run = new_path()
    run.mkdir()
    for _ in range(300):
        changed = bytearray(text)
        for _ in range(chance.randint(1, 8)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        (run / "metrics.jsonl").write_bytes(bytes(changed))
        timing = metrics.read_metrics(open_store(run))
        assert timing.skipped_lines <= 12


def test_a_line_without_end_is_not_held_in_memory(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LINE_BYTES_MAX", 1000)
    monkeypatch.setattr(metrics, "READ_BYTES", 4096)
    timing = written(new_path(), "x" * 50_000, *lines_of(1, 2))
    assert timing.saves[0].ranks == 2 and timing.skipped_lines == 1


def test_a_clock_that_goes_back_keeps_the_order_of_the_file(new_path: NewPath) -> None:
    timing = written(new_path(), *lines_of(5, 2), *lines_of(3, 2), *lines_of(7, 2))
    assert [save.step for save in timing.saves] == [5, 3, 7]
    assert timing.jumps == 1


def test_files_with_numbers_are_read_first_and_nothing_twice(new_path: NewPath) -> None:
    run = new_path()
    written(run, *lines_of(1, 2), name="metrics-000001.jsonl")
    written(run, *lines_of(2, 2), name="metrics-000002.jsonl")
    timing = written(run, *lines_of(2, 2), *lines_of(3, 2))
    assert [save.step for save in timing.saves] == [1, 2, 3]


def test_of_many_saves_the_slowest_and_the_newest_have_all_ranks(new_path: NewPath) -> None:
    run = new_path()
    for step in range(1, 101):
        written(run, *lines_of(step, 2, factor=4.0 if step in (10, 30) else 1.0))
    timing = metrics.read_metrics(open_store(run))
    full = [save.step for save in timing.saves if save.records]
    assert len(timing.saves) == 100 and {10, 30} <= set(full)
    assert set(range(81, 101)) <= set(full) and len(full) <= 40


def test_a_very_long_run_is_thinned(new_path: NewPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "NEWEST_SAVES", 50)
    run = new_path()
    write_metrics(run, 1000, 1)
    timing = metrics.read_metrics(open_store(run))
    steps = [save.step for save in timing.saves]
    assert len(steps) <= 100 + 40 + 1 and timing.counts == {"save": 1000}
    assert steps == sorted(steps) and steps[-60:] == list(range(94_100, 100_100, 100))
    assert timing.steps_saved == 1000


def test_a_run_without_metrics_says_so(new_path: NewPath) -> None:
    (new_path() / "x").mkdir(parents=True)
    run = new_path()
    (run / "step-00000001").mkdir(parents=True)
    found = read_run(run)
    assert "no metrics.jsonl" in found.timing.problem
    assert "no metrics.jsonl" in page_of(found)
