"""Worlds of runs with a local disk before the store: saves, uploads, restores, and upsets.

Two hosts have a disk each; a job runs on one of them, with all its ranks. Its coordinator uploads
in a thread of its own. A host may lose its disk between two jobs; the store may not answer for a
while. A byte of a local file may change between two jobs. What `worlds.py` does to jobs happens
here too, at calls of the disk and at requests alike.

Each tier has a promise of its own: what was acknowledged by the disk outlives every crash but the
loss of that disk, until a job on another one has trained on without it. What was acknowledged by
the store outlives that, too.
"""

import contextlib
import errno
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from crash.disk_model import Directory
from holdfast import Checkpointer, Keep
from holdfast.errors import CorruptError, MismatchError, NotCommittedError, OptionError
from holdfast.format.names import step_of
from holdfast.runs.upload_thread import STOP_S

from .actors import Process
from .bucket import BASE, Bucket
from .disk import MOUNT, Disk, SimDirectory, SimFile
from .oracle import Oracle, RestoreOracle, files_of
from .training import Job, Rank
from .worlds import World

HOSTS = ("a", "b")
SHARED = f"{MOUNT}/user/shared"
DISK_TROUBLES = {"late": "lost", "again": "lost"}  # what a disk does where a store does that


def place_of(host: str) -> str:
    """Return the local directory of a run."""
    return f"{MOUNT}/user/{host}/run"


class StoreOracle(Oracle):
    """Judges the steps of the store."""

    def _retired(self, process: Process, path: str) -> None:
        found, step = {*self.visible()}, int(path.split("/")[-2].rpartition("-")[2])
        if self._is_fenced(process):  # it may have decided that when others were there
            found |= {other for other, _ in self._let_go}
        newer = [other for other in found if other > step]
        if step not in process.forced and len(newer) < self.keep[process.job]:
            self.fault(f"{process.name} retires step {step} of the store, beside {newer}")
        super()._retired(process, path)

    def _removed(self, process: Process, path: str) -> None:
        """What another job has begun to upload goes at any time: `judge` looks at what counts."""


class DiskOracle(Oracle):
    """Judges the steps of one local disk.

    Attributes:
        store: of the store behind it.
        past: steps that a job on another disk has trained on without.
        is_left: whether such a job has the store.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.past: set[int] = set()
        self.is_left = False

    def newest(self) -> int:
        """Return the newest step that it promises."""
        return max((step for step in self.acked if not self.is_damaged(step)), default=0)

    def leave_behind(self) -> None:
        """Promise nothing more of what the store does not have."""
        self.past |= set(self.visible())
        self.acked.clear()
        self.is_left = True

    def lose(self, *, is_taken: bool) -> None:
        """Promise nothing: the disk is new. ``is_taken``: a job with another disk has the store."""
        self.past.clear()
        self.acked.clear()
        self.epochs.clear()
        self.is_left = is_taken
        self.newest_epoch = 0

    def acknowledge(self, step: int, value: int) -> None:
        """See `Oracle`; what others train on without is no part of the run."""
        if self.is_left:
            self.past.add(step)
            return
        super().acknowledge(step, value)
        if self.acked.get(step) == value:
            self.past.discard(step)

    def _published(self, process: Process, path: str) -> None:
        super()._published(process, path)
        if self.is_left:
            self.past.add(int(path.split("/")[-2].rpartition("-")[2]))

    def _retired(self, process: Process, path: str) -> None:
        step = int(path.split("/")[-2].rpartition("-")[2])
        keep, forced = self.keep[process.job], process.forced
        self.keep[process.job] = 1  # or as many as wait for their upload, which come and go
        process.forced = forced | {step} if step in self.past else forced
        try:
            super()._retired(process, path)
        finally:
            self.keep[process.job], process.forced = keep, forced
        self.past.discard(step)

    def _removed(self, process: Process, path: str) -> None:
        """As of the store."""


class TierOracle(RestoreOracle):
    """Both tiers; each change is looked at by whose place it is in."""

    def __init__(self, world: "TierWorld") -> None:
        self._world, self.newest_taken = world, 0
        self._knowing: set[int] = set()  # jobs whose disk knows of the one that has the store
        given = (world.scheduler, world.disk, world.root, world.counts)
        super().__init__(*given)
        self.store = StoreOracle(world.scheduler, world.bucket, world.root, world.counts)
        self.disks = {
            host: DiskOracle(world.scheduler, world.disk, place_of(host), world.counts)
            for host in HOSTS
        }
        for one in self._every():
            one.faults, one.saves, one.keep = self.faults, self.saves, self.keep

    def _every(self) -> list[Oracle]:
        return [self.store, *self.disks.values()]

    def of(self, job: int) -> DiskOracle:
        """Return that of a job's disk."""
        return self.disks[self._world.hosts[job]]

    def _at(self, path: str) -> Oracle | None:
        if f"{path}/".startswith(f"{self._world.root}/"):
            return self.store
        return next((d for h, d in self.disks.items() if path.startswith(place_of(h))), None)

    def watch(self, operation: str, path: str, second: str) -> None:
        """See `Oracle`; who takes the store leaves the other disks behind."""
        if (one := self._at(second or path)) is not None:
            one.watch(operation, path, second)
        place, _, job = second.rpartition("/.job-")
        if operation == "create" and isinstance(one, DiskOracle) and job == self._newest_job():
            self._knowing.add(self.scheduler.current.process.job)
        place, _, epoch = second.rpartition("/.epoch-")
        if place == self._world.root and int(epoch) > self.newest_taken:
            self.newest_taken = int(epoch)
            self._knowing.clear()
            mine = self.of(self.scheduler.current.process.job)
            mine.is_left = False
            for disk in self.disks.values():
                if disk is not mine:
                    disk.leave_behind()
        self.lower()

    def troubled(self) -> None:
        """Take note that the store has failed a job.

        One whose disk knows of the job that has the store goes on from there, and takes it later.
        """
        if (job := self.scheduler.current.process.job) in self._knowing:
            self.of(job).is_left = False

    def _newest_job(self) -> str:
        """Return the name of the job that has the store; empty: a power cut has left no word."""
        epoch = self._world.bucket.node(f"{self._world.root}/.epoch-{self.newest_taken:08d}")
        data = epoch.now if isinstance(epoch, SimFile) else b""
        with contextlib.suppress(ValueError):
            return str(json.loads(data).get("job", ""))
        return ""

    def tidying(self, place: str, step: int) -> None:
        """See `Oracle`."""
        if (one := self._at(place)) is not None:
            one.tidying(place, step)

    def take(self, place: str, job: int, epoch: int) -> None:
        """See `Oracle`."""
        if (one := self._at(place)) is not None:
            one.take(place, job, epoch)

    def damage(self, host: str, step: int, content: bytes) -> None:
        """Take note of a file on the disk of a host that has gone bad, and of what it holds now."""
        self.disks[host].damaged.add(content)
        self.lower()

    def acknowledge(self, step: int, value: int) -> None:
        """Take note of a step that is durable where its job asked for it."""
        job = self.scheduler.current.process.job
        if self._world.durable[job] == "store":
            self.store.acknowledge(step, value)
        self.of(job).acknowledge(step, value)

    def value_at(self, step: int) -> int | None:
        """See `Oracle`; of the disk of the job that asks."""
        here = self.of(self.scheduler.current.process.job).value_at(step)
        return self.store.value_at(step) if here is None else here

    def judge(self, when: str) -> None:
        """See `Oracle`."""
        for one in self._every():
            one.judge(when)

    def forget_epochs(self) -> None:
        """Every process is gone; so may an epoch be that nobody has synced, and what it left."""
        for one in self._every():
            one.newest_epoch = 0
        before, self.newest_taken = self.newest_taken, self._world.newest_epoch_there()
        for disk in self.disks.values() if self.newest_taken < before else ():
            disk.past.clear()

    def promised(self, job: int) -> int:
        """See `RestoreOracle`."""
        in_store = max(self.store.acked, default=0) if self._world.durable[job] == "store" else 0
        return max(self.of(job).newest(), in_store)


class TierRank(Rank):
    """One rank, of a run with a local disk."""

    close_s = STOP_S  # it waits for the end of its upload, too

    def _opened(self, keep: Keep, **more: Any) -> Checkpointer:
        world = self._tiers._world
        number = self._job.number
        given: Mapping[str, Any] = {
            "local": world.local_of(number),
            "durable": world.durable[number],
            "drain_s": world.drain_s[number],
        }
        return super()._opened(keep | Keep.local(world.local_steps), **given)

    @property
    def _tiers(self) -> TierOracle:
        return cast(TierOracle, self._oracle)

    def _restored_as_promised(self, checkpointer: Checkpointer) -> int:
        self._tiers.restoring(self._process)
        try:
            step = Rank._restored(self, checkpointer)
        except (CorruptError, MismatchError, NotCommittedError, OptionError) as error:
            promised = self._tiers.restored(self._process)
            may_fail = isinstance(error, CorruptError) and self._oracle.is_troubled
            if promised and not may_fail:
                self._oracle.fault(f"{self._process.name} cannot restore step {promised}: {error}")
            raise
        run = checkpointer._tiers
        assert run is not None
        self._process.forced |= run.store.damaged | run._past
        promised = self._tiers.restored(self._process)
        if step < promised and promised not in self._process.forced:
            self._oracle.fault(f"{self._process.name} restores step {step}, not {promised}")
        return step

    def _restored(self, checkpointer: Checkpointer) -> int:
        oracle, job = self._tiers, self._job
        past = {*oracle.of(job.number).past}
        # Others may let go of it meanwhile, and save another one of its number.
        there = {s: oracle.store.value_at(s) for s in past | {*oracle.store.visible()}}
        step = self._restored_as_promised(checkpointer)
        disk, value = oracle.of(job.number), self._into["value"]
        is_past = step in past and value not in (there[step], oracle.store.value_at(step))
        if is_past and self._process.rank == 0 and oracle._world.durable[job.number] == "store":
            oracle.fault(f"{self._process.name} restores step {step}, of another past")
        found = {oracle.store.value_at(step), disk.value_at(step), there.get(step)}
        if step and self._into["value"] not in found and found != {None}:
            oracle.fault(f"{self._process.name} restores {self._into} of step {step}, not {found}")
        return step

    def _closed(self) -> None:
        """See `Rank`: then the store has what the disk has, if no newer job has the store."""
        oracle, disk = self._tiers, self._tiers.of(self._job.number)
        step = disk.newest()
        value = disk.acked.get(step, 0)
        is_own = self._process.rank == 0 and value // 1000 == self._job.number  # else it may not
        there = oracle.store.visible()
        if (
            step
            and is_own
            and not oracle.store._is_fenced(self._process)
            and max(there, default=0) <= step
            and oracle.store.value_at(step) != value
        ):
            oracle.fault(f"{self._process.name} has closed, and the store lacks step {step}")

    def _acknowledge(self, act: str, step: int, value: int) -> None:
        if act == "step":
            self._tiers.of(self._job.number).acknowledge(step, value)
        else:
            super()._acknowledge(act, step, value)


class TierWorld(World):
    """One seed's world, before a store of objects."""

    rank_kind: type[Rank] = TierRank
    host_names = HOSTS
    aims = ("", "", "", "publish", "bar", "put", "list", "delete", "link", "unlink", "rename")
    troubles = ("fail", "fail", "lost", "again", "late", "slow")

    def __init__(self, seed: int, counts: Counter[str], *, traced: bool = False) -> None:
        super().__init__(seed, counts, traced=traced)
        self._damages = random.Random(f"damage {seed}")
        if isinstance(self.bucket, Bucket):
            self.bucket.keeps_folders = random.Random(f"folders {seed}").random() < 0.3

    def _place(self) -> str:
        self.disk = self._new_disk()
        root = self._place_behind()
        for place in (self.disk, self.bucket):
            place.clock_off_s += self.rng.choice((0.0, 0.0, -90000.0, 7200.0, 1e6))
        for host in self.host_names:
            self.disk.make(f"{MOUNT}/user/{host}", durable=True)
        self.hosts: list[str] = []  # of each job
        self.durable: list[str] = []
        self.drain_s: list[float] = []
        self.local_steps = self.rng.choice((1, 1, 2, 3))
        self._down_until = 0.0
        return root

    def _new_disk(self) -> Disk:
        return Disk(self.scheduler)

    def local_of(self, job: int) -> str:
        """Return the local directory of a job."""
        return place_of(self.hosts[job])

    def _place_behind(self) -> str:
        bucket = Bucket(self.scheduler)
        bucket.watch, bucket.trouble = self._watch, self._trouble_of_store
        self.bucket = bucket
        return f"{BASE}/user/run"

    def newest_epoch_there(self) -> int:
        """Return the newest epoch that a crash has left in the store."""
        return cast(TierOracle, self.oracle).newest_taken

    def _oracle(self) -> Oracle:
        return TierOracle(self)

    def _codec(self) -> str:
        return "raw"

    def _job(self, number: int, keep: int, codec: Any) -> Job:
        job = super()._job(number, keep, codec)
        job.kind, job.stride = "run", 1
        self.hosts.append(self.rng.choice("aaab"))
        self.durable.append(self.rng.choice(("store", "local")))
        self.drain_s.append(self.rng.choice((0.5, 60.0, 600.0)))
        return job

    def _jobs_beside_a_link(self) -> list[Job]:
        return self.jobs  # there are no links

    def _let_some_replace(self, rng: Any) -> None:
        """Replace nothing: that is the matter of the other worlds."""

    def _trouble(self, operation: str, path: str) -> tuple[str, int] | None:
        found = super()._trouble(operation, path)
        return found and (DISK_TROUBLES.get(found[0], found[0]), found[1])

    def _trouble_of_store(self, operation: str, path: str) -> tuple[str, int] | None:
        tiers = self.oracle if isinstance(self.oracle, TierOracle) else None
        if self.scheduler.now < self._down_until:
            if tiers:
                tiers.troubled()
            return "fail", errno.EIO
        kind, number = super()._trouble(operation, path) or ("", 0)
        if kind and tiers:
            tiers.troubled()
        if kind == "late":
            number = int(10 ** self.rng.uniform(0, 5.5))
        elif kind == "fail" and self.rng.random() < 0.3:
            self.counts["the store does not answer"] += 1
            self._down_until = self.scheduler.now + 10 ** self.rng.uniform(0, 4)
        return (kind, number) if kind else None

    def _pause_s(self, job: Job) -> float:
        self.oracle.judge("between two jobs")
        if self.rng.random() < 0.15:
            self._lose_a_disk(self.rng.choice(self.host_names))
        if self._damages.random() < 0.15:
            self._damage_a_file(self._damages.choice(self.host_names))
        return super()._pause_s(job)

    def _lose_a_disk(self, host: str) -> None:
        """Put a new disk in a host, which ends what runs there."""
        for job in self.jobs:
            if self.hosts[job.number] == host:
                for process in job.processes:
                    self._end(process)
        above = cast(Directory, self.disk.node(f"{MOUNT}/user"))
        above.now[host] = above.durable[host] = SimDirectory(cast(Disk, self.disk).time())
        oracle = cast(TierOracle, self.oracle)
        oracle.disks[host].lose(is_taken=oracle.newest_taken > 0)
        self.scheduler.note(f"UPSET host {host} has a new disk")
        self.counts["lost disks"] += 1

    def _damage_a_file(self, host: str) -> None:
        """Change a byte of a file of a step, as a bad disk does."""
        steps = self.disk.node(f"{MOUNT}/user/{host}/run")
        if not (files := [(path, file) for path, file in files_of(steps) if file.now]):
            return
        path, file = self._damages.choice(files)
        content = bytearray(file.now)
        content[self._damages.randrange(len(content))] ^= 1 << self._damages.randrange(8)
        file.now = file.durable = bytes(content)
        file.pending.clear()
        oracle = cast(TierOracle, self.oracle)
        oracle.damage(host, step_of(path.split("/")[0]) or 0, file.now)
        self.scheduler.note(f"UPSET {path} of host {host} is damaged")
        self.counts["damaged files"] += 1

    def _cut_power(self) -> None:
        super()._cut_power()
        cast(TierOracle, self.oracle).forget_epochs()


class SharedDiskWorld(TierWorld):
    """One seed's world, before a disk that all hosts share."""

    aims = World.aims

    def _place_behind(self) -> str:
        self.bucket = cast(Disk, self.disk)
        self.bucket.make(SHARED, durable=True)
        return f"{SHARED}/run"

    def _trouble(self, operation: str, path: str) -> tuple[str, int] | None:
        if not path.startswith(SHARED):
            return super()._trouble(operation, path)
        kind, number = self._trouble_of_store(operation, path) or ("", 0)
        return (DISK_TROUBLES.get(kind, kind), number) if kind else None

    def newest_epoch_there(self) -> int:
        """See `TierWorld`: here, one that nobody has synced may be gone."""
        run = self.bucket.node(self.root)
        names = run.now if isinstance(run, Directory) else ()
        epochs = (name.removeprefix(".epoch-") for name in names if name.startswith(".epoch-"))
        return max(map(int, epochs), default=0)
