"""One replicated (DDP) state written durably by one, two and four ranks, beside DCP and torch.save.

Real ranks with gloo, one process each, that stay alive over the rounds; each holds the whole state.
In one run: shuffled rounds, each contender once a round; a first round, in which what was saved is
loaded and compared bit by bit, does not count. Before every measurement: nothing dirty, caches
dropped, memory touched (`quiet`). A save takes from the barrier before it to the last rank's
return. Ratios to holdfast with one rank are paired round by round (`ratios`).

    python benchmarks/parallel.py --gib 1 --rounds 11
    python benchmarks/parallel.py --directory /dev/shm --json benchmarks/out/parallel_memory.json
    python benchmarks/parallel_picture.py benchmarks/out/parallel.json docs/pictures/parallel.png
"""

import argparse
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import quiet
import ratios
from compare import fio
from parallel_ranks import Ranks, Saver, savers

OUT = Path(__file__).parent / "out"
WARM_FACTOR = 1.25  # of the state: the page cache of a buffered peer, and a rest
FREE_FACTOR = 1.2  # of the state: room for the file system's own
ORDER = ("fio", "holdfast", "DCP", "torch.save")  # of the table
PREDICTION = """\
Prediction: the ranks share one disk, and one rank of holdfast alone writes about as fast as the
disk takes (fio). So two and four ranks cannot be faster than one, and lose what it takes to plan
together: some 0.1 s for 600 tensors on 2 cores. What parallel writing changes is the bytes of each
rank: a half, a quarter. That is what counts where every node has a network card or a disk of its
own, and where one rank by itself cannot fill the disk."""


@dataclass(slots=True)
class Contender:
    """One who saves with so many ranks (0: fio, which knows no ranks), and what was measured.

    Attributes:
        save: makes ready, saves, returns the seconds of the save alone.
        rank_of: which rank wrote a file, by its name.
        bytes_by_rank: sizes of the files that each rank wrote.
    """

    who: str
    ranks: int
    path: Path
    save: Callable[[], float]
    rank_of: Callable[[str], int]
    seconds: list[float] = field(default_factory=list)
    bytes_by_rank: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As in the result."""
        return f"{self.who}, {self.ranks} ranks" if self.ranks else self.who

    def remove(self) -> None:
        """Remove what was saved, whose bytes are counted now: the disk holds one at a time."""
        self.bytes_by_rank = [0] * max(1, self.ranks)
        for file in [self.path, *self.path.rglob("*")]:
            if file.is_file():
                self.bytes_by_rank[self.rank_of(file.name)] += file.stat().st_size
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink()


def main() -> None:
    """Run, print the table, write the JSON."""
    options = _arguments()
    print(f"{PREDICTION}\n", flush=True)
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="parallel-", dir=options.directory) as made:
        scratch = Path(made)
        facts = machine.describe(scratch)
        ranks = Ranks(options.ranks, int(options.gib * 2**30), options.seed)
        contenders = _contenders(options.ranks, ranks, scratch)
        _check_room(ranks.state_bytes, scratch)
        _run(contenders, ranks, options.rounds, random.Random(options.seed))
        result = _result(options, facts, contenders, ranks)
        ranks.stop()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))
    print(f"\n{options.json}")


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown: the machine, and a table."""
    size = result["state_bytes"]
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        f"- state: {size / 1e9:.3f} GB in {result['tensors']} tensors, whole on every rank",
        f"- rounds: {result['rounds']}; caches: {result['caches']}",
        "",
        "| | ranks | GB of each rank | max/mean | median s (quartiles) | GB/s "
        "| of holdfast with one rank (quartiles) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in best_rows(result):
        found, ratio = result["contenders"][row.name], row.ratio
        cells = [found["who"], "", "", ""]
        if found["ranks"]:
            written = found["bytes_by_rank"]
            shares = " ".join(f"{share / 1e9:.3f}" for share in written)
            uneven = max(written) * len(written) / sum(written)
            cells = [found["who"], str(found["ranks"]), shares, f"{uneven:.3f}"]
        cells.append(f"{row.seconds:.3f} ({row.quartiles[0]:.3f} to {row.quartiles[1]:.3f})")
        cells.append(f"{row.gbps:.2f}")
        if ratio:
            low, high = ratio.quartiles
            cells.append(f"{ratio.paired:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def best_rows(result: dict[str, Any]) -> list[ratios.Row]:
    """Return the rows to show: of fio's settings and DCP's numbers of threads only the fastest."""
    contenders = result["contenders"]
    seconds = {name: found["seconds"] for name, found in contenders.items()}
    sizes = dict.fromkeys(contenders, result["state_bytes"])
    one_rank = [n for n, c in contenders.items() if (c["who"], c["ranks"]) == ("holdfast", 1)]
    best: dict[tuple[int, int], ratios.Row] = {}
    for row in ratios.rows(seconds, sizes, one_rank):  # fastest first
        place = next(i for i, kind in enumerate(ORDER) if row.name.startswith(kind))
        best.setdefault((place, contenders[row.name]["ranks"]), row)
    return [best[key] for key in sorted(best)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="how many save")
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=OUT / "parallel.json", help="result file")
    parser.add_argument("--seed", type=int, default=20240614, help="of the values and the order")
    options = parser.parse_args()
    if options.gib <= 0 or options.rounds < 1 or min(options.ranks) < 1:
        parser.error("--gib must be positive, --rounds and --ranks at least 1")
    if 1 not in options.ranks:
        parser.error("--ranks must have 1: the others are compared with it")
    return options


def _contenders(counts: list[int], ranks: Ranks, scratch: Path) -> list[Contender]:
    found = [_limit(setting, ranks.state_bytes, scratch) for setting in _fio_settings(scratch)]
    found += [
        _contender(saver, count, ranks, scratch) for saver in savers().values() for count in counts
    ]
    return found


def _fio_settings(scratch: Path) -> tuple[fio.Setting, ...]:
    """Return those that work here: tmpfs takes no O_DIRECT."""
    if not fio.installed():
        return ()
    trial = scratch / "trial"
    try:
        for setting in fio.SETTINGS:
            fio.run(setting, "write", trial, fio.SIZE_STEP_BYTES)
    except RuntimeError:
        return ()
    finally:
        trial.unlink(missing_ok=True)
    return fio.SETTINGS


def _contender(saver: Saver, count: int, ranks: Ranks, scratch: Path) -> Contender:
    directory = scratch / f"{saver.name}-{count}".replace(" ", "-")
    directory.mkdir()
    path = directory / "checkpoint"

    def save() -> float:
        quiet.prepare(scratch, int(WARM_FACTOR * ranks.state_bytes))
        return ranks.save(saver.name, count, path)

    return Contender(saver.name, count, path, save, saver.rank_of)


def _limit(setting: fio.Setting, state_bytes: int, scratch: Path) -> Contender:
    path = scratch / f"{setting.name.replace(' ', '-')}.bin"

    def save() -> float:
        quiet.prepare(scratch, int(WARM_FACTOR * state_bytes))
        return fio.run(setting, "write", path, fio.file_bytes(state_bytes))

    return Contender(setting.name, 0, path, save, lambda name: 0)


def _run(contenders: list[Contender], ranks: Ranks, rounds: int, order: random.Random) -> None:
    """Measure everyone in every round, in another order each time."""
    # The first round fills pools, checks what was saved, and does not count.
    for contender in order.sample(contenders, len(contenders)):
        contender.save()
        if contender.ranks:
            ranks.check(contender.who, contender.path)
        contender.remove()
    for number in range(1, rounds + 1):
        started = time.perf_counter()
        for contender in order.sample(contenders, len(contenders)):
            contender.seconds.append(contender.save())
            contender.remove()
        took = time.perf_counter() - started
        print(f"round {number} of {rounds}: {took:.0f} s", file=sys.stderr, flush=True)


def _check_room(size_bytes: int, scratch: Path) -> None:
    needed, free = int(FREE_FACTOR * size_bytes), shutil.disk_usage(scratch).free
    if free < needed:
        raise SystemExit(
            f"{scratch} has {free / 1e9:.1f} GB free, the state needs {needed / 1e9:.1f} GB; "
            "use --directory or a smaller --gib"
        )


def _result(
    options: argparse.Namespace,
    facts: dict[str, str],
    contenders: list[Contender],
    ranks: Ranks,
) -> dict[str, Any]:
    dropped = "dropped" if quiet.can_drop_caches() else "files forgotten (posix_fadvise)"
    return {
        "command": shlex.join(["python", "benchmarks/parallel.py", *sys.argv[1:]]),
        "machine": facts,
        "seed": options.seed,
        "rounds": options.rounds,
        "caches": dropped,
        "state_bytes": ranks.state_bytes,
        "tensors": ranks.tensors,
        "contenders": {
            c.name: {
                "who": c.who,
                "ranks": c.ranks,
                "bytes_by_rank": c.bytes_by_rank,
                "seconds": c.seconds,
            }
            for c in contenders
        },
    }


if __name__ == "__main__":
    main()
