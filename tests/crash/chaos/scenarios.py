"""What strikes, and how: each scenario is one round of it.

Plans with ``trains_on`` go on in the same processes after a save that failed: there the strike
comes while the save is in the background, since whoever is lost while all ranks call `step` holds
up the others as it would any collective of training. The others are struck at any moment; the
deadline of their calls is the process group's timeout, and what it takes to ask the ranks' store
and, over a new connection, once more, where they meet there.
"""

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from blocks.explore import work_directory
from forked_ranks import await_death

from holdfast.group.torch import ANSWER_S
from holdfast.testing import Fault

from . import places
from .clocks import strange_clocks
from .jobs import BEGUN_S, Job
from .oracle import GRACE_S, TYPED
from .ranks import STEPS_MAX, Plan
from .rounds import BACK_S, BACKGROUND, STAGES, Round

AMPLE_S = 60.0  # a deadline that is not to pass
LONGER_S = 0.5  # than any survivor may wait
STRUCK_S = 4.0  # a rank, network or disk that is slow stays so for so long
WRITE_MS = 30
SAVES = 15  # more than a fault lasts
TRAINS_ON = Plan(trains_on=True, saves=SAVES, keep=STEPS_MAX, collective_s=60.0, write_ms=WRITE_MS)


@dataclass(frozen=True, slots=True)
class Struck:
    """A scenario: `strike` does one round of it, where `missing` says nothing."""

    strike: Callable[[Round], dict[str, Any] | None]
    missing: Callable[[], str] = lambda: ""


def kill(now: Round) -> None:
    """One rank is killed."""
    job = now.start_saving(_any_plan(now), now.rng.randint(2, 4))
    job.strike([now.rng.randrange(len(job.children))], signal.SIGKILL)
    now.settle(job)


def stop(now: Round) -> None:
    """One rank is stopped until after the deadline, in the background; all train on together."""
    job = now.start(_background_plan(now), now.rng.randint(2, 4))
    now.await_background(job)
    job.strike([now.rng.randrange(len(job.children))], signal.SIGSTOP)
    job.hear(lambda: False, job.plan.deadline_s + GRACE_S + LONGER_S)
    job.thaw()
    now.settle(job, BACK_S)
    now.went_on(job)


def stop_anywhere(now: Round) -> None:
    """One rank is stopped at any moment, until all others have given up."""
    job = now.start_saving(_any_plan(now), now.rng.randint(2, 4))
    job.strike([now.rng.randrange(len(job.children))], signal.SIGSTOP)
    survivors = job.children.keys() - job.struck
    job.hear(lambda: job.seen("told", None, survivors), job.plan.call_s + GRACE_S + LONGER_S)
    job.thaw()
    now.settle(job)


def slow(now: Round) -> None:
    """One rank gets a tenth to a half of the time, some of it at a time."""
    job = now.start(_background_plan(now), now.rng.randint(2, 4))
    now.await_background(job)
    victim = [now.rng.randrange(len(job.children))]

    def stop_or_go(number: int) -> None:
        job.strike(victim, number)

    _by_turns(now, job, stop_or_go)
    now.settle(job, BACK_S)
    now.went_on(job)


def partition(now: Round) -> dict[str, Any]:
    """One rank is cut off until after the deadline; in one round of three for a moment only."""
    network, job = _networked(now)
    cut_off = now.rng.randrange(len(job.children))
    now.await_background(job)
    job.struck_at = time.monotonic()
    network.cut(cut_off)
    long_s = job.plan.deadline_s + GRACE_S + LONGER_S
    job.hear(lambda: False, now.rng.choice((long_s, long_s, now.rng.uniform(0.1, 1.0))))
    network.mend(cut_off)
    now.settle(job, BACK_S)
    now.went_on(job)
    return {}


def slow_network(now: Round) -> dict[str, Any]:
    """What goes to one rank comes late."""
    network, job = _networked(now)
    late = now.rng.randrange(len(job.children))
    now.await_background(job)
    job.struck_at = time.monotonic()
    network.slow(late, now.rng.choice((50, 300, 1500)))
    job.hear(lambda: False, STRUCK_S)
    network.hasten(late)
    now.settle(job, BACK_S)
    now.went_on(job)
    return {}


def after_link(now: Round) -> None:
    """The coordinator dies between the commit and telling the others of it."""
    step = now.rng.randint(1, 3)
    faults = {0: (Fault("link", step, action="kill_after", argument=0),)}
    plan = replace(_any_plan(now), deadline_s=AMPLE_S)  # its end has not to be waited for
    job = now.start(plan, now.rng.randint(2, 4), faults=faults)
    job.struck.add(0)
    if not await_death(job.children[0], BEGUN_S):
        now.faults.append("the coordinator did not come to its commit")
    job.hear(lambda: job.seen("calls", step, [0]))
    job.struck_at = max((e.at for e in job.events if e.rank == 0), default=0.0)
    now.settle(job)
    now.least_step = step


def clocks(now: Round) -> dict[str, Any]:
    """The clocks of the ranks are hours or days apart, or jump: nothing may come of it."""
    prepare = (strange_clocks(now.rng.randrange(1 << 30)),)
    plan = replace(_any_plan(now), saves=4, deadline_s=AMPLE_S, collective_s=AMPLE_S)
    job = now.start(plan, now.rng.randint(2, 4), prepare=prepare)
    now.settle(job, BACK_S)
    now.all_saved(job)
    if not job.has_saved(4):
        now.faults.append("not all was saved")
    return {"prepare": prepare}


def two_jobs(now: Round) -> None:
    """A second job begins on the directory of one that goes on saving."""
    ample = {"deadline_s": AMPLE_S, "collective_s": AMPLE_S}
    old = now.start_saving(replace(_any_plan(now), **ample), 2)
    typed = TYPED | {"AlreadyCommittedError"}
    new = old
    for _ in range(4):  # the old one may have published a step that the new one did not find
        new = now.start(replace(_any_plan(now), saves=3, **ample), 2)
        now.settle(new, BACK_S, typed)
        if new.has_saved(3):
            break
    now.settle(old, BACK_S, typed)
    if not new.has_saved(3):
        now.faults.append("the new job did not get the run")
    _check_fenced(now, old, new)


def zombie(now: Round) -> None:
    """All of a job is frozen; the next one restores and saves on; then the first one thaws."""
    plan = replace(_any_plan(now), deadline_s=AMPLE_S, collective_s=AMPLE_S)
    old = now.start_saving(plan, now.rng.randint(2, 3))
    old.strike(old.children, signal.SIGSTOP)
    new = now.start(replace(plan, saves=now.rng.randint(1, 4)), 2)
    now.settle(new, BACK_S)
    now.all_saved(new)
    old.thaw()
    now.settle(old, BACK_S)
    _check_fenced(now, old, new)


def out_of_memory(now: Round) -> None:
    """One rank takes more memory than its group has, and is killed by the kernel in a save."""
    victim = now.rng.randrange(2)
    group = now.after.enter_context(places.memory_group(32 << 20))
    waiting, telling = os.pipe()

    def enter(rank: int) -> None:
        os.close(telling)
        if rank == victim:
            group.write_text(str(os.getpid()))
            places.hog_when_told(waiting)

    job = now.start_saving(_any_plan(now), 2, prepare=(enter,))
    os.close(waiting)
    job.struck.add(victim)
    job.struck_at = time.monotonic()
    os.write(telling, b"!")
    os.close(telling)
    now.settle(job)
    if job.ended.get(victim) != -signal.SIGKILL:
        now.faults.append(f"the kernel did not kill rank {victim}: {job.ended}")


def hung_disk(now: Round) -> None:
    """The disk answers nothing until after the deadline, or for a moment; then it comes back."""
    disk, job = _on_a_disk(now)
    now.await_background(job)
    job.struck_at = time.monotonic()
    long_s = job.plan.deadline_s + GRACE_S + LONGER_S
    hung_s = now.rng.choice((long_s, long_s, now.rng.uniform(0.1, 1.0)))
    disk.hang()
    try:
        job.hear(lambda: False, hung_s)
    finally:
        disk.come_back()
    now.settle(job, BACK_S)
    now.went_on(job)


def slow_disk(now: Round) -> None:
    """The disk answers a tenth to a half of the time."""
    disk, job = _on_a_disk(now)
    now.await_background(job)
    job.struck_at = time.monotonic()
    _by_turns(now, job, disk.server.send_signal)
    now.settle(job, BACK_S)
    now.went_on(job)


SCENARIOS = {
    "kill": Struck(kill),
    "stop": Struck(stop),
    "stop-anywhere": Struck(stop_anywhere),
    "slow": Struck(slow),
    "partition": Struck(partition, places.missing_network),
    "slow-network": Struck(slow_network, places.missing_slow_network),
    "after-link": Struck(after_link),
    "clocks": Struck(clocks),
    "two-jobs": Struck(two_jobs),
    "zombie": Struck(zombie),
    "out-of-memory": Struck(out_of_memory, places.missing_memory_group),
    "hung-disk": Struck(hung_disk, places.missing_disk),
    "slow-disk": Struck(slow_disk, places.missing_disk),
}


def _any_plan(now: Round) -> Plan:
    plan = Plan(stage=now.rng.choice(STAGES), write_ms=now.rng.choice((0, WRITE_MS)))
    asked_s = 0.0 if plan.stage == "sync" else 2 * ANSWER_S
    return replace(plan, call_s=plan.collective_s + asked_s)


def _background_plan(now: Round) -> Plan:
    return replace(TRAINS_ON, stage=now.rng.choice(BACKGROUND))


def _networked(now: Round) -> tuple[places.Network, Job]:
    network = now.after.enter_context(places.Network())
    job = now.start(
        _background_plan(now),
        now.rng.randint(2, 4),
        meeting=network.meeting,
        prepare=(network.enter,),
        attach=network.attach,
    )
    return network, job


def _on_a_disk(now: Round) -> tuple[places.Disk, Job]:
    """Start a job whose ranks share a disk; none is lost, so that its calls have a deadline too."""
    work = now.after.enter_context(work_directory())
    disk = now.after.enter_context(places.disk(work))
    now.root = disk.where / "run"
    plan = _background_plan(now)
    return disk, now.start(replace(plan, call_s=plan.deadline_s), now.rng.randint(2, 4))


def _by_turns(now: Round, job: Job, send: Callable[[int], None]) -> None:
    """Stop and continue something, again and again."""
    share, until = now.rng.uniform(0.1, 0.5), time.monotonic() + STRUCK_S
    turns = itertools.cycle([(signal.SIGSTOP, 1 - share), (signal.SIGCONT, share)])
    try:
        while time.monotonic() < until:
            number, part = next(turns)
            send(number)
            job.hear(lambda: False, part * now.rng.uniform(0.05, 0.4))
    finally:
        send(signal.SIGCONT)


def _check_fenced(now: Round, old: Job, new: Job) -> None:
    """Note what the older of two jobs did after the newer one had taken its run."""
    began = min((e.at for e in new.events if e.what == "saved"), default=float("inf"))
    called = {(e.rank, e.step): e.at for e in old.events if e.what == "calls"}
    for event in old.events:
        if event.what == "saved" and called[event.rank, event.step] > began:
            now.faults.append(f"the older job saved step {event.step}, which it began later")
    told = [e for e in old.events if e.what == "told"]
    # A rank may come upon what is gone before the coordinator looks who has taken it.
    if not any(e.error == "FencedError" or "No such file" in e.text for e in told):
        now.faults.append(f"the older job was not refused: {[e.error for e in told]}")
