"""Ranks that save again and again are killed at random; what they acknowledged must be there.

Each round forks the ranks (gloo over loopback), which restore the run and save step after step:
raw, without loss or as links of a chain, at once or in the background. Then all of them, or one,
are killed: at a random moment, or at the n-th call to the operating system; after one, the others
are killed a little later too, or have to raise. What is left is opened again and compared, bit by
bit, with what was saved.

    python tests/crash/kill_loop.py --kills 1000 --ranks 4 --seed 1
    python tests/crash/kill_loop.py --kills 10000 --replace    # one checkpoint, again and again
"""

import argparse
import contextlib
import dataclasses
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import forked_ranks
import torch
import torch.distributed as dist
from crash_content import WrongContentError, digest, load_number, make_state
from forked_ranks import (
    PEER_EXIT,
    await_death,
    fork,
    join,
    load_everything,
    read_until,
    reap,
    strike,
)

import holdfast
from holdfast.engine.retire import sweep
from holdfast.errors import HoldfastError, NotCommittedError
from holdfast.group.torch import ANSWER_S
from holdfast.saving.handle import OUTCOME_GRACE_S
from holdfast.stores.local import LocalStore
from holdfast.testing import Fault, faulty

OPTIONS = dataclasses.replace(forked_ranks.OPTIONS, pool_bytes=5 << 20)  # two states, copied

MODES = ("group", "rank", "call")  # all ranks, or one, at a random moment; or one at its n-th call
HOW = ("sync", "eager", "lazy")  # as Checkpointer's stage: two of three in the background
CODECS = {"raw": "raw", "lossless": "lossless", "delta": holdfast.codecs.Delta(every=4)}
KEEP = 2
SAVES_MAX, WINDOW_S = 3, 0.08  # so many saves are made before, and so long a part of another
CALLS_MAX = 120  # of one rank in a few saves
SAVE_DEADLINE_S = 5.0  # in the background: survivors know no sooner
REST_S = 0.3  # the survivors of most such saves are killed within so long, for want of time
# A survivor learns of the struck save by its deadline, and ends with the next, which asks the
# ranks' store, and asks again over a new connection, before it meets the others.
GONE_S = SAVE_DEADLINE_S + OUTCOME_GRACE_S + 1 + 2 * ANSWER_S
# In the foreground, by the timeout of the process group: once in some thousand times gloo does not
# notice that a rank is gone while it gathers.
GROUP_TIMEOUT_S = 20.0
assert GROUP_TIMEOUT_S < GONE_S
BEGUN_S = 60.0  # until all ranks have restored and saved as often as is asked
NOTE_EVERY = 500  # rounds, where there is no terminal


@dataclass(frozen=True, slots=True)
class Kill:
    """One round: who dies, and when."""

    mode: str
    victim: int
    saves: int
    delay_s: float
    call: int
    before: bool
    how: str
    codec: str
    rest_s: float | None  # when the survivors are killed too

    @staticmethod
    def choose(rng: random.Random, world_size: int) -> "Kill":
        """Choose at random."""
        mode, how = rng.choice(MODES), rng.choice(HOW)
        spared = mode == "group" or how == "sync" or rng.random() < 0.1
        return Kill(
            mode,
            rng.randrange(world_size),
            rng.randint(0, SAVES_MAX),
            rng.uniform(0, WINDOW_S),
            rng.randint(1, CALLS_MAX),
            rng.random() < 0.5,
            how,
            rng.choice(list(CODECS)),
            None if spared else rng.uniform(0, REST_S),
        )

    def fault(self, rank: int) -> Fault:
        """What is wrong with the disk of a rank: nothing, or that it kills."""
        nth = self.call if self.mode == "call" and rank == self.victim else 0
        return Fault("*", nth, action="kill" if self.before else "kill_after", argument=0)


@dataclass(slots=True)
class Tally:
    """What was seen; anything in ``faults`` is a broken promise."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    ways: Counter[str] = field(default_factory=Counter)  # the same, by how and in what was saved
    processes: int = 0  # that were killed
    acknowledged: int = 0
    unacknowledged: int = 0  # committed, but killed before it could say so
    inside: int = 0  # rounds that ended inside a save or a removal
    dead: set[Path] = field(default_factory=set)  # what such rounds left, until it is removed
    peer_errors: int = 0
    longest_wait_s: float = 0.0  # until a survivor had raised and was gone
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{number} of a {mode}" for mode, number in self.kills.items())
        ways = ", ".join(f"{number} {way}" for way, number in sorted(self.ways.items()))
        return (
            f"{sum(self.kills.values())} kills ({kills}; {ways}), of {self.processes} processes; "
            f"{self.acknowledged} acknowledged saves, "
            f"{self.unacknowledged} committed unacknowledged, {self.inside} rounds ended "
            f"inside a save or removal; {self.peer_errors} survivors raised PeerError, the last "
            f"after {self.longest_wait_s:.2f} s; {len(self.faults)} faults"
        )


def run(root: Path, kills: int, seed: int, world_size: int = 2, *, replace: bool = False) -> Tally:
    """Kill ``kills`` times in the run at ``root``; stop at the first broken promise.

    Args:
        replace: save one checkpoint again and again, in its own place, and no run.
    """
    work, check = (_replace_for_ever, _check_one) if replace else (_save_for_ever, _check_run)
    torch.set_num_threads(1)  # threads do not survive a fork
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    load_everything(root, CODECS.values())
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gc.freeze()  # what every rank shares is not copied by its collector
    rng, tally, newest, seen = random.Random(seed), Tally(), 0, 0
    for number in range(kills):
        kill = Kill.choose(rng, world_size)
        where = f"seed {seed}, round {number}, {kill}"
        faults_before = len(tally.faults)
        lines = _round(root, number, meeting.port, kill, world_size, tally, work)
        newest = max([newest, *(step for _, step, _ in lines)])
        _check_acknowledged(lines, tally)
        seen = check(root, newest, seen, tally)
        tally.kills[kill.mode] += 1
        tally.ways[f"{kill.codec} {kill.how}"] += 1
        if (number + 1) % NOTE_EVERY == 0 and not sys.stdout.isatty():
            print(tally, flush=True)
        if sys.stdout.isatty():
            print(f"\r{number + 1} of {kills}", end="\n" if number + 1 == kills else "", flush=True)
        if tally.faults[faults_before:]:
            tally.faults.append(f"this was {where}")
            break
    return tally


def _checkpointer(root: Path, codec: str, how: str) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(
        root,
        every=1,
        keep=holdfast.Keep.latest(KEEP),
        codec=CODECS[codec],
        stage=how,
        signals=(),
        deadline_s=SAVE_DEADLINE_S,
        options=OPTIONS,
    )


def _round(
    root: Path,
    number: int,
    port: int,
    kill: Kill,
    world_size: int,
    tally: Tally,
    work: Callable[[Path, int, int, Kill], None],
) -> list[tuple[int, int, str]]:
    """Fork the ranks, kill, wait for all to be gone; return what they acknowledged."""
    reading, writing = os.pipe()
    waiting, opening = os.pipe()

    def rank_main(rank: int) -> None:
        os.close(reading)
        os.close(opening)
        os.read(waiting, 1)  # ends when all are forked: see below
        join(f"round-{number}", port, rank, world_size, GROUP_TIMEOUT_S)
        work(root / "run", rank, writing, kill)

    children = {rank: fork(rank_main, rank) for rank in range(world_size)}
    # No rank may call the parent's store while another is forked: that would have the locks of the
    # store's thread, and nobody to open them.
    for descriptor in (writing, waiting, opening):
        os.close(descriptor)
    lines = (1 + (kill.saves if kill.mode != "call" else 0)) * world_size
    text = read_until(reading, lambda text: text.count("\n") >= lines, BEGUN_S)
    victims = set(range(world_size)) if kill.mode == "group" else {kill.victim}
    if kill.mode != "call":
        time.sleep(kill.delay_s)
        strike(children, victims, signal.SIGKILL)
    await_death(children[kill.victim], BEGUN_S)  # it may have a long way to its n-th call
    killed = time.monotonic()
    if kill.rest_s is not None:
        time.sleep(kill.rest_s)
        strike(children, children, signal.SIGKILL)
    ended, late = reap(children, GONE_S)
    tally.faults += [f"rank {rank} still ran after {GONE_S:.0f} s" for rank in late]
    for rank, status in ended.items():
        may_end_by = {-signal.SIGKILL} if rank in victims else {PEER_EXIT}
        if kill.rest_s is not None:
            may_end_by = {-signal.SIGKILL, PEER_EXIT}
        if status not in may_end_by:
            tally.faults.append(f"rank {rank} ended with {status}, expected one of {may_end_by}")
        tally.peer_errors += status == PEER_EXIT
        tally.processes += status == -signal.SIGKILL
    if kill.mode != "group" and kill.rest_s is None:
        tally.longest_wait_s = max(tally.longest_wait_s, time.monotonic() - killed)
    text += read_until(reading, lambda _: False, BEGUN_S)
    os.close(reading)
    found = [line.split() for line in text.splitlines() if "ready" not in line]
    return [(int(rank), int(step), content) for rank, step, content in found]


def _save_for_ever(root: Path, rank: int, writing: int, kill: Kill) -> None:
    """Restore, then save; say so of each save that is durable, in one line that a pipe takes whole.

    One in the background is, when the next one begins.
    """
    state = make_state(-1)
    with faulty(kill.fault(rank)):
        checkpointer = _checkpointer(root, kill.codec, kill.how)
        start = checkpointer.restore(state) or 0
        os.write(writing, b"ready\n")
        before = ""
        for step in count(start + 1):
            state = make_state(step)
            checkpointer.step(step, state)
            line = f"{rank} {step} {digest(state)}\n"
            os.write(writing, (line if kill.how == "sync" else before).encode())
            before = line


def _replace_for_ever(root: Path, rank: int, writing: int, kill: Kill) -> None:
    """Load, then save in its place, and say of each save that is durable, as `_save_for_ever`."""
    state = make_state(-1)
    how = dataclasses.replace(OPTIONS, deadline_s=SAVE_DEADLINE_S)
    options: dict[str, Any] = {"codec": CODECS[kill.codec], "options": how, "replace": True}
    with faulty(kill.fault(rank)):
        with contextlib.suppress(NotCommittedError):
            holdfast.load(root, into=state, options=OPTIONS)
        os.write(writing, b"ready\n")
        before, handle = "", None
        for step in count(max(0, state["loop"]["number"]) + 1):
            state = make_state(step)
            line = f"{rank} {step} {digest(state)}\n"
            if kill.how == "sync":
                holdfast.save(state, root, step=step, **options)
                os.write(writing, line.encode())
                continue
            handle = holdfast.save_async(state, root, step=step, stage=kill.how, **options)
            os.write(writing, before.encode())  # the one before has ended well
            before = line
            if step % 2:
                handle.result()


def _check_one(root: Path, newest: int, seen: int, tally: Tally) -> int:
    """Load the checkpoint: the newest that was acknowledged, or a later one; sweep, load again.

    Returns:
        The number that it holds; ``seen`` is that of the round before.
    """
    place, found = root / "run", 0
    tally.inside += len(list(place.glob("data/*"))) > 1
    for sweeping in (False, True):
        if sweeping and place.exists():
            sweep(LocalStore(place), float("inf"))  # as if what died were old
        try:
            found = load_number(place)
        except NotCommittedError:
            found = 0
        except (HoldfastError, WrongContentError) as error:
            tally.faults.append(f"it is visible, but: {error} (swept: {sweeping})")
        if found < max(newest, seen):
            tally.faults.append(f"{newest} was acknowledged, {seen} seen; there is {found}")
    left = {path.name for path in place.iterdir()} if found else set()
    if found and (left != {"MANIFEST", "data"} or len(list(place.glob("data/*"))) != 1):
        tally.faults.append(f"after a sweep there are {sorted(left)}")
    tally.unacknowledged += found > max(newest, seen)
    return found


def _check_acknowledged(lines: list[tuple[int, int, str]], tally: Tally) -> None:
    for _, step, content in lines:
        if content != digest(make_state(step)):
            tally.faults.append(f"step {step} was saved with other content, {content}")
    tally.acknowledged += len({step for _, step, _ in lines})


def _check_run(root: Path, newest: int, seen: int, tally: Tally) -> int:
    """Load every step that is visible; the newest acknowledged one must be among them.

    Or as many newer ones as are kept: a save in the background is acknowledged late.

    Returns:
        The newest step there is; ``seen`` is that of the round before.
    """
    checkpointer = holdfast.Checkpointer(root / "run", options=OPTIONS)
    steps = checkpointer.steps()
    for step in steps:
        try:
            if load_number(Path(checkpointer.path(step))) != step:
                tally.faults.append(f"step {step} holds another step")
        except (HoldfastError, WrongContentError) as error:
            tally.faults.append(f"step {step} is visible, but: {error}")
    newer = [step for step in steps if step > newest]
    if newest and newest not in steps and len(newer) < KEEP:
        tally.faults.append(f"step {newest} was acknowledged; there are {steps}")
    tally.unacknowledged += len([step for step in steps if step > max(newest, seen)])
    saves = (root / "run").glob("step-*/data/*")
    dead = {save for save in saves if not (save.parent.parent / "MANIFEST").exists()}
    tally.inside += bool(dead - tally.dead)
    tally.dead = dead
    return max([seen, *steps])


def main() -> int:
    """Kill as often as asked; exit 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replace", action="store_true", help="save in the place of what is there")
    parser.add_argument("--root", type=Path, help="an empty directory; default: a temporary one")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.root, prefix="holdfast-kill-") as root:
        given = arguments.kills, arguments.seed, arguments.ranks
        tally = run(Path(root), *given, replace=arguments.replace)
    rate = sum(tally.kills.values()) / (time.monotonic() - started)
    print(f"{tally}; {rate:.1f} kills/s", *tally.faults, sep="\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
