"""Durable save and verified cold load of one process's state, beside fio and other formats.

In one run: shuffled rounds, each contender once a round in each direction; a first round is thrown
away. Before every measurement: nothing dirty, caches dropped, memory touched (`quiet`). Ratios to
the limit, the fastest setting of fio, are paired round by round (`ratios`). What a load gave is
compared bit by bit, every time, outside the clock.

    make bench-peers    # installs the other formats; who is not there is skipped
    python benchmarks/save_load.py --gib 2 --rounds 11
    python benchmarks/publish.py    # the figures and the picture of docs/benchmarks.md
"""

import argparse
import importlib
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import machine
import quiet
from compare import Peer, fio
from report import VERBS, Result, report
from training_state import (
    State,
    differences,
    empty_like,
    flat,
    make_state,
    spoil,
    state_bytes,
)

PEERS = {  # name → module of `compare`
    "holdfast": "holdfast",
    "torch.save": "torch_save",
    "DCP": "dcp",
    "safetensors": "safetensors",
    "torchsnapshot": "torchsnapshot",
    "torch_checkpointing": "torch_checkpointing",
    "DeepSpeed": "deepspeed",
    "ByteCheckpoint": "bytecheckpoint",
    "Orbax": "orbax",
}
FIO_VERBS = {"save": "write", "load": "read"}
OUT = Path(__file__).parent / "out"
WARM_FACTOR = 1.25  # of the state: the page cache of a buffered peer, and a rest
FREE_FACTOR = 1.1  # of what the contenders write: room for the file system's own


@dataclass(slots=True)
class Contender:
    """One peer or setting of fio: how to measure it, and what was measured.

    Attributes:
        measure: for each verb, makes ready, runs, checks; returns the seconds of the run alone.
        moved_bytes: in each direction; the state's bytes, or those of fio's file.
        stored_bytes: of the checkpoint, as its files' sizes say.
    """

    name: str
    settings: str
    measure: dict[str, Callable[[], float]]
    moved_bytes: int
    stored_bytes: Callable[[], int]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {verb: [] for verb in VERBS})


def main() -> None:
    """Run, print the tables, write the JSON."""
    options = _arguments()
    state = make_state(int(options.gib * 2**30), options.seed)
    with _scratch(options.directory) as scratch:
        contenders, skipped = _contenders(state, scratch, options.only)
        _check_room(contenders, scratch)
        result = _result(options, state, contenders, skipped, machine.describe(scratch))
        _run(contenders, options.rounds, random.Random(options.seed))
        result["contenders"] = {
            c.name: {
                "settings": c.settings,
                "moved_bytes": c.moved_bytes,
                "stored_bytes": c.stored_bytes(),
                **c.seconds,
            }
            for c in contenders
        }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report([result]))
    print(f"\n{options.json}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--only", default="", help="peers to run, by comma: parts of their names")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=OUT / "save_load.json", help="result file")
    parser.add_argument("--seed", type=int, default=20240614, help="of the values and the order")
    options = parser.parse_args()
    if options.gib <= 0 or options.rounds < 1:
        parser.error("--gib must be positive, --rounds at least 1")
    return options


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="save_load-", dir=directory) as made:
        yield Path(made)


def _contenders(state: State, scratch: Path, only: str) -> tuple[list[Contender], dict[str, str]]:
    """Find who takes part, and why the others do not."""
    target, skipped, found = empty_like(state), dict[str, str](), list[Contender]()
    if fio.installed():
        found += [_limit(setting, state, scratch) for setting in fio.SETTINGS]
    else:
        skipped["fio"] = "not installed; there is no limit to compare with"
    for name, module in PEERS.items():
        if not any(part.strip() in name for part in only.split(",")):
            skipped[name] = "not asked for"  # and not imported: some start threads when they are
            continue
        try:
            peers: list[Peer] = importlib.import_module(f"compare.{module}").peers()
        except ImportError as error:
            skipped[name] = str(error)
            continue
        found += [_contender(peer, state, target, scratch) for peer in peers]
    return found, skipped


def _contender(peer: Peer, state: State, target: State, scratch: Path) -> Contender:
    directory = scratch / peer.name.replace(" ", "-")
    directory.mkdir()
    path, size = directory / "checkpoint", state_bytes(state)

    def save() -> float:
        _remove(path)
        quiet.prepare(scratch, int(WARM_FACTOR * size))
        return _seconds(lambda: peer.save(state, path))

    def load() -> float:
        spoil(target)
        quiet.prepare(scratch, int(WARM_FACTOR * size))
        taken = _seconds(lambda: peer.load(path, target))
        if wrong := differences(target, state):
            raise SystemExit(f"{peer.name} loaded other values than it saved: {', '.join(wrong)}")
        return taken

    measure = {"save": save, "load": load}
    return Contender(peer.name, peer.settings, measure, size, lambda: _stored_bytes(path))


def _limit(setting: fio.Setting, state: State, scratch: Path) -> Contender:
    path = scratch / f"{setting.name.replace(' ', '-')}.bin"
    state_size = state_bytes(state)
    size = fio.file_bytes(state_size)

    def measure(verb: str) -> float:
        if verb == "save":
            _remove(path)
        quiet.prepare(scratch, int(WARM_FACTOR * state_size))
        return fio.run(setting, FIO_VERBS[verb], path, size)

    by_verb = {"save": lambda: measure("save"), "load": lambda: measure("load")}
    return Contender(setting.name, " ".join(fio.COMMON), by_verb, size, lambda: _stored_bytes(path))


def _run(contenders: list[Contender], rounds: int, order: random.Random) -> None:
    """Measure everyone in every round, in another order each time."""
    # The first round makes what loads read, fills pools and caches of plans, and does not count.
    for contender in order.sample(contenders, len(contenders)):
        for verb in VERBS:
            contender.measure[verb]()
    tasks = [(contender, verb) for contender in contenders for verb in VERBS]
    for number in range(1, rounds + 1):
        started = time.perf_counter()
        for contender, verb in order.sample(tasks, len(tasks)):
            contender.seconds[verb].append(contender.measure[verb]())
        took = time.perf_counter() - started
        print(f"round {number} of {rounds}: {took:.0f} s", file=sys.stderr, flush=True)


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _stored_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)


def _check_room(contenders: list[Contender], scratch: Path) -> None:
    needed = int(FREE_FACTOR * sum(contender.moved_bytes for contender in contenders))
    free = shutil.disk_usage(scratch).free
    if free < needed:
        raise SystemExit(
            f"{scratch} has {free / 1e9:.1f} GB free, {len(contenders)} contenders need "
            f"{needed / 1e9:.1f} GB; use --directory, --only or a smaller --gib"
        )


def _result(
    options: argparse.Namespace,
    state: State,
    contenders: list[Contender],
    skipped: dict[str, str],
    facts: dict[str, str],
) -> Result:
    dropped = "dropped" if quiet.can_drop_caches() else "files forgotten (posix_fadvise)"
    return {
        "command": shlex.join(["python", "benchmarks/save_load.py", *sys.argv[1:]]),
        "machine": facts,
        "seed": options.seed,
        "rounds": options.rounds,
        "caches": dropped,
        "state_bytes": state_bytes(state),
        "tensors": len(flat(state)),
        "limits": [c.name for c in contenders if c.name in {s.name for s in fio.SETTINGS}],
        "skipped": skipped,
    }


if __name__ == "__main__":
    main()
