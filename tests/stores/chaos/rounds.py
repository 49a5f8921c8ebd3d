"""A round: jobs of one scenario, the harm that meets them, and what a judge says in the end."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .harms import Harm
from .jobs import Field, Job, Plant
from .oracle import (
    Known,
    Verdict,
    judge_copy,
    judge_place,
    judge_run,
    judged,
    known_of,
    look_at_run,
)
from .programs import BUCKET, PATIENCE_S, Work

LIMIT_S = 45.0  # for a job from the harm to its end: no error comes later
NEVER_S = 100.0
STEPS_LOCAL_MAX = 3  # on a disk, after the last job
TYPED = {
    "StoreError", "SyncError", "NoSpaceError", "PeerError", "FencedError", "AlreadyCommittedError",
    "NotCommittedError", "ReplacedError", "CancelledError",
}  # fmt: skip


@dataclass(slots=True)
class Tally:
    """What rounds have seen."""

    rounds: int = 0
    harmed: int = 0  # requests
    killed: int = 0  # processes
    saved: int = 0
    errors: int = 0
    lost: int = 0
    torn: int = 0
    hung: int = 0
    probes: int = 0
    longest_s: float = 0.0  # from the call of a save to its error
    faults: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add what others have seen."""
        for name in self.__slots__:
            if name == "longest_s":
                self.longest_s = max(self.longest_s, other.longest_s)
            else:
                setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.harmed} requests harmed, {self.killed} ranks killed, "
            f"{self.saved} acknowledged, {self.errors} errors, {self.lost} lost, {self.torn} torn, "
            f"{self.hung} hung, latest error after {self.longest_s:.1f} s, "
            f"{self.probes} probes left, {len(self.faults)} faults"
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """What jobs do. ``also`` runs while the first one is held; ``last`` when it has ended."""

    work: Work
    judge: Callable[[Any, Work, Verdict], None]
    also: Work | None = None
    also_first: bool = False  # it has the run before the held one begins
    last: Work | None = None  # nothing harms it


RUN = Work("steps", "")
SCENARIOS = {
    "save": Scenario(RUN, judge_run),
    "retire": Scenario(replace(RUN, before=2), judge_run),
    "replace": Scenario(Work("replace", "", before=1), judge_place),
    "first": Scenario(Work("replace", ""), judge_place),
    "copy": Scenario(Work("copy", "", ranks=1), judge_copy),
    "zombie": Scenario(
        replace(RUN, before=1, saves=3, on_error=True), judge_run, replace(RUN, job=2, saves=2)
    ),
    "zombie-first": Scenario(
        replace(RUN, saves=3, on_error=True), judge_run, replace(RUN, job=2, saves=2)
    ),
    "zombie-retire": Scenario(
        replace(RUN, before=2, saves=3, on_error=True), judge_run, replace(RUN, job=2, saves=2)
    ),
    "beside": Scenario(
        Work("beside", "", ranks=1, step=5, keep=3),
        judge_run,
        Work("steps on", "", job=2, ranks=1, step=10, before=1, saves=2, keep=3, is_old=True),
        also_first=True,
    ),
    "replacers": Scenario(
        Work("replace", "", ranks=1, before=1),
        judge_place,
        Work("replace", "", job=2, ranks=1),
    ),
}
ENUMERATED = ("save", "retire", "replace")

TIERS = Work("tiers", "", before=2, saves=2)
TIERED = {
    f"tiers{hosts}{durable}": Scenario(
        replace(TIERS, has_own_disks=bool(hosts), durable=durable[1:]),
        judge_run,
        replace(TIERS, job=2, before=0, has_own_disks=bool(hosts)),
        last=replace(TIERS, job=3, before=0, has_own_disks=bool(hosts), is_patient=True),
    )
    for hosts in ("", "-hosts")
    for durable in ("-store", "-local")
}
SCENARIOS |= TIERED


def harms_for(job: Job, harm: Harm, victims: str) -> list[Harm]:
    """Name the victims of a harm: "self", who sends the request; "other"; "all"; "0"; "none"."""
    pids = job.pids
    if not harm.action.startswith(("kill", "hold")):
        return [harm]
    if victims == "all":
        return [replace(harm, victims=pids)]
    rank = int(victims) if victims.isdigit() else harm.sender + (victims == "other")
    chosen = [] if victims == "none" else [pids[rank % len(pids)]]
    return [replace(harm, victims=chosen)]


def play(
    field: Field,
    scenario: Scenario,
    harm: Harm | None,
    victims: str = "self",
    plant: Plant | None = None,
    in_the_middle: Callable[[], None] | None = None,
    stage: str = "sync",
    saves: int = 0,
    vanishes: int = -1,
) -> tuple[Tally, dict[str, Any]]:
    """Play a round; return what it has seen, and what the proxy has.

    Args:
        in_the_middle: called while a request is held.
        vanishes: the rank whose local disk is gone before the last job.
    """
    name = field.new_name()
    at = {"place": f"{BUCKET}/{name}/run", "local": str(field.work / f"local-{name}")}
    work = replace(scenario.work, **at, stage=stage)
    if saves:
        work = replace(work, saves=saves, on_error=True)
    tally = Tally(rounds=1)
    first = second = None
    if scenario.also is not None:
        second = replace(scenario.also, **at)
    jobs: list[Job] = []
    if second is not None and scenario.also_first:
        jobs.append(Job(field, second, 2, plant))
        field.ask("arm")
        jobs[0].start()
        jobs[0].hear(lambda: jobs[0].told("ready"), LIMIT_S)
    first = Job(field, work, 0, plant)
    jobs.append(first)
    field.ask("arm", harms_for(first, harm, victims) if harm else [])
    first.start()
    if harm is not None and harm.action.startswith("hold"):
        _hear_until_struck(field, first)
        if in_the_middle is not None:
            in_the_middle()
        elif second is not None:
            seen = field.ask("end")
            other = jobs[0] if scenario.also_first else Job(field, second, 2, plant)
            if other is not jobs[0]:
                jobs.append(other)
                other.start()
            else:
                other.go()
            other.end(LIMIT_S)
        field.ask("release")
        for pid in first.pids:
            os.kill(pid, signal.SIGCONT)
    elif second is not None and scenario.also_first:
        jobs[0].go()
    first.end(LIMIT_S)
    if second is not None and scenario.also_first and not jobs[0].ended:
        jobs[0].go()
        jobs[0].end(LIMIT_S)
    seen = field.ask("end")
    verdict = _look_before_late(field, scenario, jobs, work) if seen["pending"] else Verdict()
    if not verdict.faults:
        if scenario.last is not None:
            field.ask("arm")  # without a harm
            work_last = replace(scenario.last, **at)
            tally.faults += _go_on(jobs, lambda: Job(field, work_last, 2, plant), vanishes)
        known = _known(jobs)
        verdict = judged(field.port, lambda verdict: scenario.judge(known, work, verdict))
    _add(tally, jobs, seen, verdict, harm)
    return tally, seen


def _known(jobs: list[Job]) -> Known:
    return known_of([event for job in jobs for event in job.events])


def _look_before_late(field: Field, scenario: Scenario, jobs: list[Job], work: Work) -> Verdict:
    """Judge once without a change, before a late request arrives."""
    verdict, known = Verdict(), _known(jobs)
    if scenario.judge is judge_run:
        verdict = judged(
            field.port, lambda verdict: look_at_run(known, work.place, work.keep, verdict) and None
        )
    field.ask("release")
    until = time.monotonic() + 5.0
    while field.ask("look")["pending"] and time.monotonic() < until:
        time.sleep(0.005)
    return verdict


def _go_on(jobs: list[Job], make: Callable[[], Job], vanishes: int) -> list[str]:
    """Let a job go on with the local disks and the store; say what it misses, or leaves."""
    before = [pid for job in jobs for pid in job.pids]
    for is_again in (False, True):
        known, last = _known(jobs), make()
        work = last.work
        if vanishes >= 0:
            shutil.rmtree(work.disk_of(vanishes), ignore_errors=True)
            known.local.clear()
        jobs.append(last)
        last.start()
        last.end(LIMIT_S + 2 * PATIENCE_S)
        if is_again or not _is_fenced_by(last, before):
            break  # else what a job asked for before it died arrived late: once more
    faults = []
    for number in {event["step"] for event in last.told("restored")} or {0}:
        if newer := known.newer(number):
            faults.append(f"state {newer} was acknowledged; {number} was restored")
        if number and number not in known.times:
            faults.append(f"state {number} was restored, which nobody saved")
    if last.told("told") or any(last.ended.values()):
        faults.append(f"the last job ended so: {last.ended}; {last.told('told')[:1]}")
    for rank in range(work.ranks):
        if len(steps := list(Path(work.disk_of(rank)).glob("step-*"))) > STEPS_LOCAL_MAX:
            faults.append(f"rank {rank} keeps {sorted(step.name for step in steps)}")
    return faults


def _is_fenced_by(job: Job, pids: Sequence[int]) -> bool:
    """Return whether a job met the epoch of one of these processes, which have ended."""
    texts = [event["text"] for event in job.told("told") if event["error"] == "FencedError"]
    return any(f"by process {pid} on " in text for text in texts for pid in pids)


def _hear_until_struck(field: Field, job: Job) -> None:
    until = time.monotonic() + LIMIT_S
    while not field.ask("look")["struck"] and time.monotonic() < until:
        if job.hear(lambda: False, 0.01) or all(map(_is_over, job.pids)):
            return


def _is_over(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _add(
    tally: Tally, jobs: list[Job], seen: dict[str, Any], verdict: Verdict, harm: Harm | None
) -> None:
    tally.harmed += len(seen["struck"])
    tally.lost, tally.torn, tally.probes = verdict.lost, verdict.torn, verdict.probes
    tally.faults += verdict.faults
    for job in jobs:
        tally.faults += job.faults()
        tally.hung += len(job.late)
        tally.killed += sum(status == -signal.SIGKILL for status in job.ended.values())
        tally.killed -= len(job.late)
        tally.saved += len({event["step"] for event in job.told("saved")})
        tally.errors += len(job.told("told"))
        tally.longest_s = max([tally.longest_s, *job.waits()])
        for event in job.told("told"):
            if event["error"] not in TYPED:
                tally.faults.append(f"a rank met {event['error']}: {event['text']}")
        if harm is None and not all(status == 0 for status in job.ended.values()):
            tally.faults.append(f"without harm, ranks ended so: {job.ended}")
        if harm is None and job.told("told"):
            tally.faults.append(f"without harm: {job.told('told')[0]['text']}")
    tally.faults += fenced_faults(jobs)
    if tally.faults:
        told = [(e["job"], e["rank"], e["step"], e["error"]) for e in _told(jobs)]
        struck = ", ".join(seen["struck"][:4])
        about = f"({struck}; there: {verdict.found}; told: {told})"
        tally.faults = [f"{'; '.join(tally.faults)} {about}"]


def fenced_faults(jobs: list[Job]) -> list[str]:
    """Say which saves of a run a job began and made when a newer job had saved."""
    newer = [e["at"] for job in jobs[1:] if job.work.kind == "steps" for e in job.told("saved")]
    if not newer:
        return []
    begun = {e["step"]: e["at"] for e in jobs[0].told("begun")}
    late = {e["step"] for e in jobs[0].told("saved") if begun[e["step"]] > min(newer)}
    return [f"the older job saved step {step} after the newer one" for step in sorted(late)]


def _told(jobs: list[Job]) -> list[dict[str, Any]]:
    return [event for job in jobs for event in job.told("told")]
