"""Faults of machines, networks, disks and clocks, struck on ranks that save; then all is judged.

Each round is a run of its own, on real processes (gloo) and a real file system: ranks restore and
save, in the foreground or in the background; something strikes; survivors have to be told by their
deadline and five seconds, nothing half-made may be visible, what was acknowledged has to load
bit-exact, and the job, or a new one, has to save on. What cannot be made on this machine is named,
and left out.

    python tests/crash/chaos_loop.py --rounds 100 --seed 1
    python tests/crash/chaos_loop.py --only partition hung-disk
    python tests/crash/chaos_loop.py --plant
"""

import argparse
import gc
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from blocks import disks
from chaos.plants import PLANTED
from chaos.ranks import Prepare
from chaos.rounds import Round, Tally
from chaos.scenarios import SCENARIOS
from forked_ranks import load_everything

PLANT_ROUNDS = 12  # a planted fault has to show by then


def run(
    name: str, rounds: int, seed: str, work: Path, plant: Prepare | None = None, first: int = 0
) -> Tally:
    """Strike so many times in one way; stop at the first broken promise."""
    tally = Tally()
    for number in range(first, first + rounds):
        rng = random.Random(f"{seed} {name} {number}")
        place = work / f"{name}-{number}"
        place.mkdir()
        now = Round(rng, place, plant)
        with now.after:
            setting = SCENARIOS[name].strike(now)
            now.judge(tally, **setting or {})
        shutil.rmtree(place)
        where = f"(seed {seed}, {name}, --first {number}, {now.plans()})"
        tally.faults += [f"{fault} {where}" for fault in now.faults]
        if tally.faults:
            break
    return tally


def check(names: list[str], rounds: int, seed: str, work: Path, first: int) -> list[str]:
    """Strike in all these ways; print what was seen, and return what was wrong."""
    faults: list[str] = []
    struck, longest_s = 0, 0.0
    for name in names:
        if reason := SCENARIOS[name].missing():
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        started = time.monotonic()
        tally = run(name, rounds, seed, work, first=first)
        print(f"{name}: {tally}; {time.monotonic() - started:.0f} s", flush=True)
        faults += tally.faults
        struck += tally.rounds
        longest_s = max(longest_s, tally.longest_s)
    print(f"in all: {struck} rounds, the longest wait {longest_s:.2f} s, {len(faults)} faults")
    return faults


def check_plants(names: list[str], seed: str, work: Path) -> list[str]:
    """Plant faults; print by what each was noticed, and return those that were not."""
    missed = []
    for name in names:
        scenario, plant = PLANTED[name].scenario, PLANTED[name].plant
        tally = run(scenario, PLANT_ROUNDS, seed, work / "planted", plant)
        if not tally.faults:
            missed.append(f"not noticed: {name}")
        said = tally.faults[0] if tally.faults else "NOT NOTICED"
        print(f"{name}, in {scenario}, round {tally.rounds}: {said[:200]}", flush=True)
    print(f"{len(names) - len(missed)} of {len(names)} planted faults noticed")
    return missed


def main() -> int:
    """Strike as often as asked; exit 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="of each scenario")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--seed", default=str(random.randrange(1 << 32)))
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--plant", nargs="*", choices=PLANTED, help="faults; all by default")
    parser.add_argument("--root", type=Path, help="an empty directory; default: a temporary one")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    torch.set_num_threads(1)  # threads do not survive a fork
    if os.geteuid() == 0:
        disks.go_private()
    with tempfile.TemporaryDirectory(dir=options.root, prefix="holdfast-chaos-") as directory:
        work = Path(directory)
        (work / "planted").mkdir()
        load_everything(work)
        gc.freeze()  # what every rank shares is not copied by its collector
        if options.plant is not None:
            faults = check_plants(options.plant or list(PLANTED), options.seed, work)
        else:
            faults = check(options.only, options.rounds, options.seed, work, options.first)
    print(*faults[:20], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
