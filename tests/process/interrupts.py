"""An exception at every point of every verb at which a signal may raise one; then all is judged.

    python tests/process/interrupts.py                          # every point of every verb
    python tests/process/interrupts.py --places                 # one of each line of code
    python tests/process/interrupts.py --verbs save --from 120  # go on
    python tests/process/interrupts.py --verbs save --point 120 # one again
    python tests/process/interrupts.py --real 5000              # real signals, at random moments
    python tests/process/interrupts.py --sample 500 --twice     # two in a row, at points or real

After each, the exception or a HoldfastError has come out; a save in the background and one in the
foreground succeed within a second; what was acknowledged has all its bits, and what is visible is
whole; no thread, descriptor, handler or file is left; and a target that was changed is told of.
What it prints of a fault is the line of code at which the interpreter raised.
"""

import argparse
import json
import os
import random
import select
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a run as a program

import torch
import torch._dynamo  # each optimizer imports it, and so would each child

from process.batch import HANG_S, Said, start
from process.verbs import VERBS

MEMORY = Path("/dev/shm")
PATIENCE_S = 3 * HANG_S  # the child's own watch has ended it long before


@dataclass
class Tally:
    """What was seen of one verb."""

    points: int = 0
    played: int = 0
    missed: int = 0  # the call ended before, as threads take their turns otherwise
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, number: int, place: str, fault: str) -> None:
        kind = fault.split(":")[0] if ":" in fault else fault
        self.faults[kind].append(f"{place}, point {number}: {fault}")


def play(verb: str, numbers: list[int], seed: str, work: Path, *, real: bool, twice: bool) -> Tally:
    """Interrupt a verb so often, in as many processes as that takes."""
    tally, todo = Tally(points=len(numbers)), list(numbers)
    while todo:
        place = work / "batch"
        place.mkdir()
        done = _play_some(verb, todo, seed, place, tally, real=real, twice=twice)
        shutil.rmtree(place)
        todo = todo[done:]
    return tally


def _play_some(
    verb: str,
    numbers: list[int],
    seed: str,
    place: Path,
    tally: Tally,
    *,
    real: bool,
    twice: bool,
) -> int:
    """Play until the first fault; return how many numbers that has taken."""
    process, reading = start(verb, numbers, place, seed, real=real, twice=twice)
    at, done, ended = None, 0, False
    places: list[str] = []
    for said in _lines(process, reading):
        places = said.get("points", places)
        if "broken" in said:
            raise SystemExit(f"{verb}: the child broke: {said['broken']}")
        ended = ended or "ended" in said
        at = said.get("at", at)
        if "done" in said:
            done, at = done + 1, None
            tally.played += said["place"] is not None
            tally.missed += said["place"] is None
            for fault in said["faults"]:
                tally.add(said["done"], said["place"], fault)
        elif "at" in said and at != numbers[done]:
            done = numbers.index(at)  # those between were not reached
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if ended:
        return done if at is None else len(numbers)
    if at is None:
        raise SystemExit(f"{verb}: a child ended with {status}: {(place / 'stderr').read_text()}")
    hung = (place / "trace").read_text()
    fault = f"hang: {_blocked(hung)}" if hung else f"crash: the process ended with {status}"
    tally.played += 1
    tally.add(at, places[at] if at < len(places) else "?", fault)
    return numbers.index(at) + 1


def _lines(process: int, reading: int) -> list[Said]:
    """Collect what a child tells until it ends; kill it when it tells nothing for long."""
    parts = b""
    while True:
        if not select.select([reading], [], [], PATIENCE_S)[0]:
            os.kill(process, 9)
        part = os.read(reading, 1 << 16)
        if not part:
            os.close(reading)
            return [json.loads(line) for line in parts.splitlines() if line.endswith(b"}")]
        parts += part


def _blocked(dump: str) -> str:
    """Return the innermost frames of the main thread, of a dump of all."""
    lines = dump[dump.rfind("Thread ") :].splitlines()[1:]
    frames = [line.split("/")[-1].replace('"', "") for line in lines if line.startswith("  File")]
    return " < ".join(frames[:6])


def points_of(verb: str, work: Path) -> list[str]:
    """Return the place of each point of a verb."""
    place = work / "points"
    place.mkdir()
    process, reading = start(verb, [], place, "", real=False)
    said = _lines(process, reading)
    os.waitpid(process, 0)
    told = (place / "stderr").read_text()
    shutil.rmtree(place)
    for line in said:
        if "points" in line:
            found: list[str] = line["points"]
            return found
    raise SystemExit(f"{verb}: the child broke: {said} {told}")


def choose(places: list[str], options: argparse.Namespace) -> list[int]:
    """Return the numbers of the points to interrupt at."""
    numbers = list(range(options.first, len(places)))
    if options.point is not None:
        return [options.point]
    rng = random.Random(f"{options.seed} {len(places)}")
    if options.places:
        by_place: dict[str, list[int]] = defaultdict(list)
        for number in numbers:
            by_place[places[number]].append(number)
        numbers = sorted(rng.choice(alike) for alike in by_place.values())
    return sorted(rng.sample(numbers, min(options.sample or len(numbers), len(numbers))))


def show(verb: str, tally: Tally, seconds: float, *, all_faults: bool) -> None:
    """Print the row of a verb, and its faults by kind and by line of code."""
    missed = f", {tally.missed} not reached" if tally.missed else ""
    count = sum(map(len, tally.faults.values()))
    print(f"{verb}: {tally.played} interrupts{missed}, {count} faults; {seconds:.0f} s", flush=True)
    for kind, faults in sorted(tally.faults.items()):
        print(f"  {kind}: {len(faults)}")
        lines = Counter(fault.split(",")[0] for fault in faults)
        for line, times in lines.most_common(None if all_faults else 12):
            example = next(fault for fault in faults if fault.startswith(line + ","))
            print(f"    {times:4} {line}  e.g. {example.split(', ', 1)[1][:200]}")
    sys.stdout.flush()


def main() -> int:
    """Interrupt as asked; exit 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of a point")
    parser.add_argument("--point", type=int, help="this one alone")
    parser.add_argument("--sample", type=int, help="so many points of each verb, at random")
    parser.add_argument("--places", action="store_true", help="one of each line of code")
    parser.add_argument("--real", type=int, help="so many real signals for each verb instead")
    parser.add_argument("--twice", action="store_true", help="another while the call ends for it")
    parser.add_argument("--seed", default=str(random.randrange(1 << 32)))
    parser.add_argument("--all-faults", action="store_true", help="print every line of code")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    torch.set_num_threads(1)  # threads do not survive a fork
    root = MEMORY if MEMORY.is_dir() else None
    faults = 0
    with tempfile.TemporaryDirectory(dir=root, prefix="holdfast-interrupts-") as directory:
        work = Path(directory)
        for verb in options.verbs:
            started = time.monotonic()
            if options.real is not None:
                numbers = list(range(options.first, options.first + options.real))
            else:
                numbers = choose(points_of(verb, work), options)
            real = options.real is not None
            tally = play(verb, numbers, options.seed, work, real=real, twice=options.twice)
            show(verb, tally, time.monotonic() - started, all_faults=options.all_faults)
            faults += sum(map(len, tally.faults.values()))
    print(f"in all: {faults} faults", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
