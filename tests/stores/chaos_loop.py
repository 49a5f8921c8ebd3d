"""Saves to a real S3 server on this machine, harmed at any request; then all is judged.

A proxy between holdfast and the server cuts, loses, refuses, delays and holds requests, and kills
ranks right before and after them. What was acknowledged has to load bit for bit, what is there has
to be whole, every error has to come in time, and the next save has to work.

    make stores-chaos ROUNDS=100 SEED=1
    make stores-chaos ROUNDS=1 SEED=1 STORES_CHAOS="--only random --first 17"
"""

import argparse
import functools
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import forked_ranks  # before anything that makes pools
import torch
from crash_content import make_state

import holdfast

from .chaos.harms import FOREVER, HOLDS, KILLS, ONCE, Harm
from .chaos.jobs import Field
from .chaos.programs import OPTIONS, STEPS_MAX
from .chaos.races import KINDS, race
from .chaos.rounds import ENUMERATED, SCENARIOS, TIERED, Tally, play

SERVERS = ("seaweedfs", "moto")
RACES_AT_ONCE = 25
HELD = ("zombie", "zombie-first", "zombie-retire", "beside", "replacers")


def main() -> int:
    """Play as many rounds as asked; exit 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", choices=SERVERS, default="seaweedfs")
    parser.add_argument("--rounds", type=int, default=100, help="at random; races: five times that")
    parser.add_argument("--first", type=int, default=0, help="number of the first round or kill")
    parser.add_argument(
        "--every", type=int, default=1, help="play each such kill alone, from --first"
    )
    parser.add_argument("--seed", default=str(random.randrange(1 << 32)))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", choices=TIERED, default=TIERED, help="of tiers-kills")
    parser.add_argument("--plant", nargs="*", help="faults; all by default")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.server}", flush=True)
    torch.set_num_threads(1)  # threads do not survive a fork
    with tempfile.TemporaryDirectory(prefix="holdfast-stores-chaos-") as directory:
        work = Path(directory)
        forked_ranks.load_everything(work)
        import obstore.store  # noqa: F401  not by every rank anew

        source = work / "source"
        holdfast.save(make_state(STEPS_MAX), source, options=OPTIONS)
        os.environ["HOLDFAST_CHAOS_SOURCE"] = str(source)
        gc.freeze()
        field = Field(options.server, work)
        try:
            if options.plant is not None:
                from .chaos import plants

                return plants.check(field, options.plant, options.seed)
            return run(field, options)
        finally:
            field.close()


def run(field: Field, options: argparse.Namespace) -> int:
    """Play all parts; return the exit status."""
    in_all, started = Tally(), time.monotonic()
    for name in options.only:
        began, tally = time.monotonic(), Tally()
        PARTS[name](field, options, tally)
        print(f"{name}: {tally}; {time.monotonic() - began:.0f} s", flush=True)
        in_all.add(tally)
    print(f"in all: {in_all}; {time.monotonic() - started:.0f} s")
    print(*in_all.faults[:20], sep="\n")
    return 1 if in_all.faults else 0


def _add(tally: Tally, made: Tally, where: str) -> None:
    made.faults = [f"{fault} [{where}]" for fault in made.faults]
    for fault in made.faults:
        print(f"FAULT: {fault}", flush=True)
    tally.add(made)


def kills(field: Field, options: argparse.Namespace, tally: Tally) -> None:
    """Kill at every request of a save, a save that retires, and a replace, before and after it."""
    for name in ENUMERATED:
        _kill_at_each(name, field, options, tally)


def tiers_kills(field: Field, options: argparse.Namespace, tally: Tally) -> None:
    """Kill at every request of a job that has a local disk before the store."""
    for name in options.kinds:
        _kill_at_each(name, field, options, tally)


def _kill_at_each(name: str, field: Field, options: argparse.Namespace, tally: Tally) -> None:
    rng = random.Random(f"{options.seed} {name}")
    made, seen = play(field, SCENARIOS[name], None)
    _add(tally, made, f"{name}, unharmed")
    counts = {int(sender): count for sender, count in seen["counts"].items()}
    planned = [
        (Harm(action, sender, at), rng.choice(["self", "all"]))
        for sender, count in sorted(counts.items())
        for at in range(1, count + 1)
        for action in ("kill-before", "kill-after")
    ]
    done = Tally()
    for harm, victims in planned[options.first :: options.every]:
        made, _ = play(field, SCENARIOS[name], harm, victims)
        _add(done, made, f"{name}, {harm}, {victims}")
    print(f"  {name}: {counts} requests of the ranks; {done}", flush=True)
    tally.add(done)


def zombies(field: Field, options: argparse.Namespace, tally: Tally) -> None:
    """Stop a job at every request; the next one takes the run; the first one goes on."""
    for name in HELD:
        _, seen = play(field, replace(SCENARIOS[name], also=None), None)
        done, count = Tally(), seen["counts"].get("0", 0)
        rng = random.Random(f"{options.seed} {name}")
        for at in sorted(rng.sample(range(1, count + 1), min(count, max(4, options.rounds // 4)))):
            for action in HOLDS:
                harm = Harm(action, 0, at)
                made, _ = play(field, SCENARIOS[name], harm, "all")
                _add(done, made, f"{name}, {harm}")
        print(f"  {name}: {count} requests; {done}", flush=True)
        tally.add(done)


def _harm(kind: str, sender: int, at: int, rng: random.Random, seed: int) -> Harm:
    """Choose a harm of a kind; ``seed`` is for the one that hits one request in ten."""
    if kind == "tenth":
        actions = [*ONCE, "delay", "delay", "slow-down"]
        return Harm(times=FOREVER, chance=0.1, actions=actions, seed=seed)
    if kind == "refuse":
        return Harm(rng.choice(["expired", "quota"]), rng.choice([-1, sender]), at, FOREVER)
    of_kind = {"kill": KILLS, "hold": HOLDS}.get(kind, ONCE)
    times = rng.choice([2, 3, FOREVER]) if kind == "again" else 1
    return Harm(rng.choice(of_kind), sender, at, times)


def at_random(field: Field, options: argparse.Namespace, tally: Tally) -> None:
    """Harm one request, or all from one on, or one in ten, in a scenario at random."""
    for number in range(options.first, options.first + options.rounds):
        rng = random.Random(f"{options.seed} {number}")
        name = rng.choice(["save", "retire", "retire", "replace", "replace", "first", "copy"])
        stage = rng.choice(["sync", "eager"])
        victims, saves = "self", 0
        sender = 0 if name == "copy" else rng.choice([0, 0, 1])
        at = rng.randint(1, 60) if sender == 0 else rng.randint(1, 8)
        kind = rng.choice(["once", "once", "again", "kill", "kill", "tenth", "tenth", "refuse"])
        harm = _harm(kind, sender, at, rng, number)
        if kind == "kill" and name != "copy":
            victims = rng.choice(["self", "other", "0", "all"])
        elif kind == "tenth" and name != "copy":
            saves = 4
        made, _ = play(field, SCENARIOS[name], harm, victims, stage=stage, saves=saves)
        _add(tally, made, f"--first {number}: {name}, {stage}, {harm}, {victims}")
        if number % 25 == 24:
            print(f"  up to {number}: {tally}", flush=True)


def tiers_at_random(field: Field, options: argparse.Namespace, tally: Tally) -> None:
    """Harm a job that has a local disk before the store; sometimes a disk is gone then."""
    for number in range(options.first, options.first + options.rounds):
        rng = random.Random(f"{options.seed} tiers {number}")
        name = rng.choice(list(TIERED))
        stage = rng.choice(["sync", "eager", "lazy"])
        vanishes = rng.choice([-1, -1, -1, 0, 1])
        sender = rng.choice([0, 0, 1]) if SCENARIOS[name].work.has_own_disks else 0
        at, victims, saves = rng.randint(1, 120), rng.choice(["self", "other", "all"]), 0
        kind = rng.choice(["once", "again", "kill", "kill", "kill", "hold", "tenth", "refuse"])
        harm = _harm(kind, sender, at, rng, number)
        if kind == "hold":
            victims, vanishes = "all", -1
        elif kind == "tenth":
            saves = 4
        made, _ = play(
            field, SCENARIOS[name], harm, victims, stage=stage, saves=saves, vanishes=vanishes
        )
        _add(tally, made, f"--first {number}: {name}, {stage}, {harm}, {victims}, {vanishes}")
        if number % 25 == 24:
            print(f"  up to {number}: {tally}", flush=True)


def restarts(field: Field, options: argparse.Namespace, tally: Tally) -> None:
    """Restart the server in the middle of a save, by SIGTERM or SIGKILL, at random requests."""
    if field.kind != "seaweedfs":
        print("restarts: skipped, this server keeps nothing on disk", flush=True)
        return
    rng = random.Random(f"{options.seed} restarts")
    for number in range(max(2, options.rounds // 25)):
        name = rng.choice(["save", "retire", "replace"])
        harm = Harm(rng.choice(["hold-before", "hold-after"]), 0, rng.randint(1, 40))
        ending = rng.choice([signal.SIGTERM, signal.SIGKILL])
        middle = functools.partial(field.restart_server, ending)
        made, _ = play(field, SCENARIOS[name], harm, "none", in_the_middle=middle, saves=2)
        _add(tally, made, f"restart {number}: {name}, {harm}, {ending}")


def races(field: Field, options: argparse.Namespace, tally: Tally) -> None:
    """Let sixteen processes race."""
    for kind in KINDS:
        done, left = Tally(), max(1, options.rounds * 5 // len(KINDS))
        while left > 0:
            _add(done, race(field, kind, min(left, RACES_AT_ONCE)), f"race, {kind}")
            left -= RACES_AT_ONCE
        print(f"  {kind}: {done}", flush=True)
        tally.add(done)


PARTS: dict[str, Callable[[Field, argparse.Namespace, Tally], None]] = {
    "kills": kills,
    "zombies": zombies,
    "random": at_random,
    "restarts": restarts,
    "races": races,
    "tiers-kills": tiers_kills,
    "tiers-random": tiers_at_random,
}


if __name__ == "__main__":
    sys.exit(main())
