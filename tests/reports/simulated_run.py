"""Writes the metrics of a run that never was: as many saves and ranks as a test asks for."""

import json
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0
RANKS_ON_HOST = 8
Slow = Mapping[int, Mapping[str, float]]  # rank → phase → so many times longer


def lines_of(
    step: int,
    ranks: int,
    *,
    seed: int = 0,
    every_s: float = 600.0,
    slow: Slow | None = None,
    clocks: Mapping[int, float] | None = None,
    factor: float = 1.0,
    host: str = "node",
) -> list[dict[str, Any]]:
    """Return the lines of one save."""
    chance = random.Random(f"{seed}/{step}")
    met = BEGAN + step * every_s
    ends, rows = [], []
    for rank in range(ranks):
        times = (slow or {}).get(rank, {})
        took = {
            phase: usual * factor * times.get(phase, 1.0) * chance.uniform(0.95, 1.05)
            for phase, usual in (("plan", 0.01), ("stage", 0.35), ("write", 4.0), ("sync", 0.4))
        }
        staged, size = took["stage"], 2_000_000_000
        spans: list[list[Any]] = [["plan", -took["plan"], 0.0, 0], ["stage", 0.0, staged, size]]
        at = staged
        for _ in range(6):
            spans.append(["write", at, at + took["write"] / 6, size // 6])
            at += took["write"] / 6
        spans.append(["sync", at, at + took["sync"], 0])
        at += took["sync"]
        ends.append(at)
        rows.append({"rank": rank, "took": took, "spans": spans, "end": at})
    last = max(ends)
    done = []
    for row in rows:
        rank, spans, took = row["rank"], row["spans"], row["took"]
        wait, commit = 0.0, 0.0
        if rank == 0:
            wait, commit = last - row["end"], 0.08
            spans += [["wait", row["end"], last, 0], ["commit", last, last + commit, 0]]
        parts = {p: took.get(p, 0.0) for p in ("plan", "stage", "encode", "write", "sync")}
        seconds = parts | {"wait": wait, "commit": commit, "total": row["end"] + wait + commit}
        done.append(
            {
                "time": datetime.fromtimestamp(met + last + 0.1, UTC).isoformat(
                    timespec="milliseconds"
                ),
                "verb": "save",
                "step": step,
                "rank": rank,
                "bytes": 2_000_000_000,
                "stored_bytes": 2_000_004_096,
                "seconds": {name: round(value, 6) for name, value in seconds.items()},
                "waits": 3,
                "stall_s": round(took["plan"] + took["stage"], 6),
                "host": f"{host}-{rank // RANKS_ON_HOST:03d}",
                "clock": round(met + (clocks or {}).get(rank, 0.0), 6),
                "spans": [[p, round(a, 6), round(b, 6), n] for p, a, b, n in spans],
            }
        )
    return done


def write_metrics(run: Path, saves: int, ranks: int, **how: Any) -> None:
    """Write ``saves`` saves, of steps 100, 200, …, to the metrics of a run."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        for number in range(1, saves + 1):
            for row in lines_of(number * 100, ranks, **how):
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


def without_spans(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines as holdfast 0.1 wrote them."""
    news = ("host", "clock", "spans")
    return [{key: value for key, value in row.items() if key not in news} for row in rows]
