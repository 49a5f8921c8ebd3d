"""Worlds: from one seed, jobs that follow each other on one run, and what befalls them.

A job has one to four ranks, saves through a `Checkpointer` or by `holdfast.save`, at once or in the
background. Then it is killed, frozen, cut off, or the power goes, at any call; the next job
restores, and goes on; who was frozen comes back at any call. The disk fails, is slow, loses
replies. At the end all have ended, the power is cut once more, and the oracle looks.
"""

import errno
import random
import traceback
from collections import Counter
from collections.abc import Callable

from holdfast.codecs import Delta
from holdfast.errors import HoldfastError
from holdfast.group.base import Group, SingleGroup

from . import seams
from .actors import NEVER, Process, Scheduler
from .bucket import Bucket
from .disk import MOUNT, Disk
from .oracle import Oracle
from .ranks import Meeting, RankGroup
from .training import Job, Rank

END_S = 1e7  # by then everything has ended, however long it was frozen
MAY_BE_GONE = frozenset(("create", "write", "link", "rename"))
UPSETS = ("none", "kill", "kill all", "freeze", "freeze all", "cut off", "power", "jump", "full")
UPSET_WEIGHTS = (22, 16, 8, 20, 8, 6, 14, 3, 3)


class World:
    """One seed's world; `play` plays it once."""

    group_kind: type[RankGroup] = RankGroup
    aims: tuple[str, ...] = ("", "", "", "link", "unlink", "sync_directory")  # upsets wait for
    errors: tuple[int, ...] = (errno.EIO, errno.EIO, errno.ENOSPC, errno.ENOENT)
    troubles: tuple[str, ...] = ("fail", "fail", "lost", "slow")
    rank_kind: type[Rank] = Rank
    disk: "Disk | Bucket"
    bucket: "Disk | Bucket"  # what stores of objects ask

    def __init__(self, seed: int, counts: Counter[str], *, traced: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.counts = counts
        self.scheduler = Scheduler(rng, seams.switch)
        self.scheduler.trace = [] if traced else None
        self.scheduler.density = rng.choice((0.01, 0.01, 0.05, 0.3))
        self.root = self._place()
        self.oracle = self._oracle()
        self._troubles: list[tuple[int, str, int, int]] = []  # call, kind, number, how often
        self._lasting: dict[str, tuple[str, int]] = {}  # by operation
        count = rng.choice((1, 2, 2, 2, 3))
        keep, codec = rng.choice((0, 1, 1, 2, 3)), self._codec()
        self.disk.watch = self._watch
        self.jobs = [self._job(number, keep, codec) for number in range(count)]
        self._stops: list[str] = []  # calls at which the second job is stopped
        if rng.random() < 0.1:
            self.jobs = self._jobs_beside_a_link()
        self._let_some_replace(random.Random(f"replace {seed}"))
        self._let_some_save_below(random.Random(f"below {seed}"))
        self._meetings: dict[int, Meeting] = {}
        self._upset = False

    def _oracle(self) -> Oracle:
        return Oracle(self.scheduler, self.disk, self.root, self.counts)

    def _place(self) -> str:
        """Make the disk; return the run's place on it."""
        rng = self.rng
        self.disk = self.bucket = disk = Disk(self.scheduler)
        disk.clock_off_s += rng.choice((0.0, 0.0, -90000.0, 7200.0, 1e6))
        user = f"{MOUNT}/user"
        disk.make(user, durable=True)
        if rng.random() < 0.3:  # what the user has made just now
            user += "/new"
            disk.make(user, durable=False)
        return f"{user}/run"

    def _codec(self) -> str | Delta:
        return "raw" if self.rng.random() < 0.6 else Delta(every=self.rng.choice((2, 3)))

    def _job(self, number: int, keep: int, codec: str | Delta) -> Job:
        rng = self.rng
        size = rng.choices((1, 2, 3, 4), (65, 22, 8, 5))[0]
        kind = rng.choice(("run", "run", "run", "run", "plain", "plain async"))
        stage = rng.choice(("sync", "eager"))
        acts = [rng.choice(("save", "step", "step+wait")) for _ in range(rng.choice((1, 2, 2, 3)))]
        if codec != "raw" and rng.random() < 0.3:
            acts.insert(rng.randrange(len(acts) + 1), "rebase")
        if rng.random() < 0.05:
            acts.insert(0, "go back")
        deadline_s = rng.choice((5.0, 60.0, 1800.0))
        stride = rng.choice((1, 7)) if kind != "run" else 1
        return Job(number, size, kind, stage, keep, codec, deadline_s, acts, stride)

    def _jobs_beside_a_link(self) -> list[Job]:
        """Plan a plain save that links to a step which the next job is to let go of."""
        rng, codec = self.rng, Delta(every=2)
        acts = [["save"] * rng.choice((1, 3)), ["save"], ["save"] * rng.choice((2, 3, 4))]
        self._stops = [rng.choice(("create", "write", "sync"))] * rng.choice((0, 1, 2)) + ["link"]
        kinds = "run", rng.choice(("plain", "plain async")), "run"
        return [
            Job(number, 1, kind, "sync", 1, codec, 1800.0, some, 7 if kind != "run" else 1)
            for number, (kind, some) in enumerate(zip(kinds, acts, strict=True))
        ]

    def _let_some_replace(self, rng: random.Random) -> None:
        """Let jobs replace steps: their own, or those of others that save without epochs."""
        if self._stops and rng.random() < 0.5:  # what is replaced is what the link is made from
            for job in (self.jobs[0], self.jobs[2]):
                job.kind, job.stride = "plain", 1
            self.jobs[2].acts = ["replace"] * rng.choice((1, 2))
            return
        if rng.random() < 0.15:
            kinds = [rng.choice(("plain", "plain async")) for _ in self.jobs]
            if rng.random() < 0.3:
                kinds[-1] = "run"
            for job, kind in zip(self.jobs, kinds, strict=True):
                job.kind, job.stride = kind, 1
        for job in self.jobs:
            share = 0.6 if job.kind != "run" else 0.1
            added = sum(rng.random() < share for _ in job.acts)
            for _ in range(added):
                job.acts.insert(rng.randrange(1, len(job.acts) + 1), "replace")

    def _let_some_save_below(self, rng: random.Random) -> None:
        """Let a plain save go below the last one: it may not be a delta of that.

        Then another job lets go of both.
        """
        if self._stops or len(self.jobs) < 2 or self.jobs[0].codec == "raw" or rng.random() > 0.4:
            return
        first, second = self.jobs[:2]
        first.kind, first.codec, first.stride, first.size = "plain", Delta(every=3), 7, 1
        first.acts = rng.choice((["save", "below"], ["save", "below", "below", "save"]))
        second.kind, second.stride, second.keep = "run", 1, 1
        second.acts = ["save"] * rng.choice((1, 2))

    def play(self) -> list[str]:
        """Play it; return the promises broken."""
        seams.enter(
            *(self.scheduler, self.disk, self.bucket), self.oracle.saving, self.oracle.tidying
        )
        scheduler = self.scheduler
        for job in self.jobs:
            self._upset = False
            self._plan_upset(job)
            self._start(job)
            self._wait(lambda job=job: job.is_over or self._upset)
            scheduler.pause(self._pause_s(job))
        self._wait(lambda: all(job.is_over for job in self.jobs))
        self._settle()
        self.oracle.judge("at the end")
        self._cut_power()
        self.oracle.judge("after the last power cut")
        self.counts["worlds"] += 1
        self.counts["calls"] += scheduler.calls
        return self.oracle.faults

    def _pause_s(self, job: Job) -> float:
        """Say how long it takes until the next job begins."""
        return self.rng.choice((0.0, 0.0, 10.0, 4000.0, 90000.0)) * self.rng.random()

    def _wait(self, found: Callable[[], bool]) -> None:
        if not self.scheduler.wait("end", END_S, found) or self.scheduler.hung:
            self.oracle.fault("P4: somebody waits for ever")
            self._kill_all()

    def _settle(self) -> None:
        """End what is left of processes, and say what they fell over."""
        self._kill_all()
        scheduler = self.scheduler
        scheduler.wait("end", NEVER, lambda: len(scheduler.actors) == 1)
        for error in scheduler.errors:
            self.oracle.fault("".join(traceback.format_exception(error)))

    def _kill_all(self) -> None:
        for process in self._living():
            self.scheduler.kill(process)

    def _living(self) -> list[Process]:
        return [p for job in self.jobs for p in job.processes if not p.dead]

    # What befalls them.

    def _plan_upset(self, job: Job) -> None:
        rng, scheduler = self.rng, self.scheduler
        if self._stops and job.number == 1:
            self._add(scheduler.calls + 1, self._stop)
            return
        kind = rng.choices(UPSETS, UPSET_WEIGHTS)[0]
        if job.stride > 1 and rng.random() < 0.7:  # what it links to may be let go meanwhile
            kind = "freeze"
        length = (25 + 45 * len(job.acts)) * job.size
        if kind != "none":
            at = scheduler.calls + rng.randrange(1, length)
            aim = rng.choice(self.aims)
            self._add(at, lambda process: self._befall(kind, process, aim))
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            at = scheduler.calls + rng.randrange(1, length)
            what = rng.choice(self.troubles)
            number = int(10 ** rng.uniform(0, 5)) if what == "slow" else rng.choice(self.errors)
            self._troubles.append((at, what, number, rng.choice((1, 1, 2, 9))))
        if self._troubles:
            self._troubles.sort(reverse=True)
            self.disk.trouble = self._trouble

    def _add(self, at: int, upset: Callable[[Process], None]) -> None:
        upsets = self.scheduler.upsets
        upsets.append((at, upset))
        upsets.sort(key=lambda item: item[0])

    def _trouble(self, operation: str, path: str) -> tuple[str, int] | None:
        if lasting := self._lasting.get(operation):
            if self.rng.random() < 0.1:
                del self._lasting[operation]
            return lasting
        if not self._troubles or self.scheduler.calls < self._troubles[-1][0]:
            return None
        _, kind, number, times = self._troubles[-1]
        if number == errno.ENOENT and kind != "slow" and operation not in MAY_BE_GONE:
            return None
        self._troubles.pop()
        self.counts[f"calls {kind}"] += 1
        if times > 1:
            self._lasting[operation] = kind, number
        return kind, number

    def _watch(self, operation: str, path: str, second: str) -> None:
        """Let the oracle look; who is frozen likes to come back while a step is let go."""
        self.oracle.watch(operation, path, second)
        is_begun = second.endswith(("/LATEST", ".over")) or "/.manifest-leaving-" in second
        if is_begun or (operation == "unlink" and path.endswith("/MANIFEST")):
            self._thaw_some()

    def _thaw_some(self) -> None:
        for process in self._living():
            if process.frozen_until > self.scheduler.now and self.rng.random() < 0.5:
                self._thaw(process)

    def _befall(self, kind: str, process: Process, aim: str) -> None:
        """Let something happen to the process that makes the call, or to all of its job."""
        scheduler, rng = self.scheduler, self.rng
        if process.job < 0 or process.dead:
            return
        if aim and scheduler.operation != aim:
            self._add(scheduler.calls + 1, lambda process: self._befall(kind, process, aim))
            return
        job = self.jobs[process.job]
        scheduler.note(f"UPSET {kind} of {process.name}")
        self.counts[kind] += 1
        struck = job.processes if kind.endswith("all") else [process]
        if kind.startswith("kill"):
            for one in struck:
                self._end(one)
        elif kind.startswith("freeze"):
            for one in struck:
                scheduler.freeze(one, 10 ** rng.uniform(0, 5.5))
                at = scheduler.calls + rng.randrange(1, 400)
                self._add(at, lambda _, one=one: scheduler.thaw(one))  # type: ignore[misc]
        elif kind == "cut off":
            process.cut_off = True
        elif kind == "power":
            self._cut_power()
            self.oracle.judge("after a power cut")
        elif kind == "jump":
            self.disk.clock_off_s += rng.choice((-1e6, -7200.0))
            return
        else:
            self.disk.free_bytes = 0
            return
        if kind == "power" or rng.random() < 0.7:  # else the others go on
            self._upset = True
            scheduler.wake("end")

    def _stop(self, process: Process) -> None:
        """Freeze the second job at each of its stops; it comes back at any call, or as in `_watch`.

        The next job begins at the first.
        """
        scheduler = self.scheduler
        if process.job == 1 and scheduler.operation == self._stops[0]:
            del self._stops[0]
            scheduler.note(f"UPSET stop of {process.name}")
            self.counts["stopped at a link"] += 1
            scheduler.freeze(process, 1e6)
            at = scheduler.calls + self.rng.randrange(1, 300)
            self._add(at, lambda _: self._thaw(process))
            self._upset = True
            scheduler.wake("end")
        if self._stops and not self.jobs[1].is_over:
            self._add(scheduler.calls + 1, self._stop)

    def _thaw(self, process: Process) -> None:
        self.scheduler.thaw(process)
        self.scheduler.density = 0.5

    def _cut_power(self) -> None:
        for process in self._living():
            self._end(process)
        self.disk.cut(self.rng)
        self._lasting.clear()
        self.oracle.newest_epoch = 0  # whom an epoch keeps out is gone with it

    def _end(self, process: Process) -> None:
        """End a process, from without or within; the ranks that need it learn of it."""
        if not process.dead:
            self.scheduler.kill(process)
            self.scheduler.wake(self._meetings[process.job])

    # What a job does.

    def _start(self, job: Job) -> None:
        scheduler, rng = self.scheduler, self.rng
        for rank in range(job.size):
            process = Process(f"{job.number}.{rank}", job.number, rank)
            process.clock_off_s = rng.choice((0.0, -1e5, 1e5))
            job.processes.append(process)
        meeting = self._meetings[job.number] = Meeting(scheduler, job.processes)
        epochs = seams.Epochs()
        taken = lambda place, epoch: self.oracle.take(place, job.number, epoch)  # noqa: E731
        epochs.taken = taken  # type: ignore[method-assign]
        job.processes[0].epochs = epochs
        self.oracle.keep[job.number] = job.keep or 1 << 30
        for process in job.processes:
            scheduler.start(process, lambda process=process: self._run(job, process, meeting))

    def _run(self, job: Job, process: Process, meeting: Meeting) -> None:
        """Be one rank, until it ends."""
        group: Group = SingleGroup()
        if job.size > 1:
            group = self.group_kind(self.scheduler, meeting, process.rank, job.size)
        try:
            self.rank_kind(self.oracle, self.root, job, process, group).run()
        except HoldfastError as error:
            self.counts[f"ended by {type(error).__name__}"] += 1
            self.scheduler.note(f"{process.name} ends: {type(error).__name__}: {error}")
        finally:
            self._end(process)
