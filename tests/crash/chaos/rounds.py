"""One round: jobs on a run of its own, what struck them, and what was wrong with it."""

import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .jobs import Job, Setting
from .oracle import TYPED, job_faults, run_faults, waits_of
from .ranks import GOOD_SAVES, Plan, Prepare

ENDED_S = 30.0  # after it was told, or has saved all it should
BACK_S = 75.0  # until a job that trains on has saved again and is over
TRIES = 4
STAGES = ("sync", "eager", "lazy")
BACKGROUND = ("eager", "lazy")


@dataclass(slots=True)
class Tally:
    """What was seen of a scenario."""

    rounds: int = 0
    told: Counter[str] = field(default_factory=Counter)  # errors, by their kind
    saved: int = 0
    longest_s: float = 0.0
    least_left_s: float = float("inf")
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = ", ".join(f"{number} {name}" for name, number in sorted(self.told.items()))
        waited = (
            f"; no survivor waited longer than {self.longest_s:.2f} s, or came nearer to its limit "
            f"than {self.least_left_s:.2f} s"
        )
        return (
            f"{self.rounds} rounds, {self.saved} acknowledged saves; ranks were told of "
            f"{told or 'nothing'}{waited if self.longest_s else ''}; {len(self.faults)} faults"
        )


class Round:
    """What a scenario works with.

    Attributes:
        rng: chooses everything; seeded by the loop's seed, the scenario and the round.
        root: the run's directory, which a scenario may put elsewhere.
        work: an empty directory.
        after: what to undo when all has been judged.
        faults: what was wrong.
    """

    def __init__(self, rng: random.Random, work: Path, plant: Prepare | None = None) -> None:
        self.rng, self.work, self.root = rng, work, work / "run"
        self.after = contextlib.ExitStack()
        self.faults: list[str] = []
        self.jobs: list[Job] = []
        self.least_step = 0  # that the last job has to find
        self._plant = plant
        self._settled: list[Job] = []

    def start(self, plan: Plan, world_size: int, **setting: Any) -> Job:
        """Start a job."""
        prepare = (*setting.pop("prepare", ()), *([self._plant] if self._plant else []))
        made = Setting(world_size, self.root, prepare=prepare, **setting)
        job = Job(len(self.jobs) + 1, plan, made)
        self.jobs.append(job)
        self.after.callback(job.close)
        return job

    def start_saving(self, plan: Plan, world_size: int, **setting: Any) -> Job:
        """Start a job; wait until all ranks have saved once or a few times, and somewhat longer.

        On a machine that is too slow for the deadline it is the next job that has longer.
        """
        saves = self.rng.randint(1, 3)
        for _ in range(TRIES):
            job = self.start(plan, world_size, **setting)
            if job.hear(lambda job=job: job.has_saved(saves)):
                break
            self.settle(job)
            plan = replace(plan, deadline_s=2 * plan.deadline_s)
        else:
            self.faults.append(f"{TRIES} jobs did not come to what was to be struck")
        time.sleep(self.rng.uniform(0, 0.15))
        return job

    def await_background(self, job: Job) -> None:
        """Wait until all ranks save a step in the background, and somewhat longer."""
        if not job.hear(job.is_in_background):
            self.faults.append("no save in the background to be struck")
        time.sleep(self.rng.uniform(0, 0.08))

    def settle(self, job: Job, within_s: float = ENDED_S, typed: set[str] = TYPED) -> None:
        """Wait for the end of a job; note what was wrong with it."""
        self.faults += job_faults(job, job.end(within_s), typed)
        self._settled.append(job)

    def went_on(self, job: Job) -> None:
        """Note it when the ranks of a job did not save again together at last."""
        for rank in job.children:
            outcomes = [e for e in job.events if e.rank == rank and e.what in ("saved", "told")]
            last = [e.what for e in outcomes[-GOOD_SAVES:]]
            if last != ["saved"] * GOOD_SAVES:
                words = [f"{e.what} {e.step} {e.error}" for e in outcomes[-4:]]
                self.faults.append(f"rank {rank} did not save again: {words}")

    def all_saved(self, job: Job) -> None:
        """Note it when a rank met any error."""
        self.faults += [
            f"rank {e.rank} met {e.error} at step {e.step}, with no fault: {e.text}"
            for e in job.events
            if e.what == "told"
        ]

    def plans(self) -> str:
        """Say how its jobs saved."""
        return ", ".join(
            f"{len(job.children)} ranks {job.plan.stage}, struck: {sorted(job.struck)}"
            for job in self.jobs
        )

    def judge(self, tally: Tally, **setting: Any) -> None:
        """Let a new job restore the run and save it on; judge all that was seen."""
        world_size = self.rng.randint(1, 2)
        last = self.start(
            Plan(
                self.rng.choice(STAGES),
                saves=1,
                deadline_s=60.0,
                collective_s=60.0,
                keep=self.jobs[0].plan.keep,
            ),
            world_size,
            **setting,
        )
        self.settle(last, BACK_S)
        if not last.has_saved(1):
            self.faults.append("a new job could not save")
        found = max((e.step for e in last.events if e.what == "ready"), default=0)
        if found < self.least_step:
            self.faults.append(f"step {self.least_step} was committed; a new job found {found}")
        self.faults += run_faults(self.root, self.jobs)
        tally.rounds += 1
        for job in self.jobs[:-1]:
            tally.saved += len({e.step for e in job.events if e.what == "saved"})
            tally.told.update(e.error for e in job.events if e.what == "told")
            waits = waits_of(job) if job.struck_at else {}
            for _, waited_s, limit_s in itertools.chain(*waits.values()):
                tally.longest_s = max(tally.longest_s, waited_s)
                tally.least_left_s = min(tally.least_left_s, limit_s - waited_s)


Scenario = Callable[[Round], dict[str, Any]]  # returns the setting of the job that judges
