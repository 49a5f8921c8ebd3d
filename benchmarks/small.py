"""Durable save and load into place of small states: what a call costs, beside its fsyncs.

Small states cost time by the tensor and by the fsync, hardly by the byte. Each state is measured in
shuffled rounds, a save and two loads of every contender in each; a first round is thrown away. What
a load gave is compared bit by bit, outside the clock. The first load finds what was just written in
the page cache, where its format reads through it; before the second, the pages are dropped. One
fsync is timed in the same rounds: the second ratio to a peer is without the fsyncs that one of the
two makes and the other does not.

    python benchmarks/small.py --rounds 21
    python benchmarks/small.py --only 10x4KB,AdamW,ranks
"""

import argparse
import gc
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import machine
from compare import fio
from ratios import quartiles
from small_peers import HOLDFAST, Peer, peers
from small_ranks import Ranks
from small_states import RANKS, TENSORS_OF_RANK, Sample, measure, same, samples, spoil

OUT = Path(__file__).parent / "out"
VERBS = {"save": "save", "load": "load", "cold": "load from the disk"}
OF_RANKS = f"{RANKS}ranks-{TENSORS_OF_RANK}x4KB"
FSYNC_BYTES = 4096
FIO_BYTES_MIN = 50_000_000  # of a read that its clock, in milliseconds, tells to a few percent


@dataclass(slots=True)
class Measured:
    """One contender with one state.

    Attributes:
        syncs: fsyncs of a save; with several ranks, of the one that makes most.
        save, load, cold: seconds of each round.
    """

    settings: str
    syncs: int = 0
    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Contender:
    """One who saves one state: each makes ready, runs and checks; the seconds are the run's."""

    settings: str
    run: Mapping[str, Callable[[], float]]
    syncs: Callable[[], int]


def main() -> None:
    """Measure each state, print the tables, write the JSON."""
    options = _arguments()
    for directory in (options.directory, options.json.parent):
        directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="small-", dir=options.directory) as made:
        scratch = Path(made)
        result: dict[str, Any] = {
            "command": shlex.join(["python", "benchmarks/small.py", *sys.argv[1:]]),
            "machine": machine.describe(scratch),
            "seed": options.seed,
            "rounds": options.rounds,
            "states": {},
        }
        for name in _asked_for(options.only):
            result["states"][name] = _state(name, scratch, options)
            # After each state: what is measured stays if the run is stopped.
            options.json.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{name}: done", file=sys.stderr, flush=True)
    print(report(result))
    print(f"\n{options.json}")


def report(result: Mapping[str, Any]) -> str:
    """Return a result as Markdown: the machine, and a table for saves and one for loads."""
    fsyncs = [seconds for state in result["states"].values() for seconds in state["fsync"]]
    low, high = quartiles(fsyncs)
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        f"- rounds: {result['rounds']}",
        f"- one fsync of {FSYNC_BYTES} new bytes: {median(fsyncs) * 1e3:.2f} ms "
        f"(quartiles {low * 1e3:.2f} to {high * 1e3:.2f})",
    ]
    for verb in VERBS:
        lines += ["", f"**{VERBS[verb]}**", "", *_table(result["states"], verb)]
    return "\n".join(lines)


def _table(states: Mapping[str, Any], verb: str) -> list[str]:
    others = [who for who in next(iter(states.values()))["contenders"] if who != HOLDFAST]
    counted = ", fsyncs" if verb == "save" else ""
    lines = [
        f"| state | MB | {HOLDFAST}: ms{counted} | "
        + " | ".join(f"{who}: ms{counted} | ratio" for who in others)
        + (" |" if verb == "save" else " | fio reads as much: ms |"),
        "|---" * (3 + (verb != "save") + 2 * len(others)) + "|",
    ]
    for name, state in states.items():
        found, fsyncs = state["contenders"], state["fsync"]
        cells = [name, f"{state['bytes'] / 1e6:.3g}", _time(found[HOLDFAST], verb)]
        for who in others:
            cells += [_time(found[who], verb), _ratio(found[HOLDFAST], found[who], verb, fsyncs)]
        if verb != "save":
            limit = state.get("fio")
            cells.append(f"{median(limit) * 1e3:.1f}" if limit else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _time(measured: Mapping[str, Any], verb: str) -> str:
    syncs = f", {measured['syncs']}" if verb == "save" else ""
    return f"{median(measured[verb]) * 1e3:.1f}{syncs}"


def _ratio(
    mine: Mapping[str, Any], other: Mapping[str, Any], verb: str, fsyncs: Sequence[float]
) -> str:
    """Return holdfast's time by the peer's, as it is and without fsyncs that only one makes.

    What is left of either is taken to be one fsync at least: no save is without one.
    """
    pairs = list(zip(mine[verb], other[verb], fsyncs, strict=True))
    raw = median(a / b for a, b, _ in pairs)
    if verb != "save":
        return f"{raw:.2f}"
    extra = mine["syncs"] - other["syncs"]
    more, less = max(extra, 0), max(-extra, 0)
    rest = median(max(a - more * one, one) / max(b - less * one, one) for a, b, one in pairs)
    return f"{raw:.2f}, {rest:.2f}"


def _state(name: str, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure everyone with one state."""
    order = random.Random(options.seed)
    if name == OF_RANKS:
        ranks = Ranks(RANKS, options.seed)
        found = _measure(_contenders_of(ranks, scratch), scratch, options.rounds, order)
        size = {"tensors": ranks.tensors, "bytes": ranks.bytes}
        ranks.stop()
        return size | found
    make = samples()[name]
    sample, target = make(options.seed), make(options.seed + 1)
    contenders = {who: _contender(peer, sample, target, scratch) for who, peer in peers().items()}
    tensors, size_bytes = measure(sample.tensors())
    found = _measure(contenders, scratch, options.rounds, order)
    limit = _limit(scratch, size_bytes, options.rounds)
    return {"tensors": tensors, "bytes": size_bytes, "fio": limit} | found


def _limit(scratch: Path, size_bytes: int, rounds: int) -> list[float]:
    """Return what fio takes to read so many bytes past the page cache; [] where it cannot say."""
    if size_bytes < FIO_BYTES_MIN or not fio.installed():
        return []
    path, size = scratch / "fio", fio.file_bytes(size_bytes)
    fio.run(fio.SETTINGS[0], "write", path, size)
    found = [
        min(fio.run(setting, "read", path, size) for setting in fio.SETTINGS) for _ in range(rounds)
    ]
    path.unlink()
    return [seconds * size_bytes / size for seconds in found]


def _measure(
    contenders: Mapping[str, Contender], scratch: Path, rounds: int, order: random.Random
) -> dict[str, Any]:
    measured = {who: Measured(c.settings) for who, c in contenders.items()}
    tasks = [(who, verb) for who in contenders for verb in VERBS]
    fsyncs: list[float] = []
    for verb in VERBS:  # a round that fills pools and caches of plans, and makes what loads read
        for contender in contenders.values():
            contender.run[verb]()
    for _ in range(rounds):
        of_round = []
        for who, verb in order.sample(tasks, len(tasks)):
            getattr(measured[who], verb).append(contenders[who].run[verb]())
            of_round.append(_fsync_s(scratch))
        fsyncs.append(median(of_round))
    for who, contender in contenders.items():
        measured[who].syncs = contender.syncs()
    _empty(scratch.iterdir())
    return {"fsync": fsyncs, "contenders": {who: asdict(m) for who, m in measured.items()}}


def _contender(peer: Peer, sample: Sample, target: Sample, scratch: Path) -> Contender:
    path = _place(scratch, peer.name)

    def save() -> float:
        _make_ready(path)
        return _seconds(lambda: peer.save(sample, path))

    def load() -> float:
        spoil(target.tensors())
        gc.collect()
        taken = _seconds(lambda: peer.load(path, target))
        if not same(target.tensors(), sample.tensors()):
            raise SystemExit(f"{peer.name} loaded other values than it saved")
        return taken

    def cold() -> float:
        _drop_pages(path)
        return load()

    def syncs() -> int:
        _make_ready(path)
        return peer.syncs(sample, path)

    return Contender(peer.settings, {"save": save, "load": load, "cold": cold}, syncs)


def _contenders_of(ranks: Ranks, scratch: Path) -> dict[str, Contender]:
    """Return the contenders where all ranks save at once, each its own tensors."""

    def contender(peer: Peer) -> Contender:
        path = _place(scratch, peer.name)

        def save() -> float:
            _make_ready(path)
            return ranks.seconds("save", peer.name, path)

        def syncs() -> int:
            _make_ready(path)
            return ranks.syncs(peer.name, path)

        def load() -> float:
            return ranks.seconds("load", peer.name, path)

        def cold() -> float:
            _drop_pages(path)
            return load()

        run = {"save": save, "load": load, "cold": cold}
        return Contender(peer.settings, run, syncs)

    return {who: contender(peer) for who, peer in peers().items()}


def _place(scratch: Path, who: str) -> Path:
    # All side by side: holdfast syncs every directory above that is younger than an hour.
    return scratch / who.replace(" ", "-")


def _make_ready(path: Path) -> None:
    """Remove what was saved, and have nothing dirty: an fsync pays for what others wrote too."""
    _empty(path.parent.glob(f"{path.name}*"))
    gc.collect()
    os.sync()


def _drop_pages(path: Path) -> None:
    """Take what was saved out of the page cache, as after a restart of the machine."""
    for top in path.parent.glob(f"{path.name}*"):
        for file in [file for file in (top, *top.rglob("*")) if file.is_file()]:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _empty(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _fsync_s(scratch: Path) -> float:
    """Return the seconds of one fsync of a small new file."""
    path = scratch / "fsync"
    with path.open("wb", buffering=0) as file:
        file.write(b"x" * FSYNC_BYTES)
        taken = _seconds(lambda: os.fsync(file.fileno()))
    path.unlink()
    return taken


def _asked_for(only: str) -> list[str]:
    names = [*samples(), OF_RANKS]
    found = [name for name in names if any(part.strip() in name for part in only.split(","))]
    if not found:
        raise SystemExit(f"--only {only}: expected parts of {', '.join(names)}")
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21, help="rounds that count")
    parser.add_argument("--only", default="", help="states, by comma: parts of their names")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=OUT / "small.json", help="result file")
    parser.add_argument("--seed", type=int, default=20240614, help="of the values and the order")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    main()
