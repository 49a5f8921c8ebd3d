"""Worlds whose run is in an object store: jobs and upsets as in `worlds.py`, requests for calls.

A cut of the power ends every process, and nothing of the store. Requests that were on their way
arrive all the same, at any time. In some worlds one request of the second job is days late, or its
process is frozen before it, while a third job deletes what it takes for dead.
"""

import errno
import random
from collections import Counter

from .bucket import BASE, Bucket
from .training import Job
from .worlds import World

DAY_S = 86400.0


class BucketWorld(World):
    """One seed's world."""

    aims = ("", "", "", "publish", "swap", "bar", "lock", "delete", "list")
    errors = (errno.EIO, errno.EIO, errno.ENOSPC)
    troubles = ("fail", "lost", "again", "late", "late", "slow")
    _late = ""  # the request of the second job that is days late

    def __init__(self, seed: int, counts: Counter[str], *, traced: bool = False) -> None:
        super().__init__(seed, counts, traced=traced)
        self.bucket.keeps_folders = random.Random(f"folders {seed}").random() < 0.3
        rng = random.Random(f"late {seed}")
        self._is_about_a_request = rng.random() < 0.3
        if self._is_about_a_request:
            self._plan_request(rng)

    def _place(self) -> str:
        self.disk = self.bucket = Bucket(self.scheduler)
        self.disk.clock_off_s += self.rng.choice((0.0, 0.0, -90000.0, 7200.0, 1e6))
        return f"{BASE}/user/run"

    def _codec(self) -> str:
        return "raw"

    def _jobs_beside_a_link(self) -> list[Job]:
        return self.jobs  # there are no links

    def _plan_request(self, rng: random.Random) -> None:
        """Plan three jobs, and what becomes of one request of the second."""
        aim = rng.choice(("publish", "swap", "swap", "lock", "bar"))
        acts = ["save"] * rng.choice((1, 2))
        if aim in ("swap", "lock"):
            acts = ["replace"]
        kinds = [rng.choice(("run", "plain")), rng.choice(("plain", "plain async", "run")), "run"]
        jobs = [["save"] * rng.choice((1, 3)), acts, ["save"] * rng.choice((2, 3, 4))]
        if rng.random() < 0.4:  # what was taken for dead has been forgotten by then
            kinds.append("run")
            jobs.append(["save", "save"])
        keep = rng.choice((0, 1, 2))
        self.jobs = [
            Job(number, 1, kind, "sync", keep, "raw", 1e7, some)
            for number, (kind, some) in enumerate(zip(kinds, jobs, strict=True))
        ]
        if rng.random() < 0.4:
            self.jobs[2].acts.insert(1, "replace")
        elif rng.random() < 0.5:  # so that it does not come to the step that the second one was at
            self.jobs[2].acts.insert(0, "skip")
        if rng.random() < 0.5:
            self._late = aim
            self.disk.trouble = self._trouble
        else:
            self._stops = [aim]

    def _trouble(self, operation: str, path: str) -> tuple[str, int] | None:
        if operation == self._late and self.scheduler.current.process.job == 1:
            self._late = ""
            self.counts["days late"] += 1
            return "late", int(DAY_S * self.rng.uniform(0.5, 4))
        found = super()._trouble(operation, path)
        return (
            ("late", int(10 ** self.rng.uniform(0, 5.5))) if found and found[0] == "late" else found
        )

    def _pause_s(self, job: Job) -> float:
        if self._is_about_a_request and job.number > 0:
            return DAY_S * self.rng.uniform(0.9, 2)
        return super()._pause_s(job)

    def _watch(self, operation: str, path: str, second: str) -> None:
        super()._watch(operation, path, second)
        if operation == "rename" and "/.epoch-" in second:
            self._thaw_some()
