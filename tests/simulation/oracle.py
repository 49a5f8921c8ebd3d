"""What every world has to keep: the promises of docs/reliability.md, as the disk shows them.

Judges without the product's help: it looks at the disk itself, and knows what every save wrote.

- P1 What was acknowledged is there, bit-exact, after any crash; unless it was let go on demand, or
  by policy when a newer one was durable, or replaced by one that was published later.
- P2 Every visible step is whole and of one save, and what it is made from is there.
- P4 Nobody waits past a deadline; what the others were told is too late is not published.
- P6 Nothing that a visible step is made from is let go, nor the newest durable step.
- A job whose successor has taken the run publishes nothing, and lets nothing go but the one step
  that it may have been at (docs/commit.md, One job at a time).
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crash.disk_model import Directory
from holdfast.engine.removal import ANNOUNCED
from holdfast.errors import CorruptError, VersionError
from holdfast.format.manifest import Manifest
from holdfast.format.names import step_name, step_of
from holdfast.runs.directory import GRACE_S
from holdfast.saving import handle as handle_module

from . import payload
from .actors import Process, Scheduler
from .bucket import Bucket
from .disk import Disk, SimFile

HINT = re.compile(rb"step-\d{8}\n")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save of a job wrote."""

    step: int
    value: int
    job: int
    began: float


class Oracle:
    """Watches one world; ``faults`` are the promises broken."""

    def __init__(
        self, scheduler: Scheduler, disk: Disk | Bucket, root: str, counts: Counter[str]
    ) -> None:
        self.scheduler, self._disk, self._root = scheduler, disk, root
        self.counts, self._jumps = counts, counts["jump"]
        self._troubles = _troubles(counts)
        self.faults: list[str] = []
        self.saves: dict[str, Saved] = {}
        self.acked: dict[int, int] = {}  # step → value
        self._published_values: dict[int, list[int]] = {}  # step → one after the other
        self._let_go: set[tuple[int, int]] = set()
        self._given_up: set[int] = set()  # steps found damaged, or gone back behind, by some job
        self.newest_epoch = 0
        self._taken_s = 0.0  # when that was taken
        self.epochs: dict[int, int] = {}  # job → epoch
        self.keep: dict[int, int] = {}  # job → how many steps its policy keeps
        self._retired_saves: set[str] = set()  # that a MANIFEST named
        self._left_at: dict[int, float] = {}  # steps, and when they were last let go of
        self._late: Counter[int] = Counter()
        self._taken: list[tuple[float, int]] = []  # when each epoch was taken
        self.damaged: set[bytes] = set()  # what files hold that have gone bad

    def fault(self, text: str) -> None:
        """Note a broken promise."""
        self.scheduler.note(f"FAULT {text}")
        self.faults.append(f"call {self.scheduler.calls}: {text}")

    @property
    def is_troubled(self) -> bool:
        """Whether a call has failed in this world, or its answer was lost."""
        return _troubles(self.counts) > self._troubles

    def saving(self, save_id: str) -> None:
        """Take note of a save that begins."""
        process = self.scheduler.current.process
        self.saves[save_id] = Saved(*process.saving, process.job, self.scheduler.now)

    def take(self, place: str, job: int, epoch: int) -> None:
        """Take note of an epoch of a run that a job holds."""
        self.epochs[job] = epoch
        self.newest_epoch = max(self.newest_epoch, epoch)
        self._taken_s = self.scheduler.now
        self._taken.append((self.scheduler.now, epoch))
        self.counts["epochs"] += 1

    def acknowledge(self, step: int, value: int) -> None:
        """Take note of a save that has returned."""
        before = self.acked.get(step)
        if before is not None and self._order(step, before) > self._order(step, value):
            return  # replaced, and the one in its place was told first
        if (step, value) not in self._let_go and before != value:
            self.scheduler.note(f"step {step} is acknowledged")
            self.counts["acknowledged"] += 1
            self.acked[step] = value

    def tidying(self, place: str, step: int) -> None:
        """Take note of a step of a run that is committed, before anything is let go for it."""
        self.scheduler.current.process.tidied_at = self.scheduler.now
        value = self.value_at(step)
        if value is not None:
            self.acknowledge(step, value)

    def watch(self, operation: str, path: str, second: str) -> None:
        """Look at a change of the disk that is about to stand."""
        process = self.scheduler.current.process
        if operation == "link" and second.endswith("/MANIFEST"):
            self._published(process, second)
            self._note_published(process, path, second)
        elif operation == "rename before" and second.endswith("/MANIFEST"):
            self._replaced(process, path, second)
        elif operation == "unlink" and path.endswith("/MANIFEST"):
            self._retired(process, path)
        elif operation == "rename before" and ANNOUNCED in second:
            for file in getattr(self._disk.node(path), "now", ()):
                self._removed(process, f"{path}/{file}")
        elif operation == "unlink" and path.endswith(".hf"):
            self._disk.free_bytes = 1 << 40
            if ANNOUNCED not in path:
                self._removed(process, path)

    def _published(self, process: Process, path: str) -> None:
        self.counts["commits"] += 1
        if self._is_fenced(process) and not process.in_call:  # `_replaced` looks at those
            self.fault(f"{process.name} publishes {path} after a newer epoch")
        handle = handle_module._last
        is_other = process.in_call or handle is None or handle.path != path[: -len("/MANIFEST")]
        if is_other or handle is None or handle.done():
            return
        if self._disk.link_began > handle.deadline + 0.01:
            self.fault(f"{process.name} publishes {path} after its deadline")

    def _replaced(self, process: Process, path: str, second: str) -> None:
        """Look at a MANIFEST that is about to take another one's place."""
        step = step_of(second.split("/")[-2])
        old = self.visible().get(step or -1)
        if old is not None:
            self._retired_saves.add(old.table.header.save_id)
        is_excused = self._disk.has_gap and self._disk.link_began <= self._taken_s
        if path.endswith(".over") and not is_excused:
            self._published(process, second)
            if self.newest_epoch > self.epochs.get(process.job, 0):
                self.fault(f"{process.name} replaces {second} in a run of another job")
        self._note_published(process, path, second)

    def _note_published(self, process: Process, path: str, second: str) -> None:
        step, node = step_of(second.split("/")[-2]), self._disk.node(path)
        if step is not None and isinstance(node, SimFile):
            try:
                value = self._value(manifest := payload.decode_manifest(node.now, path))
            except CorruptError:
                return  # judged when it is visible
            if (step_of(_base(manifest)) or 0) > step:
                self.fault(f"{process.name} makes step {step} from {_base(manifest)}")
            if value is not None:
                self._published_values.setdefault(step, []).append(value)

    def _order(self, step: int, value: int | None) -> int:
        """Say when a value was published for the last time; -1: never."""
        values = self._published_values.get(step, [])
        return max((n for n, known in enumerate(values) if known == value), default=-1)

    def _retired(self, process: Process, path: str) -> None:
        step = step_of(path.split("/")[-2])
        if step is None:
            return
        self.counts["retired"] += 1
        process.retired.add(step)
        self._left_at[step] = self.scheduler.now
        found = self.visible()
        value = self._value(manifest := found.get(step))
        if manifest is not None:
            self._retired_saves.add(manifest.table.header.save_id)
        if self._is_fenced(process):
            self._late[process.job] += not self._was_sent_before(process)
            self.counts["retired late"] += 1
            if self._late[process.job] > 1:
                self.fault(f"{process.name} goes on to retire after a newer epoch")
        elif step not in process.forced:
            newer = [other for other in found if other > step]
            if len(newer) < self.keep[process.job] or not any(map(self._is_durable, newer)):
                self.fault(f"{process.name} retires step {step}, beside {newer}; {self.acked}")
        self._given_up |= process.forced
        links = [(s, m) for s, m in found.items() if m and _base(m) == step_name(step)]
        needed = [s for s, m in links if not self._is_excused(s, m)]
        if needed and not self._is_fenced(process):
            self.fault(f"{process.name} retires step {step}, which steps {needed} are made from")
        if value is not None:
            self._let_go |= {(step, known) for known in self._published_values.pop(step, [])}
            self._let_go.add((step, value))
            self.acked.pop(step, None)
        elif self.is_damaged(step) or self.acked.get(step) == value:
            self.acked.pop(step, None)  # what is damaged may not say any more what it held

    def _removed(self, process: Process, path: str) -> None:
        """Data of another job goes with its step, by a rebase, or when it is a day old.

        Of two jobs that let go of one step, either may remove what was there before.
        Where the disk's clock has jumped that cannot be asked for: then a save may have to fail. So
        may one that goes on after it was frozen for a day, once tidying has begun.
        """
        *_, step, _, save_id, _ = path.split("/")
        file = self._disk.node(path)
        save, old = self.saves[save_id], self.scheduler.now - GRACE_S
        is_young = isinstance(file, SimFile) and file.written > old
        is_late = is_young and save.began <= old and file.written >= process.tidied_at
        is_own = process.is_plain or save.job == process.job
        number = step_of(step)
        is_let_go = number in process.retired or save_id in self._retired_saves
        is_let_go |= number is not None and save.began <= self._left_at.get(number, -1.0)
        if is_young and not (is_own or is_let_go or is_late or self.counts["jump"] > self._jumps):
            self.fault(f"{process.name} sweeps {path}, which is young")

    def _is_fenced(self, process: Process) -> bool:
        return not process.is_plain and self.newest_epoch > self.epochs.get(process.job, 0)

    def _was_sent_before(self, process: Process) -> bool:
        """Return whether it is a request that was on its way when a newer job took the run."""
        mine = self.epochs.get(process.job, 0)
        taken = min((at for at, epoch in self._taken if epoch > mine), default=0.0)
        return process.sent_s is not None and process.sent_s <= taken

    def _value(self, manifest: Manifest | None) -> int | None:
        saved = manifest and self.saves.get(manifest.table.header.save_id)
        return saved.value if saved else None

    def _is_durable(self, step: int) -> bool:
        """Whether a power cut leaves a step there, as far as its own and its run's entries go."""
        run = self._disk.node(self._root)
        place = run.durable.get(step_name(step)) if isinstance(run, Directory) else None
        return isinstance(place, Directory) and "MANIFEST" in place.durable

    def value_at(self, step: int) -> int | None:
        """Return what a visible step holds."""
        return self._value(self.visible().get(step))

    def visible(self) -> dict[int, Manifest | None]:
        """Return the visible steps; None: its MANIFEST is torn."""
        run, found = self._disk.node(self._root), dict[int, Manifest | None]()
        for name, node in run.now.items() if isinstance(run, Directory) else ():
            step = step_of(name)
            file = node.now.get("MANIFEST") if isinstance(node, Directory) else None
            if step is not None and isinstance(file, SimFile):
                try:
                    found[step] = payload.decode_manifest(file.now, name)
                except (CorruptError, VersionError):
                    found[step] = None
        return found

    def judge(self, when: str) -> None:
        """Look at all there is."""
        found = self.visible()
        torn = {step for step, manifest in found.items() if self._torn(step, manifest, when)}
        for step, value in self.acked.items():
            manifest = found.get(step)
            found_value = self._value(manifest)
            is_newer = self._order(step, found_value) > self._order(step, value)
            if step not in torn and found_value != value and not is_newer:
                self.fault(f"{when}: step {step} was acknowledged, but there are {sorted(found)}")
        for step, manifest in found.items():
            if manifest is not None and (base := manifest.table.header.base):
                below = found.get(step_of(base.name) or -1)
                digest = below and payload.content_digest(below.table)
                is_bad = digest != base.digest and step not in torn
                if is_bad and not self._is_excused(step, manifest):
                    self.fault(f"{when}: step {step} is made from {base.name}, which is gone")
        run = self._disk.node(self._root)
        hint = run.now.get("LATEST") if isinstance(run, Directory) else None
        if isinstance(hint, SimFile) and not HINT.fullmatch(hint.now):
            self.fault(f"{when}: LATEST says {hint.now!r}")

    def _is_excused(self, step: int, manifest: Manifest) -> bool:
        """Whether a step may lack its base: one of them was given up."""
        return not self._given_up.isdisjoint((step, step_of(_base(manifest))))

    def is_damaged(self, step: int) -> bool:
        """Whether a file of a step has gone bad since it was written."""
        place = self._disk.node(f"{self._root}/{step_name(step)}")
        return bool(self.damaged) and any(f.now in self.damaged for _, f in files_of(place))

    def _torn(self, step: int, manifest: Manifest | None, when: str) -> bool:
        """Whether a step is not whole, which is a fault."""
        where = f"{self._root}/{step_name(step)}"
        if self.is_damaged(step):
            return True
        if manifest is None:
            self.fault(f"{when}: the MANIFEST of step {step} is torn")
            return True
        header = manifest.table.header
        saved = self.saves[header.save_id]
        bad = [] if header.step == saved.step == step else ["its step"]
        for name in manifest.file_names:
            rank, number = name.split("/")[2].removesuffix(".hf").split("-")
            content = payload.content_of(header.save_id, int(rank), int(number), saved.value)
            node = self._disk.node(f"{where}/{name}")
            if not isinstance(node, SimFile) or node.now != content:
                bad.append(name)
        shards = len(manifest.table.shard_tensor)
        if shards != header.world_size:
            bad.append(f"{shards} pieces of {header.world_size}")
        if bad:
            self.fault(f"{when}: step {step} is not whole: {', '.join(bad)}")
        return bool(bad)


class RestoreOracle(Oracle):
    """An oracle that knows which step a job has to find when it restores."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._lowest: dict[Process, int] = {}  # that was promised since its restore began

    def promised(self, job: int) -> int:
        """Return the newest step that is promised to a job now."""
        raise NotImplementedError

    def restoring(self, process: Process) -> None:
        """Take note of a process that begins to restore."""
        self._lowest[process] = self.promised(process.job)

    def lower(self) -> None:
        """Take note of what is promised still, after a promise may have been given up."""
        for process, lowest in self._lowest.items():
            self._lowest[process] = min(lowest, self.promised(process.job))

    def restored(self, process: Process) -> int:
        """Return the least step that a process has to find, whenever it looked.

        A step may have been let go of since it began, and another one saved with its number.
        """
        self.lower()
        return self._lowest.pop(process)


def files_of(place: Any, name: str = "") -> Iterator[tuple[str, SimFile]]:
    """Give all MANIFESTs and data files below a directory, by their paths from there."""
    for entry, node in sorted(place.now.items()) if isinstance(place, Directory) else ():
        path = f"{name}/{entry}".lstrip("/")
        if isinstance(node, SimFile) and entry.endswith(("MANIFEST", ".hf")):
            yield path, node
        yield from files_of(node, path)


def _troubles(counts: Counter[str]) -> int:
    kinds = "calls fail", "calls lost", "calls late", "calls again", "the store does not answer"
    return sum(counts[kind] for kind in kinds)


def _base(manifest: Manifest) -> str:
    base = manifest.table.header.base
    return base.name if base else ""
