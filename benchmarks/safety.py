"""What safety costs, by leaving it out: a save without checksums, and one without fsync.

What is left out is left out of this process alone, by putting cheaper functions in its place; there
is no such option. Rounds are shuffled, ratios paired round by round. Beside them: the speed of the
checksums by themselves, on memory too large for the caches, and fio with and without end_fsync.
"""

import argparse
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import machine
import quiet
import torch
from compare import fio
from ratios import quartiles
from training_state import make_state, state_bytes

import holdfast
from holdfast._core import copy, copy_and_hash_chunk, hash_chunk

OUT = Path(__file__).parent / "out"
WHOLE = "save"
DIGEST = bytes(16)


def main() -> None:
    """Measure in shuffled rounds, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to write to")
    parser.add_argument("--json", type=Path, default=OUT / "safety.json", help="result file")
    parser.add_argument("--seed", type=int, default=20240614, help="of the values and the order")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    state = make_state(int(options.gib * 2**30), options.seed)
    with tempfile.TemporaryDirectory(prefix="safety-", dir=options.directory) as made:
        scratch = Path(made)
        measures = _measures(state, scratch, state_bytes(state))
        facts = machine.describe(scratch)
        order, seconds = random.Random(options.seed), {name: list[float]() for name in measures}
        for number in range(options.rounds + 1):
            for name in order.sample(list(measures), len(measures)):
                quiet.prepare(scratch, 0)
                taken = measures[name]()
                if number:  # the first round fills the pool, and does not count
                    seconds[name].append(taken)
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
    result = {
        "command": shlex.join(["python", "benchmarks/safety.py", *sys.argv[1:]]),
        "machine": facts,
        "state_bytes": state_bytes(state),
        "rounds": options.rounds,
        "seconds": seconds,
        "gbps": _speeds(),
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    whole = result["seconds"][WHOLE]
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        f"- state: {result['state_bytes'] / 1e9:.3f} GB, {result['rounds']} rounds",
        "",
        "| | median s | of the whole save (quartiles) |",
        "|---|---|---|",
    ]
    for name, taken in result["seconds"].items():
        paired = [mine / other for mine, other in zip(taken, whole, strict=True)]
        low, high = quartiles(paired)
        lines.append(
            f"| {name} | {median(taken):.3f} | {median(paired):.3f} ({low:.3f} to {high:.3f}) |"
        )
    lines += ["", "| one core | GB/s |", "|---|---|"]
    lines += [f"| {name} | {speed:.1f} |" for name, speed in result["gbps"].items()]
    return "\n".join(lines)


def _measures(state: Any, scratch: Path, size: int) -> dict[str, Callable[[], float]]:
    def save(without: Callable[[], Any]) -> float:
        path = scratch / "checkpoint"
        shutil.rmtree(path, ignore_errors=True)
        with without():
            started = time.perf_counter()
            holdfast.save(state, path)
            return time.perf_counter() - started

    measures: dict[str, Callable[[], float]] = {
        WHOLE: lambda: save(nullcontext),
        "without checksums": lambda: save(_without_checksums),
        "without fsync of the data": lambda: save(_without_fsync),
    }
    if fio.installed():
        setting = fio.SETTINGS[0]
        measures |= {setting.name: lambda: _fio(setting, scratch, size)}
    return measures


def _fio(setting: fio.Setting, scratch: Path, size: int) -> float:
    path = scratch / "fio.bin"
    path.unlink(missing_ok=True)
    return fio.run(setting, "write", path, fio.file_bytes(size))


@contextmanager
def _without_checksums() -> Iterator[None]:
    def copied(target: int, source: int, size: int, seed: int) -> tuple[int, bytes]:
        copy(target, source, size)
        return 0, DIGEST

    with patch("holdfast.engine.stage.copy_and_hash_chunk", copied):
        yield


@contextmanager
def _without_fsync() -> Iterator[None]:
    # Of the data file and the directories; the commit's own few small ones stay.
    with patch("holdfast.engine.write.DataFileWriter._sync", lambda _writer, _call: None):
        yield


def _speeds() -> dict[str, float]:
    """Measure one core on 512 MiB, in the chunks that a save hashes."""
    size, chunk = 512 << 20, 4 << 20
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    here, there = source.data_ptr(), target.data_ptr()
    calls: dict[str, Callable[[int], object]] = {
        "both checksums": lambda at: hash_chunk(here + at, chunk, 7),
        "both checksums, while copying": lambda at: copy_and_hash_chunk(
            there + at, here + at, chunk, 7
        ),
        "copy alone": lambda at: copy(there + at, here + at, chunk),
    }
    found = {}
    for name, call in calls.items():
        taken = []
        for _ in range(9):
            started = time.perf_counter()
            for at in range(0, size, chunk):
                call(at)
            taken.append(time.perf_counter() - started)
        found[name] = size / median(taken) / 1e9
    return found


if __name__ == "__main__":
    main()
