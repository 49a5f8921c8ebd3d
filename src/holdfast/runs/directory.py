"""The directory of a run: which steps are there, whether another fits, what is let go.

Knows names, sizes and the policy; no ranks, no tensors. Used by one thread at a time, but for
`steps` and `path`.
"""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from ..arguments import plain_number
from ..engine.check import lost_manifest
from ..engine.newest import steps_in
from ..engine.retire import GRACE_S, leaving, retire, revoke_links, sweep, sweep_pending
from ..errors import HoldfastError, OptionError, StoreError, shown
from ..format import spec
from ..format.names import LATEST_BYTES_MAX, LATEST_NAME, step_name, step_of
from ..format.progress import PROGRESS_PREFIX
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..loading.reach import Reach
from ..stores.base import list_if_there
from ..stores.url import open_store
from .described import Described
from .fence import PENDING_EPOCH_PREFIX, Fence
from .metrics_file import MetricsFile
from .place import Lack, Place
from .retention import Keep

if TYPE_CHECKING:
    from ..group.base import Group

logger = logging.getLogger("holdfast")

PENDING_LATEST_PREFIX = ".latest-"
_ROOM = (
    "The newest step is written before an old one is deleted, so n steps take the room of n + 1. "
    "Keep fewer steps, or free space for one more"
)


def checked_step(step: object, least: int = 0) -> int:
    """Return the number of a step, which may be NumPy's or a 0-d tensor.

    Raises:
        OptionError: it is none.
    """
    step = plain_number(step)
    if type(step) is not int or step < least:
        is_state = not isinstance(step, (int, float, str))
        order = ". The step comes first, then the state" if is_state else ""
        raise OptionError(f"step is {shown(step)}; expected an integer from {least}{order}")
    return step


class Run:
    """The directory that a `holdfast.Checkpointer` saves to.

    Attributes:
        keep: the policy.
        damaged: steps that could not be restored; the same on every rank.
        described: what the policy looks at.
        fence: who may write here; every removal looks at it.
        metrics: what saves and restores have measured.
        is_full: whether steps go since there is no room for another.
        on_retired: called with each step that was deleted; None: nobody wants to know.
    """

    def __init__(
        self, root: str | os.PathLike[str], keep: Keep, limit_s: float | None = None
    ) -> None:
        self.damaged: set[int] = set()
        self._store = open_store(root, "root", limit_s)
        self.fence = Fence(self._store)
        self.metrics = MetricsFile(self._store, self.fence)
        self.keep = keep
        self.described = Described(self._store)
        self._clean: dict[str, float] = {}  # steps that need no sweep, until when: see `_sweep`
        self._seen = self.is_full = False
        self._committed: int | None = None  # the step that this job saved last: it is durable
        self.on_retired: Callable[[int], object] | None = None

    @property
    def root(self) -> str:
        """Where it is."""
        return self._store.location

    @property
    def can_link(self) -> bool:
        """Whether the store can hold chains of deltas."""
        return self._store.can_link

    def path(self, step: int) -> str:
        """Return the directory of a step.

        Raises:
            OptionError: that is no step.
        """
        return f"{self.root}/{step_name(checked_step(step))}"

    def steps(self) -> list[int]:
        """List the committed steps, ascending."""
        return steps_in(self._store, self.step_names)

    def found(self, ranks: "Group") -> dict[int, list[Place]]:
        """Return the steps that the coordinator sees, with their places, on every rank."""
        with Phase(ranks) as listed:
            if ranks.rank == COORDINATOR:
                listed.answer = json.dumps(self.steps()).encode()
        steps: list[int] = json.loads(listed.answers[COORDINATOR])
        return {step: [Place(self.path(step))] for step in steps}

    def lacks(self, step: int, place: Place) -> Lack | None:
        """Find out whether a place cannot be restored from; here, that is found as it is read."""
        return None

    def reach(self, step: int, place: Place) -> Reach | None:
        """Return what this rank can read of a place; None: it can read all."""
        return None

    def note(self, step: int, place: Place, *, is_damaged: bool) -> None:
        """Take note of whether a step could be restored from a place."""
        (self.damaged.add if is_damaged else self.damaged.discard)(step)

    def look(self) -> None:
        """Take note of which job has the run now: one that comes later is newer than this one."""
        self.fence.look()

    def uncommitted(self) -> list[str]:
        """List the directories of steps that are not committed, and were not: LATEST says which."""
        steps = {step_name(step) for step in self.steps()} | {self._latest()}
        return [name for name in self.step_names() if name not in steps]

    def lost(self, steps: Sequence[int] | None = None) -> str | None:
        """Say that LATEST names a newer step than all, which has lost its MANIFEST; None: no.

        Args:
            steps: those that there are; default: those here.
        """
        latest = self._latest()
        step = None if latest is None else step_of(latest)
        # An older one has been retired: who moved LATEST there was stopped for long, and went on.
        if (
            latest is None
            or step is None
            or step <= max(self.steps() if steps is None else steps, default=-1)
        ):
            return None
        return lost_manifest(self._store.below(latest))

    def free_bytes(self) -> int | None:
        """Check that a step can be written, and return for how many bytes there is room.

        Raises:
            StoreError: it cannot, or the run that was here is gone.
        """
        if self._seen and not self._store.exists(""):
            raise StoreError(
                f"cannot save to {self.root}: the directory is gone. Check that its disk is "
                "mounted; the next save then works. To start again there, create the directory"
            )
        return self._store.free_bytes()

    def advice(self) -> str:
        """Say what a full disk has to do with the policy."""
        steps = self.steps()
        taken = sum(self.disk_bytes(step) for step in steps) / 1e9
        return f"Steps kept here: {len(steps)}, of {taken:.3f} GB together ({self.keep!r}). {_ROOM}"

    def room_advice(self) -> str:
        """Say what is known of that without asking the disk, which may take long."""
        return f"The policy is {self.keep!r}. {_ROOM}"

    def retire(self, step: int) -> None:
        """Remove a step, if it is there, whatever is made from it; first LATEST, where it names it.

        Raises:
            FencedError: another job writes here now.
        """
        self._retire(step, self._store.sync_directory)  # first, what LATEST says

    def _retire(self, step: int, check: Callable[[], None]) -> None:
        """Remove a step.

        Args:
            check: raises when it has to stay; from here on nothing new is made from it.
        """
        self.fence.hold()
        self.described.forget(step)
        if not self._store.exists(step_name(step)):
            return
        with leaving(store := self._store.below(step_name(step))):
            if store.can_link:  # elsewhere no delta is ever made
                for name in self.step_names():
                    revoke_links(self._store.below(name), step_name(step))
                check()
            self.fence.hold()
            if self._latest() == step_name(step):
                # Of a step without MANIFEST, it says that MANIFEST is lost.
                self._store.remove(LATEST_NAME)
                self._store.sync_directory()
            retire(store)
        if self.on_retired is not None:
            self.on_retired(step)

    def _check_unneeded(self, step: int, unread: set[int]) -> None:
        """Check that no step has been made from one since the policy has looked.

        Args:
            unread: steps that it could not read, or knows as damaged: it has judged without them.
        """
        for other in sorted(set(self.steps()) - unread - {step}):
            if not self._is_judged(other) or self.described.base_of(other) == step_name(step):
                raise StoreError(
                    f"step {step} is not deleted: step {other} was saved meanwhile, and needs it "
                    "or cannot be read. The next save tries again"
                )

    def tidy(self, step: int, spare: Collection[int] = ()) -> None:
        """Move the hint, retire, sweep: none of it may fail a save that is committed.

        What cannot be done is logged, and keeps nothing else from being done.

        Args:
            spare: steps that stay besides this one.
        """
        self._seen, self._committed = True, step
        self._clean.pop(step_name(step), None)  # a step of this number may have been there before
        said = f"step {step} is saved, but"
        with self._warning(said):
            self.fence.hold()
            self._tidy(step, {step, *spare}, said)

    def _tidy(self, step: int, spare: Collection[int], said: str) -> None:
        with self._warning(said):
            pending = f"{PENDING_LATEST_PREFIX}{os.urandom(8).hex()}"
            self._store.prepare(pending, f"{step_name(step)}\n".encode())
            self._store.rename(pending, LATEST_NAME)  # durable before another step goes
        self._let_go(spare, said)
        with self._warning(said):
            # The time now, by the clock of those that are looked at: the hint was just written.
            before_s = self._store.modified_s(LATEST_NAME) - GRACE_S
            self._sweep(before_s, said)
            for prefix in (PENDING_LATEST_PREFIX, PENDING_EPOCH_PREFIX, PROGRESS_PREFIX):
                sweep_pending(self._store, prefix, before_s)

    def _sweep(self, before_s: float, said: str) -> None:
        """Remove what dead saves have left in steps.

        On a disk every step is looked at. Elsewhere a look takes requests, so a step that was
        clean is looked at once a day, or when its bar is a day old: what others leave there is
        removed when it is a day old, and so a day later at most.
        """
        names = self.step_names()
        seen = {name: self._clean[name] for name in names if name in self._clean}
        self._clean = {name: until for name, until in seen.items() if before_s < until}
        for name in names:
            if name not in self._clean:
                with self._warning(said):
                    store, is_base = self._store.below(name), functools.partial(self._is_base, name)
                    until = sweep(store, before_s, is_base)
                    if until is not None and not store.can_link:
                        self._clean[name] = until

    def _is_base(self, name: str) -> bool:
        """Return whether a delta that can be read is made from a step."""
        steps = self.steps() if self._store.can_link else []
        # A policy that looks at steps has read them by now.
        read = [s for s in steps if not self.keep.keeps_all or self.described.read(s)]
        return any(self.described.base_of(s) == name for s in read)

    def make_room(self, spare: Collection[int] = ()) -> int:
        """Retire what the policy does not keep of the steps there are; return how many went.

        Args:
            spare: steps that stay all the same.
        """
        self.is_full = True
        try:
            return self._let_go(spare, "there is no room, and")
        finally:
            self.is_full = False

    def thin(self, said: str, spare: Collection[int]) -> None:
        """Retire what the policy does not keep, but spare; log what fails after these words."""
        self._let_go(spare, said)

    def _let_go(self, spare: Collection[int], said: str) -> int:
        gone = 0
        if self.keep.keeps_all:
            return gone
        with self._warning(said):
            doomed, others = self._judged(spare)
            if doomed:
                self._settle()
            kept = set[int]()
            for step in doomed:
                if step in kept:
                    continue
                below = self._with_bases({step})
                with self._warning(said):
                    self._retire(step, functools.partial(self._check_unneeded, step, others))
                    gone, below = gone + 1, set()
                kept |= below  # of what could not go
        return gone

    def doomed(self) -> list[int]:
        """Return the steps that the policy does not keep, none before what needs it."""
        return self._judged(())[0]

    def metric_names(self) -> set[str]:
        """Return the names of metrics that the steps have, where the policy has looked at them."""
        return {name for metrics in self.described.metrics().values() for name in metrics}

    def _judged(self, spare: Collection[int]) -> tuple[list[int], set[int]]:
        """Return the steps that may go, and those that could not be judged."""
        # Steps found damaged are no reason to let go of good ones, nor may they be the one kept.
        steps = self.steps()
        good = [s for s in steps if s not in self.damaged and self._is_judged(s)]
        metrics = self.described.metrics()
        others = set(steps) - set(good)
        kept = self.keep.kept(good, metrics) | others
        # What a step needs that cannot be read is not known, but that it is older.
        unread = max(others - self.damaged, default=-1)
        kept |= {s for s in good if s < unread}
        kept = self._with_bases(kept.union(spare))
        return sorted(set(good) - kept, reverse=True), others

    def _settle(self) -> None:
        """Make it durable which steps are there and which are not, before another goes.

        Another job that published the newest may have died, or hang, before it was; and one that is
        gone may not come back when what it needs is gone too. LATEST may name none that goes.
        """
        steps = self.steps()
        if steps and steps[-1] != self._committed:
            self._store.sync_directory(step_name(steps[-1]))
        self._store.sync_directory()
        for entry in self._store.list():
            step = step_of(entry.name)
            if entry.kind == "directory" and step is not None and step not in steps:
                self._store.sync_directory(entry.name)

    def _with_bases(self, kept: set[int]) -> set[int]:
        """Add the steps that links of chains need."""
        found: set[int] = set()
        waiting = set(kept)
        while waiting:
            step = waiting.pop()
            found.add(step)
            below = step_of(self.described.base_of(step) or "")
            if below is not None and below not in found:
                waiting.add(below)
        return found

    @contextlib.contextmanager
    def _warning(self, said: str) -> Iterator[None]:
        """Log an error, and go on."""
        try:
            yield
        except Exception as error:  # what was saved is durable by then
            odd = not isinstance(error, HoldfastError)  # the program's own fault: show where
            logger.warning("%s tidying %s failed: %s", said, self.root, error, exc_info=odd)

    def _is_judged(self, step: int) -> bool:
        """Read what a step says of itself, where the policy does not keep every step."""
        return self.keep.keeps_all or self.described.read(step)

    def step_names(self) -> list[str]:
        """List the directories of steps, committed or not."""
        found = list_if_there(self._store)
        if found is None:
            return []
        self._seen = True
        return [e.name for e in found if e.kind == "directory" and step_of(e.name) is not None]

    def _latest(self) -> str | None:
        try:
            return self._store.get(LATEST_NAME, LATEST_BYTES_MAX).decode(errors="replace").strip()
        except StoreError:
            return None

    def drop_latest(self, steps: Collection[int]) -> None:
        """Remove LATEST, if it names a step that is none of these: that one is gone on purpose."""
        latest = self._latest()
        if latest is not None and step_of(latest) not in steps:
            self._store.remove(LATEST_NAME)

    def disk_bytes(self, step: int) -> int:
        """Return the size of the data files of a step."""
        below = f"{step_name(step)}/{spec.DATA_DIRECTORY}"
        saves = self._store.list(below) if self._store.exists(below) else []
        names = [f"{below}/{save.name}" for save in saves if save.kind == "directory"]
        return sum(file.size_bytes for name in names for file in self._store.list(name))
