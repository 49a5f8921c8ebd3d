"""Time and memory of the verbs that look at a run, on one with very many steps and saves.

The newest steps are real; the older ones are directories with a MANIFEST. `metrics.jsonl` is full:
as many files as holdfast keeps. Each verb runs in a process of its own, and must answer.

    python benchmarks/many_steps.py --steps 1000000 --directory /dev/shm
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

METRICS_FILES = 64
METRICS_BYTES = 8 << 20
REAL_STEPS = 1000
LINKS_MAX = 30_000  # of one file: file systems allow no more than 65,000
BEGAN_S = 1_790_000_000.0
PARTS = ("plan", "stage", "write", "sync", "wait", "commit")


def make_run(run: Path, steps: int, files: int, real: int) -> None:
    """Make a run whose newest step is ``steps``, with ``files`` full files of metrics."""
    import holdfast  # here alone: what is measured begins with the memory of this process
    from holdfast.format.names import next_metrics, step_name

    run.mkdir(parents=True)
    for step in range(steps - real + 1, steps + 1):
        state = {"w": [float(step)]}
        holdfast.save(state, run / step_name(step), step=step, metrics={"loss": 1 / step})
    source = run / step_name(steps) / "MANIFEST"
    for step in range(1, steps - real + 1):
        place = run / step_name(step)
        place.mkdir()
        if step % LINKS_MAX == 0:
            source = Path(shutil.copy(source, place / "MANIFEST"))
        else:
            os.link(source, place / "MANIFEST")
    (run / "LATEST").write_text(step_name(steps))
    rows = _rows()
    names: list[str] = []
    for number in range(files + 1):
        names.append(next_metrics(names))
        name = names[-1] if number < files else "metrics.jsonl"
        with (run / name).open("w") as file:
            while file.tell() < METRICS_BYTES:
                file.writelines(next(rows) for _ in range(100))


def _rows() -> Iterator[str]:
    step = 0
    while True:
        step += 1
        spans = [[part, n * 0.1, n * 0.1 + 0.1, 10**6] for n, part in enumerate(PARTS)]
        met_s = BEGAN_S + 60 * step
        row = {
            "time": datetime.fromtimestamp(met_s + 1, UTC).isoformat(timespec="milliseconds"),
            "verb": "save",
            "step": step,
            "rank": 0,
            "bytes": 10**9,
            "stored_bytes": 10**9 + 4096,
            "seconds": dict.fromkeys(PARTS, 0.1) | {"encode": 0.0, "other": 0.0, "total": 0.6},
            "waits": 3,
            "stall_s": 0.001 * (step % 7),
            "host": "node-000",
            "clock": met_s,
            "spans": spans,
            "skipped": 0,
        }
        yield json.dumps(row, separators=(",", ":")) + "\n"


def measure(*arguments: object) -> dict[str, float]:
    """Run a verb; return its exit code, seconds and the most memory it held, in MB."""
    command = [sys.executable, "-m", "holdfast", *map(str, arguments)]
    began_s = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took_s = time.perf_counter() - began_s
        out.seek(0)
        lines = len(out.read().splitlines())
    return {
        "exit": process.returncode,
        "seconds": took_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "mb": usage.ru_maxrss / 1000,
        "lines": lines,
    }


VERBS: dict[str, tuple[str, ...]] = {
    "ls": ("ls",),
    "watch --once": ("watch", "--once"),
    "check-run": ("check-run", "--disk-saves", "0.001"),
    "report": ("report", "-o", "{page}"),
    "inspect": ("inspect",),
    "prune (dry)": ("prune", "--keep", "latest=3"),
}


def main() -> None:
    """Make a run, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--files", type=int, default=METRICS_FILES, help="full files of metrics")
    parser.add_argument("--real", type=int, default=REAL_STEPS, help="steps that are checkpoints")
    parser.add_argument("--only", help="verbs, separated by commas")
    parser.add_argument("--keep", action="store_true", help="keep the run, and use it again")
    chosen = parser.parse_args()
    place = Path(chosen.directory or tempfile.gettempdir()) / "holdfast-many-steps"
    run = place / "run"
    if not run.exists():
        began_s = time.perf_counter()
        given = (run, chosen.steps, chosen.files, min(chosen.real, chosen.steps))
        making = multiprocessing.get_context("spawn").Process(target=make_run, args=given)
        making.start()
        making.join()
        print(f"made {chosen.steps:,} steps in {time.perf_counter() - began_s:.0f} s", flush=True)
    try:
        print("| verb | seconds | CPU seconds | MB | lines | exit |\n|---|---|---|---|---|---|")
        for name, (verb, *options) in VERBS.items():
            if chosen.only and verb not in chosen.only.split(","):
                continue
            filled = [option.format(page=place / "run.html") for option in options]
            found = measure(verb, run, *filled)
            times = (f"{found['seconds']:.1f}", f"{found['cpu_s']:.1f}", f"{found['mb']:.0f}")
            cells = (*times, found["lines"], found["exit"])
            print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)
    finally:
        if not chosen.keep:
            shutil.rmtree(place)


if __name__ == "__main__":
    main()
