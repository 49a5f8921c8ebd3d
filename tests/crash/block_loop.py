"""Runs are saved on real file systems, and what any power cut may leave of their disks is judged.

Two ranks save step after step on a disk that logs its writes and flushes. Then any prefix of the
log is taken, and of the writes after its last flush some are dropped, reordered or torn; the file
system mounts what is left, and every step that was acknowledged has to load bit-exact, and nothing
that is visible may be wrong. In a hurry: ``--states 100 --file-systems ext4``.

    python tests/crash/block_loop.py --states 10000 --seed 1
"""

import argparse
import logging
import os
import random
import sys
import time
from itertools import count
from pathlib import Path

import torch
from blocks import disks, saved_runs
from blocks.explore import Explorer, Tally, record, work_directory
from blocks.plants import NOTHING, PLANTED, Planted
from crash_oracle import promises_broken
from forked_ranks import load_everything

A_RECORDING = 200  # states
PLANT_STATES = 120  # at most, until a planted fault is noticed
RUN = "runs/a"  # two directories that the save has to make, and to make durable
# Each file system's own writing falls into a short recording too.
MOUNT_OPTIONS = {"ext4": ("", "commit=1"), "xfs": ("",), "btrfs": ("", "commit=1")}


def judge_recording(
    kind: disks.FileSystem,
    plan: saved_runs.Plan,
    work: Path,
    states: int,
    rng: random.Random,
    planted: Planted = NOTHING,
) -> Tally:
    """Record a run as planned, and judge so many of its crash states.

    Args:
        planted: a fault of the ranks or the mount; then the first state that shows it is the last.
    """

    def save(where: Path, log: Path) -> list[tuple[int, int]]:
        told, ended = saved_runs.save_run(where / RUN, log, plan, planted.plant)
        assert not any(ended.values()), f"the ranks ended with {ended}"
        return told

    def judge(looked: saved_runs.Looked, acknowledged: set[int]) -> list[str]:
        broken = promises_broken(looked.run, acknowledged, plan.keep)
        return broken + list(saved_runs.disagreements(looked))

    options = planted.options or rng.choice(MOUNT_OPTIONS[kind.name])
    recording = record(kind, work, save, options)
    explorer = Explorer(
        work,
        lambda where: saved_runs.look(where / RUN),
        judge,
        lambda where: saved_runs.save_again(where / RUN),
    )
    return explorer.explore(recording, states, rng, stop=planted is not NOTHING)


def run_plants(
    kinds: list[disks.FileSystem], names: list[str], states: int, seed: int
) -> dict[str, dict[str, Tally]]:
    """Plant each fault on each file system where it can be; return what was seen, by names."""
    seen: dict[str, dict[str, Tally]] = {}
    with work_directory() as work:
        load_everything(work)
        for name in names:
            planted, seen[name] = PLANTED[name], {}
            for kind in kinds:
                if planted.options and kind.name not in planted.on:
                    continue
                rng = random.Random(f"{seed}/{name}/{kind.name}")
                tally = judge_recording(kind, planted.plan, work, states, rng, planted)
                seen[name][kind.name] = tally
            found = {
                kind: f"caught by state {tally.states}" if tally.faults else f"not in {states}"
                for kind, tally in seen[name].items()
            }
            first = next((tally.faults[0] for tally in seen[name].values() if tally.faults), "")
            print(f"{name}: {found}; {first}", flush=True)
    caught = [name for name in seen if any(tally.faults for tally in seen[name].values())]
    print(f"{len(caught)} of {len(seen)} planted faults caught, seed {seed}")
    return seen


def run(kinds: list[disks.FileSystem], states: int, seconds: float, seed: int) -> Tally:
    """Judge so many states, or for so long; stop at the first broken promise."""
    begun, total = time.monotonic(), Tally()
    by_kind = {kind.name: Tally() for kind in kinds}
    with work_directory() as work:
        load_everything(work)
        for number in count():
            rng, kind = random.Random(f"{seed}/{number}"), kinds[number % len(kinds)]
            plan = saved_runs.Plan.choose(rng)
            part = min(A_RECORDING, states - total.states)
            tally = judge_recording(kind, plan, work, part, rng)
            by_kind[kind.name].add(tally)
            total.add(tally)
            took = time.monotonic() - begun
            print(f"{took:5.0f} s, recording {number}, {kind.name}, {plan}: {tally}", flush=True)
            if total.faults or total.states >= states or took > seconds:
                break
    for name, tally in by_kind.items():
        print(f"{name}: {tally}; {dict(tally.kinds)}")
    return total


def main() -> int:
    """Judge as many states as asked; exit 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--states", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    known = list(disks.FILE_SYSTEMS)
    parser.add_argument("--file-systems", nargs="+", choices=known, default=known)
    parser.add_argument(
        "--plant",
        nargs="*",
        choices=list(PLANTED),
        help="break the protocol, in these ways or in all of them: it has to be noticed",
    )
    arguments = parser.parse_args()
    kinds = [disks.FILE_SYSTEMS[name] for name in arguments.file_systems]
    for kind in kinds:
        if reason := disks.missing(kind):
            print(f"{kind.name}: {reason}", file=sys.stderr)
            return 2
    print(f"seed {arguments.seed}", flush=True)
    torch.set_num_threads(1)  # threads do not survive a fork
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.CRITICAL)  # what is wrong with a state is said by its judge
    disks.go_private()
    if arguments.plant is not None:
        names = arguments.plant or list(PLANTED)
        seen = run_plants(kinds, names, min(arguments.states, PLANT_STATES), arguments.seed)
        return 0 if all(any(t.faults for t in by.values()) for by in seen.values()) else 1
    total = run(kinds, arguments.states, arguments.seconds, arguments.seed)
    print(f"in all: {total}", *total.faults[:20], sep="\n")
    return 1 if total.faults else 0


if __name__ == "__main__":
    sys.exit(main())
