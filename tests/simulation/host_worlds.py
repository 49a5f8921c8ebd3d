"""Worlds of runs with a local disk before the store, where each host has a disk of its own.

Three hosts; the ranks of a job run on one to three of them, and each sees the disk of its host
alone, at a path that is the same on all. The coordinator has MANIFEST, every host its own files.
A host may lose its disk, and what runs there, at the end of any job.

What a local disk promises is kept as long as all hosts that have a part of a step are there, and
until a job goes on without one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from crash.disk_model import Directory
from holdfast import Checkpointer
from holdfast.engine.removal import ANNOUNCED
from holdfast.errors import CorruptError
from holdfast.format.names import step_name, step_of

from . import payload
from .actors import Process
from .disk import MOUNT, Disk, SimDirectory, SimFile
from .oracle import Oracle, RestoreOracle
from .ranks import RankGroup
from .tier_worlds import SharedDiskWorld, StoreOracle, TierRank
from .training import Job, Rank

HOSTS = ("a", "b", "c")
LOCAL = f"{MOUNT}/user/local"  # where a process sees the disk of its host


class DiskOfHosts(Disk):
    """The disks of all hosts, and one that all share; ``host`` says where the caller runs."""

    host: Callable[[], str]

    def real(self, path: str) -> str:
        """Return where a path of the process that asks is."""
        if not f"{path}/".startswith(f"{LOCAL}/"):
            return path
        return f"{MOUNT}/user/{self.host()}{path[len(LOCAL) :]}"

    def node(self, path: str) -> Any:
        """See `Disk`."""
        return super().node(self.real(path))


class SendingGroup(RankGroup):
    """Ranks that can send to each other: the payload stands for what they send."""

    sends = True


@dataclass(frozen=True, slots=True)
class Promise:
    """A step that is durable on local disks: what it holds, and which hosts have a part of it."""

    value: int
    save_id: str
    lead: str  # the host that has MANIFEST
    hosts: frozenset[str]


class HostsOracle(RestoreOracle):
    """Judges the store as where a job is on one host, and the local disks of all hosts together.

    Attributes:
        promises: of each step that was acknowledged by the local disks.
        past: (step, value) that a job with the store goes on without.
    """

    def __init__(self, world: "HostsWorld") -> None:
        self._world, self.newest_taken, self._newest_job = world, 0, -1
        super().__init__(world.scheduler, world.disk, world.root, world.counts)
        self.store = StoreOracle(world.scheduler, world.bucket, world.root, world.counts)
        self.store.faults, self.store.saves, self.store.keep = self.faults, self.saves, self.keep
        self.promises: dict[int, Promise] = {}
        self.past: set[tuple[int, int]] = set()
        self._left = frozenset[str]()  # hosts that the job which has the store does not run on
        self._harmed: set[int] = set()  # jobs that were there when a host of theirs lost data

    # What is told.

    def take(self, place: str, job: int, epoch: int) -> None:
        """See `Oracle`."""
        if place == self._world.root:
            self.store.take(place, job, epoch)

    def tidying(self, place: str, step: int) -> None:
        """See `Oracle`."""
        process = self.scheduler.current.process
        if place == self._world.root:
            self.store.tidying(place, step)
        elif (value := self._local_values(step).get(self._world.host_of(process))) is not None:
            self._promise(step, value)

    def acknowledge(self, step: int, value: int) -> None:
        """See `Oracle`; a step that was acknowledged by the store was so by the disks before."""
        if self._world.durable[self.scheduler.current.process.job] == "store":
            self.store.acknowledge(step, value)
        self._promise(step, value)

    def acknowledge_here(self, step: int, value: int) -> None:
        """Take note of a step that is durable on the local disks alone."""
        self._promise(step, value)

    def _promise(self, step: int, value: int) -> None:
        process = self.scheduler.current.process
        if process.job < self._newest_job:
            return  # a newer job has gone on without it
        lead = self._world.places[process.job][0]
        if lead in self._left:
            return  # the job trains on without having the store, and others in its place
        manifest = self._manifest(lead, step)
        if manifest is None or self._value(manifest) != value:
            return  # let go of by now
        holders = [self._holders(step, name) for name in manifest.file_names]
        mine = self._world.hosts_of(process.job)
        if not all(here & mine for here in holders):
            if process.job not in self._harmed:
                self.fault(f"step {step} of {process.name} is acknowledged, and lacks a file")
            return
        self.counts["acknowledged"] += step not in self.promises
        hosts = frozenset({lead, *(min(here & mine) for here in holders)})
        self.promises[step] = Promise(value, manifest.table.header.save_id, lead, hosts)

    def begun(self, process: Process, step: int) -> None:
        """Take note of a job that goes on from a step: not with what it has not seen."""
        self._newest_job = max(self._newest_job, process.job)
        if process.job == self._newest_job:
            hosts = self._world.hosts_of(process.job)
            for known, promise in list(self.promises.items()):
                if known > step or not promise.hosts <= hosts:
                    del self.promises[known]
            self.lower()

    def gone_back(self, process: Process, step: int) -> None:
        """Take note of a job that has let go of a step, and of all later ones."""
        if process.rank or process.job < self._newest_job:
            return
        self.counts["went back"] += 1
        for host in self._world.hosts_of(process.job):
            left = [s for s in self._steps(host) if s >= step and self._manifest(host, s)]
            if left:
                self.fault(f"{process.name} has gone back before step {step}; {host} has {left}")
        if left := [s for s in self.store.visible() if s >= step]:
            self.fault(f"{process.name} has gone back before step {step}; the store has {left}")

    def promised(self, job: int) -> int:
        """See `RestoreOracle`."""
        hosts = self._world.hosts_of(job)
        here = [step for step, promise in self.promises.items() if promise.hosts <= hosts]
        in_store = [*self.store.acked] if self._world.durable[job] == "store" else []
        return max([*here, *in_store], default=0)

    def lose(self, host: str) -> None:
        """Promise nothing more of what a host had a part of."""
        self._harm(host)
        for step in [s for s, promise in self.promises.items() if host in promise.hosts]:
            del self.promises[step]

    def damage(self, host: str, step: int, content: bytes) -> None:
        """Promise nothing more of a step of which a host has a file that has gone bad."""
        self.damaged.add(content)
        self._harm(host)
        if (promise := self.promises.get(step)) is not None and host in promise.hosts:
            del self.promises[step]
        self.lower()

    def _harm(self, host: str) -> None:
        jobs = self._world.jobs
        self._harmed |= {
            j.number for j in jobs if j.processes and host in self._world.hosts_of(j.number)
        }

    def forget_epochs(self) -> None:
        """Every process is gone; so may an epoch be that nobody has synced, and what it left."""
        self.store.newest_epoch = 0
        before, self.newest_taken = self.newest_taken, self._world.newest_epoch_there()
        if self.newest_taken < before:
            self.past.clear()

    # What is seen.

    def watch(self, operation: str, path: str, second: str) -> None:
        """See `Oracle`; who takes the store leaves the disks of other hosts behind."""
        if f"{second or path}/".startswith(f"{self._world.root}/"):
            self.store.watch(operation, path, second)
        else:
            self._see_local(operation, path, second)
        place, _, epoch = second.rpartition("/.epoch-")
        if place == self._world.root and int(epoch) > self.newest_taken:
            self.newest_taken = int(epoch)
            self._leave_behind(self._world.hosts_of(self.scheduler.current.process.job))
        self.lower()

    def _leave_behind(self, mine: frozenset[str]) -> None:
        for step in [s for s, promise in self.promises.items() if not promise.hosts <= mine]:
            del self.promises[step]
        self._left = frozenset(HOSTS) - mine
        for host in self._left:
            for step in self._steps(host):
                if (value := self._local_values(step)[host]) is not None:
                    self.past.add((step, value))

    def _see_local(self, operation: str, path: str, second: str) -> None:
        """Look whether a part of a step is about to go."""
        parts = path.split("/")  # "", disk, user, the host, run, the step, data, the save
        is_data = operation == "unlink" and path.endswith(".hf") and ANNOUNCED not in path
        if is_data or (operation == "rename before" and ANNOUNCED in second):
            self._part_goes(parts[3], parts[5], parts[7])
        elif operation == "unlink" and path.endswith("/MANIFEST"):
            manifest = self._manifest(parts[3], step_of(parts[5]) or 0)
            if manifest is not None:
                save_id = manifest.table.header.save_id
                self._part_goes(parts[3], parts[5], save_id, is_manifest=True)

    def _part_goes(self, host: str, name: str, save_id: str, *, is_manifest: bool = False) -> None:
        step, process = step_of(name) or 0, self.scheduler.current.process
        promise = self.promises.get(step)
        if promise is None or promise.save_id != save_id or host not in promise.hosts:
            return
        self.counts["retired"] += 1
        is_known = step in process.forced or process.job in self._harmed
        if is_manifest and process.job < self._newest_job:  # the one gap that docs/commit.md names
            self._late[process.job] += 1
            self.counts["retired late"] += 1
            is_known |= self._late[process.job] == 1
        if not (is_known or any(s > step for s in self._whole_steps(process))):
            self.fault(f"{process.name} lets go of step {step} on {host}, the newest there is")
        del self.promises[step]

    def judge(self, when: str) -> None:
        """See `Oracle`."""
        self.store.judge(when)
        for step, promise in self.promises.items():
            if not self._is_whole(step, promise):
                self.fault(f"{when}: step {step} was acknowledged, and is not whole: {promise}")

    def value_at(self, step: int) -> int | None:
        """See `Oracle`: of any host."""
        return next((v for v in self._local_values(step).values() if v is not None), None)

    def values_at(self, step: int) -> set[int]:
        """Return all that may be found as a step: where hosts were left behind, several."""
        found = {*self._local_values(step).values(), self.store.value_at(step)}
        return {value for value in found if value is not None}

    def _is_whole(self, step: int, promise: Promise) -> bool:
        manifest = self._manifest(promise.lead, step)
        if manifest is None or manifest.table.header.save_id != promise.save_id:
            return False
        return all(self._holders(step, name) & promise.hosts for name in manifest.file_names)

    def _whole_steps(self, process: Process) -> set[int]:
        """Return the steps that are durable on the disks of a process's job."""
        hosts, found = self._world.hosts_of(process.job), set[int]()
        for host in hosts:
            for step in self._steps(host):
                place = self._disk.node(f"{MOUNT}/user/{host}/run/{step_name(step)}")
                manifest = self._manifest(host, step)
                is_durable = isinstance(place, Directory) and "MANIFEST" in place.durable
                names = manifest.file_names if manifest is not None and is_durable else ()
                if names and all(self._holders(step, name) & hosts for name in names):
                    found.add(step)
        return found

    def _steps(self, host: str) -> list[int]:
        run = self._disk.node(f"{MOUNT}/user/{host}/run")
        names = run.now if isinstance(run, Directory) else ()
        return [step for name in names if (step := step_of(name)) is not None]

    def _local_values(self, step: int) -> dict[str, int | None]:
        return {host: self._value(self._manifest(host, step)) for host in HOSTS}

    def _manifest(self, host: str, step: int) -> Any:
        node = self._disk.node(f"{MOUNT}/user/{host}/run/{step_name(step)}/MANIFEST")
        if not isinstance(node, SimFile) or node.now in self.damaged:
            return None
        try:
            return payload.decode_manifest(node.now, host)
        except CorruptError:
            self.fault(f"MANIFEST of step {step} on {host} is torn")
            return None

    def _holders(self, step: int, name: str) -> frozenset[str]:
        """Return the hosts that have a file, whole."""
        saved = self.saves[name.split("/")[1]]
        rank, number = name.split("/")[2].removesuffix(".hf").split("-")
        content = payload.content_of(name.split("/")[1], int(rank), int(number), saved.value)
        found = set()
        for host in HOSTS:
            node = self._disk.node(f"{MOUNT}/user/{host}/run/{step_name(step)}/{name}")
            if isinstance(node, SimFile) and node.now == content:
                found.add(host)
        return frozenset(found)


class HostRank(TierRank):
    """One rank, of a run with a disk on each host."""

    @property
    def _hosts(self) -> HostsOracle:
        return cast(HostsOracle, self._oracle)

    def _restored(self, checkpointer: Checkpointer) -> int:
        oracle, job = self._hosts, self._job
        past = {*oracle.past}
        # Others may let go of it meanwhile, and save another one of its number.
        steps = {s for s, _ in past} | {*oracle.store.visible()}
        there = {s: oracle.store.value_at(s) for s in steps}
        step = self._restored_as_promised(checkpointer)
        value = self._into["value"]
        is_past = (step, value) in past and value not in (there[step], oracle.store.value_at(step))
        if is_past and self._process.rank == 0 and oracle._world.durable[job.number] == "store":
            oracle.fault(f"{self._process.name} restores step {step}, of another past")
        found = oracle.values_at(step)
        if step and found and value not in found | {there.get(step)}:
            oracle.fault(f"{self._process.name} restores {self._into} of step {step}, not {found}")
        oracle.begun(self._process, step)
        return step

    def _closed(self) -> None:
        """See `Rank`: then the store has what the disks have."""
        oracle = self._hosts
        step = max(oracle.promises, default=0)
        there = oracle.store.visible()
        if not step or self._process.rank or max(there, default=0) > step:
            return
        value = oracle.promises[step].value
        is_own = value // 1000 == self._job.number  # else it may not
        if is_own and oracle.store.value_at(step) != value:
            oracle.fault(f"{self._process.name} has closed, and the store lacks step {step}")

    def _go_back(self, checkpointer: Checkpointer, step: int) -> int:
        """Let go of the step that was restored, on all hosts."""
        if not step:
            return step
        self._process.forced |= set(range(step, step + 9))
        if not self._try(lambda: checkpointer.retire_after(step - 1)):
            return step
        self._hosts.gone_back(self._process, step)
        return step - 1

    def _acknowledge(self, act: str, step: int, value: int) -> None:
        if act == "step":
            self._hosts.acknowledge_here(step, value)
        else:
            Rank._acknowledge(self, act, step, value)


class HostsWorld(SharedDiskWorld):
    """One seed's world."""

    group_kind = SendingGroup
    rank_kind: type[Rank] = HostRank
    host_names = HOSTS

    def _place(self) -> str:
        self.places: list[list[str]] = []  # of each job, the host of each rank
        return super()._place()

    def _new_disk(self) -> Disk:
        disk = DiskOfHosts(self.scheduler)
        disk.host = lambda: self.host_of(self.scheduler.current.process)
        return disk

    def host_of(self, process: Process) -> str:
        """Return where a process runs."""
        return self.places[process.job][process.rank]

    def hosts_of(self, job: int) -> frozenset[str]:
        """Return where the ranks of a job run."""
        return frozenset(self.places[job])

    def _oracle(self) -> Oracle:
        return HostsOracle(self)

    def local_of(self, job: int) -> str:
        """See `TierWorld`."""
        return f"{LOCAL}/run"

    def _job(self, number: int, keep: int, codec: Any) -> Job:
        job, rng = super()._job(number, keep, codec), self.rng
        job.size = rng.choice((1, 2, 2, 3, 3, 4))
        some = rng.sample(HOSTS, rng.choice((1, 2, 2, 3)))
        if rng.random() < 0.1:
            job.acts.insert(0, "go back")
        self.places.append([some[0], *(rng.choice(some) for _ in range(job.size - 1))])
        return job

    def _watch(self, operation: str, path: str, second: str) -> None:
        real = cast(DiskOfHosts, self.disk).real
        super()._watch(operation, real(path), real(second))

    def _lose_a_disk(self, host: str) -> None:
        for job in self.jobs:
            for process in job.processes:
                if self.host_of(process) == host:
                    self._end(process)
        above = cast(Directory, self.disk.node(f"{MOUNT}/user"))
        above.now[host] = above.durable[host] = SimDirectory(cast(Disk, self.disk).time())
        cast(HostsOracle, self.oracle).lose(host)
        self.scheduler.note(f"UPSET host {host} has a new disk")
        self.counts["lost disks"] += 1
