"""Trains and saves in a process to which things happen; then judges all that it left.

    python tests/process/campaign.py --episodes 10000 --seed 1
    python tests/process/campaign.py --seed 4711                   # one again, with its script
    python tests/process/campaign.py --plant                       # are planted faults noticed?

Each episode is a process of its own, forked from one that has imported all and has no threads. It
saves in one of the ways there are, while it is interrupted, forks, loads data, saves in several
threads and in signal handlers, runs in torch's modes, with little memory and few descriptors, and
ends in every way that Python has.
"""

import argparse
import collections
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a run as a program

import torch

from process import events, exits, oracle, plants, training
from process.dumps import DUMP, DUMP_S, frames
from process.episode import Episode

MEMORY = Path("/dev/shm")
PATIENCE_S = 45.0  # an episode that lasts so long hangs
WHOLE_ENDS = 0.2  # the others leave out what takes longest: that torch is torn down
PLANT_EPISODES = 300  # a planted fault has to show by then


def _play(seed: int, place: Path, writing: int, only: Collection[str]) -> None:
    """Be the process of an episode; what this raises ends it."""
    errors = os.open(place / ".stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.close(errors)
    trace = (place / ".trace").open("w")
    faulthandler.register(DUMP, file=trace)
    gc.freeze()
    gc.enable()
    os.chdir(place)
    episode = Episode(seed, place, writing, only)
    try:
        ending = training.play(episode)
    except Exception as error:
        episode.say(broken=exits.told(error))
        raise
    if episode.has(0.5, [exits.FLIGHT]):
        exits.fly(episode)
    os.chdir("/")
    is_whole = episode.has(WHOLE_ENDS, [exits.WHOLE])
    episode.say(at=time.monotonic())
    ending.begin(episode)
    if not is_whole:
        exits.end_soon(ending.status)


def _watch(process: int, reading: int) -> tuple[bytes, int, float]:
    """Return what a process tells until it has ended, its status, and how long it had no core."""
    told, end = b"", time.monotonic() + PATIENCE_S
    while True:
        ready = select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]
        if not ready:
            os.kill(process, DUMP)
            time.sleep(DUMP_S)
            os.kill(process, signal.SIGKILL)
            break
        part = os.read(reading, 1 << 16)
        if not part:
            break
        told += part
    os.close(reading)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    stood_by_s = int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    return told, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), stood_by_s


def episode_of(seed: int, work: Path, only: Collection[str]) -> oracle.Played | None:
    """Play and judge one; return None in its own process, which then ends as the episode says."""
    place = work / f"episode-{seed}"
    place.mkdir()
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _play(seed, place, writing, only)
        return None
    os.close(writing)
    told, status, stood_by_s = _watch(process, reading)
    said = oracle.parse(told)
    ended = time.monotonic() - max([line["at"] for line in said if "at" in line], default=0.0)
    ended -= stood_by_s  # that is no fault of its own
    hung = frames((place / ".trace").read_text())
    errors = (place / ".stderr").read_text(errors="replace")
    for name in (".trace", ".stderr", ".child"):
        (place / name).unlink(missing_ok=True)
    played = oracle.Played(said, status, ended, hung, errors)
    played.faults += oracle.judge_process(played)
    played.faults += _judge_apart(place, played)
    shutil.rmtree(place)
    return played


def _judge_apart(place: Path, played: oracle.Played) -> list[str]:
    """Judge the disk in a process of its own."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            found = list(oracle.judge_disk(place, played))
        except BaseException as error:
            found = [f"the judge broke: {exits.told(error)}"]
        with os.fdopen(writing, "w") as out:
            json.dump(found, out)
        os._exit(0)
    os.close(writing)
    told, status, _ = _watch(process, reading)
    return list(json.loads(told)) if status == 0 else [f"the judge ended with {status}"]


def _preload(work: Path) -> None:
    """Import what an episode imports, which a process of its own finds out: it starts threads."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        place = work / "preload"
        place.mkdir()
        before = set(sys.modules)
        episode = Episode(0, place, os.open(os.devnull, os.O_WRONLY))
        episode.warm()
        events.EVENTS["loader"](episode)
        with os.fdopen(writing, "w") as out:
            json.dump(sorted(set(sys.modules) - before), out)
        os._exit(0)
    os.close(writing)
    for name in json.loads(_watch(process, reading)[0]):
        with contextlib.suppress(Exception):  # an optional part of another's
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1


def _lane(seeds: range, work: Path, plant: str | None, only: Collection[str], writing: int) -> bool:
    """Play some episodes, and tell of each; return False in the process of an episode."""
    gc.collect()
    gc.freeze()  # what all share is not copied by the collector of each
    gc.disable()
    if plant is not None:
        plants.plant(plant)
    for seed in seeds:
        played = episode_of(seed, work, only)
        if played is None:
            return False
        counts = collections.Counter(_counted(played))
        line = {"seed": seed, "faults": played.faults, "script": played.script(), "counts": counts}
        os.write(writing, json.dumps(line).encode() + b"\n")
    return True


def _counted(played: oracle.Played) -> list[str]:
    found = ["episodes"] + ["ended by the C library for want of memory"] * played.lacked_memory
    for line in played.said:
        found += ["acknowledged saves"] * ("ack" in line)
        found += ["saves"] * ("begin" in line)
        found += [f"event: {line[name]}" for name in ("event", "ending") if name in line]
        for name in ("within", "load_within"):
            found += [f"within: {each}" for each in line.get(name, "").split(" + ") if each]
    return found


class Total:
    """What all lanes have told."""

    def __init__(self, *, shows_all: bool, only: str = "") -> None:
        """``only``: a regular expression, of the faults that count."""
        self._only = re.compile(only)
        self.counts: collections.Counter[str] = collections.Counter()
        self.failing: dict[int, list[str]] = {}
        self._shows_all = shows_all

    def add(self, line: dict[str, object]) -> None:
        """Take what a lane tells of one episode; print it when it failed."""
        told = line["faults"]
        assert isinstance(told, list)
        seed, faults = int(str(line["seed"])), [one for one in told if self._only.search(one)]
        self.counts.update(line["counts"])  # type: ignore[arg-type]
        if faults:
            self.failing[seed] = faults
        if faults or self._shows_all:
            print(f"seed {seed}: {line['script']}")
            print(*(f"  {fault[:600]}" for fault in faults), sep="\n", flush=True)


def run(
    seeds: range, lanes: int, work: Path, plant: str | None, only: Collection[str]
) -> Total | None:
    """Play all; return what was seen, or None in the process of an episode.

    Args:
        plant: this one, until it is noticed.
        only: what has to happen, in place of what the plant is noticed by.
    """
    planted = plants.PLANTS[plant] if plant else None
    total = Total(shows_all=len(seeds) == 1, only=planted.shows if planted else "")
    only = only or (planted.only if planted else ())
    readings: dict[int, int] = {}
    for lane in range(min(lanes, len(seeds))):
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            os.setpgid(0, 0)  # its episodes end with it
            if _lane(seeds[lane::lanes], work, plant, only, writing):
                os._exit(0)
            return None
        os.close(writing)
        readings[reading] = process
    parts = dict.fromkeys(readings, b"")
    while readings:
        for reading in select.select(list(readings), [], [])[0]:
            part = os.read(reading, 1 << 16)
            *lines, parts[reading] = (parts[reading] + part).split(b"\n")
            for line in lines:
                total.add(json.loads(line))
            if not part or (planted and total.failing):
                if part:
                    os.killpg(readings[reading], signal.SIGKILL)
                os.waitpid(readings.pop(reading), 0)
                os.close(reading)
    return total


def _plants(names: list[str], options: argparse.Namespace, work: Path) -> int | None:
    missed = 0
    for name in names:
        seeds = range(options.seed, options.seed + PLANT_EPISODES)
        place = work / f"plant-{names.index(name)}"
        place.mkdir()
        total = run(seeds, 1, place, name, options.only)
        if total is None:
            return None
        for seed, faults in total.failing.items():
            print(f"{name}: noticed after {seed - options.seed + 1} episodes, {faults[0][:200]}")
        if not total.failing:
            print(f"{name}: NOT NOTICED")
        missed += not total.failing
    print(f"{len(names) - missed} of {len(names)} planted faults noticed", flush=True)
    return int(missed > 0)


def main() -> int | None:
    """Play as asked; None in the process of an episode, which ends by itself."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, help="default: 1000; with a seed, that one alone")
    parser.add_argument("--seed", type=int, help="of the first episode; default: 1")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--plant", nargs="*", choices=plants.PLANTS, help="all by default")
    parser.add_argument("--only", nargs="*", default=[], choices=plants.NAMES, metavar="NAME")
    parser.add_argument("--root", type=Path, help="a directory; default: in memory")
    options = parser.parse_args()
    options.episodes = options.episodes or (1 if options.seed is not None else 1000)
    options.seed = 1 if options.seed is None else options.seed
    root = options.root or (MEMORY if MEMORY.is_dir() else None)
    work = Path(tempfile.mkdtemp(dir=root, prefix="holdfast-process-"))  # its end is not a child's
    torch.set_num_threads(1)  # threads do not survive a fork
    try:
        _preload(work)
        if options.plant is not None:
            return _plants(options.plant or list(plants.PLANTS), options, work)
        return _campaign(options, work)
    finally:
        if os.getpid() == plants.PARENT:
            shutil.rmtree(work, ignore_errors=True)


def _campaign(options: argparse.Namespace, work: Path) -> int | None:
    started = time.monotonic()
    seeds = range(options.seed, options.seed + options.episodes)
    total = run(seeds, options.processes, work, None, options.only)
    if total is None:
        return None
    print(*(f"{count:8} {what}" for what, count in sorted(total.counts.items())), sep="\n")
    print(
        f"{options.episodes} episodes from seed {options.seed} in "
        f"{time.monotonic() - started:.0f} s: {total.counts['acknowledged saves']} acknowledged "
        f"saves, {len(total.failing)} episodes with faults",
        flush=True,
    )
    return int(bool(total.failing))


if __name__ == "__main__":
    sys.exit(main())
