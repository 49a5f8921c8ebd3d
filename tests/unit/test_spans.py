"""Spans: when each phase of a save and a load ran, on every rank, in few bytes and no time."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from format import simulated_ranks
from holdfast import Checkpointer, Keep, Options
from holdfast.engine import ledger as ledger_module
from holdfast.engine.ledger import PARTS, SPANS_MAX, Ledger
from holdfast.format.names import next_metrics, old_metrics
from holdfast.runs import metrics_file
from holdfast.stores.url import open_store
from holdfast.tools.copy import copy_all

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=48 << 20)
LINE_BYTES_MAX = 2048
CALLS_MAX = 750  # 0.2 ms


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((300, 1000), value)}


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("stage", ["eager", "lazy", "sync"])
def test_spans_say_when_each_phase_of_a_save_ran(new_path: NewPath, stage: Any, codec: str) -> None:
    run, value = new_path(), state()
    with Checkpointer(run, every=1, stage=stage, codec=codec, options=SMALL) as checkpointer:
        checkpointer.step(1, value)
    (row,) = rows_of(run)
    phases = {phase for phase, *_ in row["spans"]}
    assert {"plan", "stage", "write", "commit", "retire"} <= phases <= set(PARTS)
    assert ("encode" in phases) == (codec == "lossless")
    assert all(start <= end for _, start, end, _ in row["spans"])
    assert max(end for _, _, end, _ in row["spans"]) < row["seconds"]["total"] + 1
    assert sum(size for phase, *_, size in row["spans"] if phase == "write") == row["stored_bytes"]
    for phase in ("plan", "wait", "commit"):
        taken = sum(end - start for name, start, end, _ in row["spans"] if name == phase)
        assert taken == pytest.approx(row["seconds"][phase], abs=1e-4)


def test_spans_say_when_each_phase_of_a_load_ran(new_path: NewPath) -> None:
    run = new_path()
    with Checkpointer(run, options=SMALL) as checkpointer:
        checkpointer.save(1, state())
        assert checkpointer.restore(state(0.0)) == 1
    row = rows_of(run)[-1]
    assert row["verb"] == "load"
    spans = {phase: size for phase, *_, size in row["spans"]}
    assert spans["read"] == row["bytes"] > 0
    assert {"plan", "read"} <= spans.keys() <= {"wait", "plan", "read", "place"}
    assert sum(row["seconds"][p] for p in ("wait", "plan", "read", "place")) <= (
        row["seconds"]["total"] + 1e-4
    )


def test_all_ranks_count_from_the_moment_they_met(new_path: NewPath) -> None:
    run = new_path()

    def train(group: Any) -> None:
        with Checkpointer(run, every=1, stage="sync", group=group, options=SMALL) as checkpointer:
            for step in range(1, 4):
                time.sleep(0.05 * group.rank)
                checkpointer.step(step, state())

    simulated_ranks.run_ranks(3, train)
    rows = [row for row in rows_of(run) if row["step"] == 3]
    clocks = [row["clock"] for row in rows]
    assert max(clocks) - min(clocks) < 0.05  # of one machine: no offset
    assert len({row["host"] for row in rows}) == 1


def crowded() -> Ledger:
    """A ledger after more of everything than a save has."""
    ledger = Ledger(waited_s=0.5)
    ledger.planned(10**15, 0.3, time.perf_counter())
    with ledger.timed("stage"):
        pass
    ledger.write_began = ledger.started
    ledger.seconds["encode"] = 100.0
    for n in range(1, 100):
        writes = SimpleNamespace(done_bytes=n * 10**13, waits=n, wait_s=10.0 * n, sync_s=0.0)
        ledger.note_writes(writes)  # type: ignore[arg-type]
    for _ in range(100):
        ledger.spans.append(("wait", ledger.met + 10000.123456, ledger.met + 20000.123456, 10**15))
    return ledger


def test_a_line_never_has_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "HOST", "h" * 64)
    ledger = crowded()
    marks = [(ledger.met + 1000.123456 * n, n * 10**13, 99.123456 * n) for n in range(1, 7)]
    monkeypatch.setattr(ledger, "_marks", marks)
    record = ledger.record()
    assert 16 < len(record["spans"]) < SPANS_MAX  # "retire" is still to come
    row = {"time": "2026-11-25T09:20:28.264+00:00", "verb": "save", "step": 10**9, "rank": 99999}
    line = json.dumps(row | record | {"spans": [*record["spans"], record["spans"][-1]]})
    assert len(line) <= LINE_BYTES_MAX


def test_the_newest_writes_are_kept_when_marks_are_joined() -> None:
    record = crowded().record()
    writes = [span for span in record["spans"] if span[0] == "write"]
    assert 3 <= len(writes) <= ledger_module.MARKS_MAX
    assert sum(span[3] for span in writes) == record["stored_bytes"] == 99 * 10**13


def test_spans_cost_a_save_less_than_their_bound() -> None:
    """All of the ledger, of which spans are a part, in calls: no clock is the same twice."""
    events: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        crowded().record()
    finally:
        sys.setprofile(before)
    assert 600 < events.count("call") + events.count("c_call") < CALLS_MAX


def test_full_metrics_get_a_number_and_the_oldest_go(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "METRICS_BYTES_MAX", 1500)
    monkeypatch.setattr(metrics_file, "METRICS_FILES_MAX", 2)
    run = new_path()
    with Checkpointer(run, keep=Keep.latest(1), options=SMALL) as checkpointer:
        for step in range(1, 31):
            checkpointer.save(step, state())
    full = old_metrics(path.name for path in run.iterdir())
    assert len(full) == 2 and int(full[-1][8:14]) > 3
    files = [*full, "metrics.jsonl"]
    steps = [json.loads(row)["step"] for name in files for row in (run / name).open()]
    assert steps == list(range(steps[0], 31))
    assert all((run / name).stat().st_size < 1500 + LINE_BYTES_MAX for name in files)


def test_full_metrics_get_a_number_in_a_store_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "METRICS_BYTES_MAX", 1500)
    place = "memory://tests/full-metrics"
    with Checkpointer(place, keep=Keep.latest(1), options=SMALL) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, {"w": torch.ones(3)})
    store = open_store(place)
    full = old_metrics(entry.name for entry in store.list())
    assert full[:2] == ["metrics-000001.jsonl", "metrics-000002.jsonl"]
    lines = [line for name in [*full, "metrics.jsonl"] for line in store.get(name, 1 << 20).split()]
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 8))


def test_a_copy_of_a_run_has_its_full_metrics_too(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "METRICS_BYTES_MAX", 1000)
    run, there = new_path(), new_path()
    with Checkpointer(run, keep=Keep.latest(1), options=SMALL) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, {"w": torch.ones(3)})
    copy_all(str(run), str(there))
    names = sorted(path.name for path in run.glob("metrics*"))
    assert len(names) > 2
    assert [(there / name).read_bytes() for name in names] == [
        (run / name).read_bytes() for name in names
    ]


def test_names_of_full_metrics_are_in_order() -> None:
    names = ["metrics-000002.jsonl", "metrics.jsonl", "metrics-1000000.jsonl", "metrics-x.jsonl"]
    full = old_metrics(["metrics-000010.jsonl", *names])
    assert full == ["metrics-000002.jsonl", "metrics-000010.jsonl", "metrics-1000000.jsonl"]
    assert next_metrics(full) == "metrics-1000001.jsonl"
    assert next_metrics([]) == "metrics-000001.jsonl"
