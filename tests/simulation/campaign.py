"""Plays a world for each seed and says which promises were broken: `make simulate`.

    python tests/simulation/campaign.py --seeds 1000000 --from 1 --processes 2
    python tests/simulation/campaign.py --seed 4711                # one again, with its trace
    python tests/simulation/campaign.py --plant --seeds 5000       # are planted faults noticed?
    python tests/simulation/campaign.py --on objects …             # on an object store

Prints seeds per second, what happened how often, and each failing seed. A seed is one world
whatever else runs; `worlds.py` says what is in it.
"""

import argparse
import functools
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a run as a program

from simulation import bucket_plants, plants, tier_plants
from simulation.bucket_worlds import BucketWorld
from simulation.host_worlds import HostsWorld
from simulation.plants import planted
from simulation.seams import installed
from simulation.tier_worlds import SharedDiskWorld, TierWorld
from simulation.worlds import World

WORLDS: dict[str, type[World]] = {
    "disk": World,
    "objects": BucketWorld,
    "tiers": TierWorld,
    "tiers-disk": SharedDiskWorld,
    "tiers-hosts": HostsWorld,
}
PLANTS = {
    "disk": plants.PLANTS,
    "objects": bucket_plants.PLANTS,
    "tiers": tier_plants.PLANTS,
    "tiers-disk": tier_plants.ON_DISK,
    "tiers-hosts": tier_plants.ON_HOSTS,
}
CHUNK = 250  # seeds that a process plays before it tells
Failing = list[tuple[int, str]]  # seeds, and the first promise that each breaks


def play(seeds: range, on: str = "disk") -> tuple[Counter[str], Failing]:
    """Play the worlds of some seeds."""
    counts: Counter[str] = Counter()
    failing = []
    with installed():
        for seed in seeds:
            if faults := WORLDS[on](seed, counts).play():
                failing.append((seed, faults[0]))
    return counts, failing


def first_noticed(name: str, seeds: range, on: str = "disk") -> tuple[int, str] | None:
    """Return the first seed that notices a planted fault, and what it says."""
    with installed(), planted(PLANTS[on][name]):
        for seed in seeds:
            if faults := WORLDS[on](seed, Counter()).play():
                return seed, faults[0]
    return None


def _play_all(seeds: range, processes: int, on: str) -> Iterator[tuple[Counter[str], Failing]]:
    play_some = functools.partial(play, on=on)
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    if processes == 1:
        yield from map(play_some, chunks)
        return
    with multiprocessing.get_context("fork").Pool(processes, _settle_down) as pool:
        yield from pool.imap_unordered(play_some, chunks)


def _settle_down() -> None:
    """Stay on one core: its actors take turns, so threads on two would only wait for each other."""
    number = multiprocessing.current_process()._identity[0]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _show(seed: int, on: str) -> int:
    with installed():
        world = WORLDS[on](seed, Counter(), traced=True)
        faults = world.play()
    print(*(world.scheduler.trace or ()), *faults, sep="\n")
    return int(bool(faults))


def _show_plants(names: list[str], seeds: range, on: str) -> int:
    missed = 0
    for name in names:
        found = first_noticed(name, seeds, on)
        told = f"seed {found[0]}, {found[1].splitlines()[0]}" if found else "NOT NOTICED"
        print(f"{name:46} {told:.150}", flush=True)
        missed += found is None
    return int(missed > 0)


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--from", type=int, default=1, dest="first")
    parser.add_argument("--seed", type=int, help="play one, and print its trace")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--on", choices=[*WORLDS], default="disk")
    parser.add_argument("--plant", nargs="?", const="all", help="one by its name; all")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    gc.freeze()  # what is imported stays: a twentieth faster
    if given.seed is not None:
        return _show(given.seed, given.on)
    if given.plant:
        names = list(PLANTS[given.on]) if given.plant == "all" else [given.plant]
        return _show_plants(names, seeds, given.on)
    counts: Counter[str] = Counter()
    failing = 0
    started = told = time.perf_counter()
    for some, faults in _play_all(seeds, given.processes, given.on):
        counts.update(some)
        failing += len(faults)
        for seed, fault in faults:
            print(f"seed {seed}: {fault}", flush=True)
        if time.perf_counter() - told > 60:
            told = time.perf_counter()
            print(f"{counts['worlds']} seeds, {failing} failing", flush=True)
    seconds = time.perf_counter() - started
    rate = given.seeds / seconds
    print(f"{given.seeds} seeds from {given.first}: {failing} failing, {rate:.0f} seeds/s")
    print(*(f"{count:12} {what}" for what, count in sorted(counts.items())), sep="\n")
    return int(failing > 0)


if __name__ == "__main__":
    sys.exit(main())
