"""Stragglers: the report, alerts and `check-run` go by one rule, and so name the same ranks."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.format.stragglers import FACTOR, LEAST_S, stragglers, typical
from holdfast.report.read import read_run
from holdfast.runs.alerts import Facts, Limits, judge

from .simulated_run import lines_of, write_metrics

NewPath = Callable[[], Path]


def by_report(run: Path) -> str:
    return " ".join(f.title for f in read_run(run).findings if f.kind == "straggler")


def by_check_run(run: Path, **limits: Any) -> list[str]:
    return [a.text for a in holdfast.check_run(run, disk_saves=None, **limits)]


def by_alerts(saves: int, ranks: int, **how: Any) -> list[str]:
    told: list[holdfast.Event] = []
    alerts = holdfast.Alerts(told.append, disk_saves=None)
    known = {"run": "memory://no", "rank": 0, "world_size": ranks, "time_s": 1.0}
    for step in range(1, saves + 1):
        rows = tuple(lines_of(step, ranks, **how))
        alerts(holdfast.Event(kind="committed", step=step, ranks=rows, **known))
    return [event.text for event in told if event.rule == "straggler"]


def made(run: Path, saves: int, ranks: int, **how: Any) -> Path:
    write_metrics(run, saves, ranks, **how)
    (run / "step-00000100").mkdir()
    return run


@pytest.mark.parametrize("phase", ["stage", "write", "sync"])
def test_a_planted_straggler_is_named_by_all(new_path: NewPath, phase: str) -> None:
    slow = {5: {phase: 3.0}}
    run = made(new_path(), 6, 8, slow=slow)
    assert by_report(run).startswith("Rank 5 on node-000 is a straggler")
    (checked,) = by_check_run(run)
    (told,) = by_alerts(6, 8, slow=slow)
    for text in (checked, told):
        assert text.startswith("rank 5 takes ") and f" s to {phase}; the median is " in text


def test_healthy_ranks_are_named_by_none(new_path: NewPath) -> None:
    for seed in range(10):
        run = made(new_path(), 6, 8, seed=seed)
        assert by_report(run) == "" and by_check_run(run) == []
        assert by_alerts(6, 8, seed=seed) == []


def test_one_slow_save_makes_no_straggler(new_path: NewPath) -> None:
    run = new_path()
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 7):
            slow = {5: {"write": 9.0}} if step == 6 else {}
            file.writelines(json.dumps(row) + "\n" for row in lines_of(step, 8, slow=slow))
    (run / "step-00000006").mkdir()
    assert by_report(run) == "" and by_check_run(run) == []


def test_of_two_ranks_none_is_named(new_path: NewPath) -> None:
    run = made(new_path(), 6, 2, slow={1: {"write": 9.0}})
    assert by_report(run) == "" and by_check_run(run) == []
    assert by_alerts(6, 2, slow={1: {"write": 9.0}}) == []


def test_uneven_ranks_are_no_stragglers_and_slow_ones_hide_nobody() -> None:
    even = {rank: {"write": 1.0 + rank / 10} for rank in range(16)}
    assert stragglers(even) == []
    two = {rank: {"write": 1.0 + rank / 100} for rank in range(13)}
    two |= {rank: {"write": 9.0} for rank in (13, 14)}
    assert [one.rank for one in stragglers(two)] == [13, 14]


def test_ranks_that_are_slow_by_chance_are_no_stragglers() -> None:
    chance = random.Random(3)
    for ranks in (3, 4, 8, 64):
        saves = [
            {rank: {"write": chance.gauss(1.0, 0.05)} for rank in range(ranks)} for _ in range(100)
        ]
        assert stragglers(typical(saves)) == []


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, -5.0, 0.0])
def test_what_is_no_time_counts_as_none(strange: float) -> None:
    ranks = {rank: {"write": 1.0} for rank in range(5)}
    assert stragglers(ranks | {5: {"write": strange}}) == []
    assert [one.rank for one in stragglers(ranks | {4: {"write": strange}, 5: {"write": 9.0}})] == [
        5
    ]
    assert stragglers({rank: {"write": strange} for rank in range(5)}) == []
    text = {"seconds": {"write": strange, "stage": "x"}, "rank": 5}
    records = [{"seconds": {"write": 1.0}, "rank": rank} for rank in range(5)]
    assert judge(Facts(now_s=0.0, saves=[[*records, text]]), Limits()) == []


def test_ranks_without_any_time_are_no_stragglers_but_one_that_takes_some_is() -> None:
    assert stragglers({}) == [] and typical([]) == {}
    assert stragglers({rank: {} for rank in range(4)}) == []
    assert stragglers({0: {}, 1: {}, 2: {}, 3: {"write": LEAST_S}}) == []
    (one,) = stragglers({0: {}, 1: {}, 2: {}, 3: {"sync": 0.3}})
    assert (one.rank, one.phase, one.seconds, one.median_s) == (3, "sync", 0.3, 0.0)


def test_a_factor_says_how_much_slower_a_rank_must_be() -> None:
    ranks = {rank: {"write": 1.0} for rank in range(7)} | {7: {"write": 2.5}}
    assert [one.rank for one in stragglers(ranks)] == [7] and FACTOR < 2.5
    assert stragglers(ranks, 2.6) == []


def test_saves_of_another_number_of_ranks_are_left_out() -> None:
    before = {rank: {"write": 9.0} for rank in range(8)}
    now = {rank: {"write": 1.0} for rank in range(4)}
    assert typical([before, before, now]) == now
