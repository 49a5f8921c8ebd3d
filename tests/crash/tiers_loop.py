"""Ranks that save to local disks before a store are killed at random, and hosts vanish.

Each round forks the ranks, each on a host with a disk of its own (a mount namespace), which restore
the run and save step after step. Then all of them, or one, are killed: at a random moment, at the
n-th call to the operating system, or while uploads go on. Sometimes a host's disk is gone then.
What each tier has acknowledged must be restored in the next round, bit for bit, or a later step of
the same line: a state says which rounds have trained on it.

    python tests/crash/tiers_loop.py --kills 1000 --seed 1
    python tests/crash/tiers_loop.py --plant    # each planted fault has to be noticed

It needs root: it mounts directories, for its own processes alone.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import forked_ranks
import torch
import torch.distributed as dist
from crash_content import WrongContentError, digest, load_number, make_state
from disk_probe import DiskProbe
from forked_ranks import (
    PEER_EXIT,
    TELL_S,
    await_death,
    fork,
    join,
    load_everything,
    read_until,
    reap,
    strike,
)

import holdfast
from holdfast import Keep
from holdfast.errors import HoldfastError, PeerError
from holdfast.runs.directory import Run
from holdfast.runs.host_uploads import OtherHosts
from holdfast.runs.tier_steps import TierSteps
from holdfast.runs.tiers import TieredRun
from holdfast.testing import Fault, faulty

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a run as a program
from namespaces import own_disk

HOSTS = 2
MODES = ("group", "rank", "call")
SAVES_MAX, WINDOW_S, CALLS_MAX = 3, 0.15, 300
DEADLINE_S, BEGUN_S, GONE_S, GROUP_TIMEOUT_S = 20.0, 90.0, 60.0, 20.0
LATE_EXIT, LATE = 5, "in the time that the save has"  # a save has met its deadline
HUNG_S = 5.0  # of one sync: then saves may be late (one of 19 s was seen here)
VANISH = 0.1  # of the rounds
RATES = (None, None, 30_000.0)  # bytes a second: a step has 26 KB
NOTE_EVERY = 200
LINE_MAX = 50  # rounds that a state remembers


def _nothing(*given: object) -> None:
    pass


_judged = Run._judged


def _newest_goes(run: Run, spare: Collection[int]) -> tuple[list[int], set[int]]:
    """Judge as `Run._judged` does, but let go of the newest step of the local disk."""
    doomed, others = _judged(run, spare)
    return (run.steps()[-1:] if Path(run.root).name == "local" else doomed), others


# What is put in place of what, in the ranks.
PLANTS: dict[str, tuple[object, str, object]] = {
    "a save is told before the store has it": (TieredRun, "wait", _nothing),
    "MANIFEST does not wait for other hosts": (OtherHosts, "wait", _nothing),
    "steps of another past count": (TierSteps, "_left_behind", lambda *given: set()),
    "steps of another past stay": (TieredRun, "_drop_past", _nothing),
    "the newest local step goes": (Run, "_judged", _newest_goes),
    "other hosts keep nothing": (
        TieredRun,
        "_tell_ranks",
        lambda run: b'{"0": ""}',
    ),
    "what is incomplete is restored": (TierSteps, "lacks", lambda *given: ""),
}


@dataclass(frozen=True, slots=True)
class Round:
    """Who runs where, and what happens to them."""

    hosts: tuple[int, ...]  # of each rank
    durable: str
    rate: float | None
    mode: str
    victim: int
    saves: int
    delay_s: float
    call: int
    before: bool
    vanishes: int | None  # a host, after the kill

    @staticmethod
    def choose(rng: random.Random) -> "Round":
        """Choose at random; every host has a rank."""
        one_disk = rng.random() < 0.25
        hosts = [0] * rng.randint(1, 2) if one_disk else [*range(HOSTS), rng.randrange(HOSTS)]
        if not one_disk:
            hosts = hosts[: rng.randint(HOSTS, HOSTS + 1)]
            rng.shuffle(hosts)
        return Round(
            tuple(hosts),
            rng.choice(("store", "local")),
            rng.choice(RATES),
            rng.choice(MODES),
            rng.randrange(len(hosts)),
            rng.randint(0, SAVES_MAX),
            rng.uniform(0, WINDOW_S),
            rng.randint(1, CALLS_MAX),
            rng.random() < 0.5,
            rng.randrange(HOSTS) if rng.random() < VANISH else None,
        )

    def fault(self, rank: int) -> Fault:
        """What is wrong with the disks of a rank: nothing, or that they kill."""
        nth = self.call if self.mode == "call" and rank == self.victim else 0
        return Fault("*", nth, action="kill" if self.before else "kill_after", argument=0)


@dataclass(slots=True)
class Tally:
    """What was seen; anything in ``faults`` is a broken promise."""

    ways: Counter[str] = field(default_factory=Counter)
    acknowledged: Counter[str] = field(default_factory=Counter)
    vanished: int = 0
    hung: int = 0  # rounds with a late save, while the disk hung
    restored: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        ways = ", ".join(f"{number} {way}" for way, number in sorted(self.ways.items()))
        told = ", ".join(f"{number} of the {t}" for t, number in sorted(self.acknowledged.items()))
        where = ", ".join(f"{number} {way}" for way, number in sorted(self.restored.items()))
        return (
            f"{sum(self.ways.values())} kills ({ways}); {self.vanished} hosts vanished; "
            f"{self.hung} late saves while the disk hung; "
            f"acknowledged: {told}; restored: {where}; {len(self.faults)} faults"
        )


@dataclass(slots=True)
class Promised:
    """The newest step that each tier has to give back, and the round that saved it."""

    store: tuple[int, int] = (0, 0)
    local: tuple[int, int] = (0, 0)  # by the disks of all hosts; none after one has vanished


def run(root: Path, kills: int, seed: int, plant: str = "") -> Tally:
    """Kill so often; stop at the first broken promise."""
    if plant:
        setattr(*PLANTS[plant])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    load_everything(root)
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gc.freeze()
    rng, tally, promised, probe = random.Random(seed), Tally(), Promised(), DiskProbe(root)
    for number in range(kills):
        chosen, hung = Round.choose(rng), tally.hung
        _play(root, number, meeting.port, chosen, tally, promised, probe)
        _check_store(root, promised, tally)
        if chosen.vanishes is not None:
            shutil.rmtree(root / f"host{chosen.vanishes}", ignore_errors=True)
            tally.vanished += 1
            promised.local = (0, 0)
        tally.ways[chosen.mode] += tally.hung == hung
        if (number + 1) % NOTE_EVERY == 0:
            print(tally, flush=True)
        if tally.faults:
            tally.faults.append(f"this was seed {seed}, round {number}, {chosen}")
            break
    probe.close()
    if not tally.faults:
        _finish(root, kills, meeting.port, promised, tally)
    return tally


def _play(
    root: Path,
    number: int,
    port: int,
    chosen: Round,
    tally: Tally,
    promised: Promised,
    probe: DiskProbe,
) -> None:
    """Fork the ranks, kill, wait for all to be gone; compare what they say with the promises."""
    reading, writing = os.pipe()
    waiting, opening = os.pipe()
    world_size = len(chosen.hosts)

    def rank_main(rank: int) -> None:
        os.close(reading)
        os.close(opening)
        os.read(waiting, 1)
        own_disk(root / "local", root / f"host{chosen.hosts[rank]}")
        if world_size > 1:
            join(f"round-{number}", port, rank, world_size, GROUP_TIMEOUT_S)
        _work(root, rank, writing, chosen, number)

    probe.reset()
    children = {rank: fork(rank_main, rank) for rank in range(world_size)}
    for descriptor in (writing, waiting, opening):
        os.close(descriptor)
    lines = 1 + (chosen.saves if chosen.mode != "call" else 0)
    text = read_until(reading, lambda text: text.count("\n") >= lines, BEGUN_S)
    victims = set(range(world_size)) if chosen.mode == "group" else {chosen.victim}
    if chosen.mode != "call":
        time.sleep(chosen.delay_s)
        strike(children, victims, signal.SIGKILL)
    await_death(children[chosen.victim], BEGUN_S)
    strike(children, children, signal.SIGKILL)  # what survivors do is another campaign's
    ended, _ = reap(children, GONE_S)
    for rank, status in ended.items():
        if status == LATE_EXIT and probe.longest_s() > HUNG_S:
            tally.hung += 1
        elif status not in (-signal.SIGKILL, PEER_EXIT):
            tally.faults.append(f"rank {rank} ended with {status}")
    text += read_until(reading, lambda _: False, BEGUN_S)
    os.close(reading)
    _judge(text, number, tally, promised, spread=len(set(chosen.hosts)) > 1)


def _judge(text: str, number: int, tally: Tally, promised: Promised, *, spread: bool) -> None:
    """Compare what the coordinator said with what was promised."""
    for line in text.splitlines():
        kind, step, rest = line.split(maxsplit=2)
        if kind == "ready":
            where, line = rest.split(maxsplit=1)
            tally.restored[where] += 1
            for owed, by in (promised.store, promised.local if spread else (0, 0)):
                if owed and _saver(json.loads(line), owed) != by:
                    tally.faults.append(
                        f"step {step} of rounds {line} was restored; step {owed} of round {by} "
                        "was acknowledged"
                    )
            if int(step) < promised.store[0]:
                tally.faults.append(f"step {step} was restored; {promised.store} was acknowledged")
            if not spread:  # a host was left out: its disk has no part in what comes next
                promised.local = (0, 0)
        else:
            tally.acknowledged[kind] += 1
            if kind == "store":
                promised.store = (int(step), number)
            if spread:
                promised.local = (int(step), number)
            if rest != digest(make_state(int(step))):
                tally.faults.append(f"step {step} was saved with other content")


def _saver(line: list[list[int]], step: int) -> int:
    """Return the round that has saved a step, on a line of rounds and their first steps."""
    return max((number for number, first in line if first <= step), default=-1)


def _work(root: Path, rank: int, writing: int, chosen: Round, number: int) -> None:
    """Restore, then save for ever; the coordinator tells of each step that is durable."""
    state = make_state(-1) | {"line": []}
    with faulty(chosen.fault(rank)):
        checkpointer = holdfast.Checkpointer(
            root / "store",
            local=root / "local",
            durable=chosen.durable,
            upload_bytes_s=chosen.rate,
            keep=Keep.latest(2) | Keep.local(1),
            signals=(),
            deadline_s=DEADLINE_S,
            options=forked_ranks.OPTIONS,
        )
        start = checkpointer.restore(state) or 0
        line = state.pop("line")
        if start and digest(state) != digest(make_state(start)):
            raise WrongContentError(f"step {start} was restored with other content")
        report = checkpointer.report
        where = "nowhere" if report is None else Path(report.path).parent.name
        if rank == 0:
            os.write(writing, f"ready {start} {where} {json.dumps(line)}\n".encode())
        line = [*line[-LINE_MAX:], [number, start + 1]]
        for step in count(start + 1):
            state = make_state(step)
            try:
                checkpointer.save(step, state | {"line": line})
            except PeerError:
                raise
            except HoldfastError as error:
                _tell_where(root, error)
                if LATE in str(error):
                    os._exit(LATE_EXIT)
                raise
            if rank == 0:
                os.write(writing, f"{chosen.durable} {step} {digest(state)}\n".encode())


def _tell_where(root: Path, error: HoldfastError) -> None:
    """Have all ranks say where each of their threads is, and show what hosts ask of each other."""
    names = sorted(path.name for path in (root / "store").iterdir())
    print(f"{error}; the store has {names}", file=sys.stderr, flush=True)
    for name in names:
        if name.startswith(".uploading"):
            with contextlib.suppress(OSError):
                path = root / "store" / name
                seconds = time.time() - path.stat().st_mtime
                print(name, f"{seconds:.1f} s old", path.read_bytes()[:300], file=sys.stderr)
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            above = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(above) == os.getppid():
                os.kill(int(process.name), signal.SIGUSR1)
    time.sleep(2 * TELL_S)


def _check_store(root: Path, promised: Promised, tally: Tally) -> None:
    """Load every step that the store shows; the newest acknowledged one, or newer, is there."""
    checkpointer = holdfast.Checkpointer(root / "store", options=forked_ranks.OPTIONS)
    steps = checkpointer.steps()
    for step in steps:
        try:
            if load_number(Path(checkpointer.path(step)), strict=False) != step:
                tally.faults.append(f"step {step} of the store holds another step")
        except (HoldfastError, WrongContentError) as error:
            tally.faults.append(f"step {step} of the store is visible, but: {error}")
    if promised.store[0] > max(steps, default=0):
        tally.faults.append(f"the store acknowledged {promised.store}, and has {steps}")


def _finish(root: Path, number: int, port: int, promised: Promised, tally: Tally) -> None:
    """Let a last job end well: then nothing half-uploaded is left."""
    reading, writing = os.pipe()

    def last(rank: int) -> None:
        own_disk(root / "local", root / f"host{rank}")
        join("last", port, rank, HOSTS, GROUP_TIMEOUT_S)
        with holdfast.Checkpointer(
            root / "store",
            local=root / "local",
            keep=Keep.latest(2) | Keep.local(1),
            signals=(),
            options=forked_ranks.OPTIONS,
        ) as checkpointer:
            state = make_state(-1) | {"line": []}
            start = checkpointer.restore(state) or 0
            for step in (start + 1, start + 2):
                checkpointer.save(step, make_state(step) | {"line": state["line"]})
        os.write(writing, b"done\n")

    ended, _ = reap({rank: fork(last, rank) for rank in range(HOSTS)}, BEGUN_S)
    os.close(reading)
    os.close(writing)
    if set(ended.values()) != {0}:
        tally.faults.append(f"the last job ended with {ended}")
    left = [p.name for p in (root / "store").glob("step-*") if not (p / "MANIFEST").exists()]
    steps = holdfast.Checkpointer(root / "store").steps()
    if left or len(steps) != 2:
        tally.faults.append(f"the store has {steps}, and of {left} a part")
    local = {h: sorted(p.name for p in (root / f"host{h}").glob("step-*")) for h in range(HOSTS)}
    if any(len(names) > 3 for names in local.values()):
        tally.faults.append(f"local disks keep {local}")


def _notice(kills: int, seed: int) -> int:
    """Plant each fault in a process of its own; exit 0 when all are noticed."""
    missed = 0
    for plant in PLANTS:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what ranks say of the fault
            with tempfile.TemporaryDirectory(prefix="holdfast-tiers-") as root:
                tally = run(Path(root), kills, seed, plant)
                first = tally.faults[0][:100] if tally.faults else "MISSED"
                print(f"{plant}: {first}, after {sum(tally.ways.values())} kills", flush=True)
            os._exit(0 if tally.faults else 1)
        missed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    return 1 if missed else 0


def main() -> int:
    """Kill as often as asked; exit 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--root", type=Path, help="an empty directory; default: a temporary one")
    parser.add_argument("--plant", action="store_true", help="plant faults, one after the other")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    if arguments.plant:
        return _notice(arguments.kills, arguments.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.root, prefix="holdfast-tiers-") as root:
        tally = run(Path(root), arguments.kills, arguments.seed)
    rate = sum(tally.ways.values()) / (time.monotonic() - started)
    print(f"{tally}; {rate:.1f} kills/s", *tally.faults, sep="\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
