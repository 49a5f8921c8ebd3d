"""What has to hold after a round, whatever struck: judged from what ranks told and what is there.

Every acknowledged step loads bit-exact, unless retention let it go; no visible step is torn or
mixed; every survivor was told, by a typed error or a success, by its deadline and five seconds; all
processes ended by themselves.
"""

from collections.abc import Iterable
from pathlib import Path

from crash_content import WrongContentError, load_number, make_state
from crash_oracle import FoundRun, promises_broken, verdict_of

import holdfast
from holdfast.errors import HoldfastError
from holdfast.format.names import step_of

from .jobs import Job
from .ranks import OPTIONS, STEPS_MAX, Event, number_of

GRACE_S = 5.0  # after the deadline
TYPED = {"PeerError", "StoreError", "FencedError"}
OUTCOMES = ("saved", "told")


def waits_of(job: Job) -> dict[int, list[tuple[Event, float, float]]]:
    """Return each survivor's outcomes since the strike: how long it waited, and may at most."""
    found: dict[int, list[tuple[Event, float, float]]] = {}
    for rank in sorted(job.children.keys() - job.struck):
        began = Event(job.number, rank, "ready", 0, 0.0)
        for event in (e for e in job.events if e.rank == rank):
            if event.what in OUTCOMES and event.at > job.struck_at:
                in_background = began.what == "waits" and job.plan.stage != "sync"
                deadline_s = job.plan.deadline_s if in_background else job.plan.call_s
                waited_s = event.at - max(began.at, job.struck_at)
                found.setdefault(rank, []).append((event, waited_s, deadline_s + GRACE_S))
            elif event.what in ("calls", "waits"):
                began = event
    return found


def job_faults(job: Job, late: Iterable[int], typed: set[str] = TYPED) -> list[str]:
    """Say what is wrong with what the ranks of a job were told, and with how they ended."""
    faults = [f"rank {rank} of job {job.number} did not end" for rank in late]
    if job.struck_at:
        waits = waits_of(job)
        for rank in sorted(job.children.keys() - job.struck):
            if not waits.get(rank):
                faults.append(f"rank {rank} of job {job.number} was never told")
            for event, waited_s, limit_s in waits.get(rank, ()):
                if waited_s > limit_s:
                    faults.append(
                        f"rank {rank} of job {job.number} was told ({event.what} {event.step} "
                        f"{event.error}) after {waited_s:.2f} s, at most {limit_s:.2f} s"
                    )
    for event in job.events:
        if event.what == "told" and event.error not in typed:
            faults.append(f"rank {event.rank} met {event.error}: {event.text}")
        if event.what == "over" and event.text:
            faults.append(f"rank {event.rank} is left with threads {event.text}")
    return faults


def acknowledged(jobs: Iterable[Job]) -> tuple[dict[int, int], list[str]]:
    """Return the number of the state that was acknowledged as each step; and contradictions."""
    found: dict[int, int] = {}
    faults = []
    for job in jobs:
        for event in job.events:
            if event.what == "saved":
                number = number_of(job.number, event.step)
                if found.setdefault(event.step, number) != number:
                    faults.append(f"step {event.step} was acknowledged as two states")
    return found, faults


def run_faults(root: Path, jobs: list[Job]) -> list[str]:
    """Load all that is visible; say which promises are broken."""
    known, faults = acknowledged(jobs)
    verdicts = {
        step: _verdict(place, step, known.get(step))
        for place in (root.glob("step-*") if root.exists() else ())
        if (step := step_of(place.name)) is not None
    }
    hint = root / "LATEST"
    restored: int | str | None
    try:
        into = make_state(-1)
        restored = holdfast.Checkpointer(root, options=OPTIONS, group="alone").restore(into)
    except (HoldfastError, WrongContentError) as error:
        restored = f"{type(error).__name__}: {error}"
    found = FoundRun(verdicts, restored, hint.read_bytes() if hint.exists() else None)
    return faults + promises_broken(found, known, min(job.plan.keep for job in jobs))


def _verdict(place: Path, step: int, expected: int | None) -> int | str | None:
    """Return the step when it holds what it should, None when it is no checkpoint."""
    number = verdict_of(place, lambda path: load_number(path, OPTIONS))
    if not isinstance(number, int):
        return number
    if number % STEPS_MAX != step or expected not in (None, number):
        return f"holds state {number}; {expected or f'one of step {step}'} was saved there"
    return step
