"""The directory of a run: which steps are there, whether another fits, what is let go.

Knows names, sizes and the policy; no ranks, no tensors. Used by one thread at a time, but for
`steps` and `path`.
"""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ..arguments import plain_number
from ..engine.check import lost_manifest
from ..engine.newest import steps_in
from ..engine.retire import GRACE_S, leaving, retire, revoke_links, sweep, sweep_pending
from ..errors import CorruptError, HoldfastError, OptionError, StoreError, VersionError, shown
from ..format import spec
from ..format.header import Header
from ..format.manifest import decode_manifest
from ..format.names import LATEST_BYTES_MAX, LATEST_NAME, step_name, step_of
from ..stores.base import Store, list_if_there
from ..stores.url import open_store
from .fence import Fence
from .retention import Keep

logger = logging.getLogger("holdfast")

PENDING_LATEST_PREFIX = ".latest-"
METRICS_NAME = "metrics.jsonl"
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
        fence: who may write here; every removal looks at it.
    """

    def __init__(self, root: str | os.PathLike[str], keep: Keep) -> None:
        self.damaged: set[int] = set()
        self._store = open_store(root, "root")
        self.fence = Fence(self._store)
        self.keep = keep
        self._headers: dict[int, Header] = {}  # of steps, where the policy has looked at them
        self._stamps: dict[int, object] = {}  # of their MANIFESTs: a step may be replaced
        self._seen = False
        self._committed: int | None = None  # the step that this job saved last: it is durable

    @property
    def root(self) -> str:
        """Where it is."""
        return self._store.location

    def path(self, step: int) -> str:
        """Return the directory of a step.

        Raises:
            OptionError: that is no step.
        """
        return f"{self.root}/{step_name(checked_step(step))}"

    def steps(self) -> list[int]:
        """List the committed steps, ascending."""
        return steps_in(self._store, self._step_names)

    def lost(self) -> str | None:
        """Say that the step LATEST names has lost its MANIFEST; None: it has not."""
        latest = self._latest()
        if latest is None or step_of(latest) is None:
            return None
        return lost_manifest(self._step_store(latest))

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
        taken = sum(self._disk_bytes(step) for step in steps) / 1e9
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
        self._headers.pop(step, None)  # a step of this number may be saved again, with others
        if not self._store.exists(step_name(step)):
            return
        with leaving(store := self._step_store(step_name(step))):
            for name in self._step_names():
                revoke_links(self._step_store(name), step_name(step))
            check()
            self.fence.hold()
            if self._latest() == step_name(step):
                # Of a step without MANIFEST, it says that MANIFEST is lost.
                self._store.remove(LATEST_NAME)
                self._store.sync_directory()
            retire(store)

    def _check_unneeded(self, step: int, unread: set[int]) -> None:
        """Check that no step has been made from one since the policy has looked.

        Args:
            unread: steps that it could not read, or knows as damaged: it has judged without them.
        """
        for other in sorted(set(self.steps()) - unread - {step}):
            is_read = self._is_judged(other)
            base = self._headers[other].base if other in self._headers else None
            if not is_read or (base and base.name == step_name(step)):
                raise StoreError(
                    f"step {step} is not deleted: step {other} was saved meanwhile, and needs it "
                    "or cannot be read. The next save tries again"
                )

    def note(self, verb: str, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Add what each rank has measured to metrics.jsonl: a line each, in one write.

        It is for people: when it fails, that is only logged.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        rows = [{"time": now, "verb": verb, "step": step, **record} for record in records]
        data = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        try:
            self._store.append(METRICS_NAME, data)
        except StoreError as error:
            logger.warning("metrics.jsonl lacks the %s of step %d: %s", verb, step, error)

    def tidy(self, step: int) -> None:
        """Move the hint, retire, sweep: none of it may fail a save that is committed.

        What cannot be done is logged, and keeps nothing else from being done.
        """
        self._seen, self._committed = True, step
        said = f"step {step} is saved, but"
        with self._warning(said):
            self.fence.hold()
            self._tidy(step, said)

    def _tidy(self, step: int, said: str) -> None:
        with self._warning(said):
            hint = f"{step_name(step)}\n".encode()
            pending = f"{PENDING_LATEST_PREFIX}{os.urandom(8).hex()}"
            self._store.prepare(pending, hint)
            self._store.rename(pending, LATEST_NAME)  # durable before another step goes
        self._let_go(step, said)
        with self._warning(said):
            # The time now, by the clock of those that are looked at: the hint was just written.
            before_s = self._store.modified_s(LATEST_NAME) - GRACE_S
            for name in self._step_names():
                with self._warning(said):
                    sweep(self._step_store(name), before_s)
            sweep_pending(self._store, PENDING_LATEST_PREFIX, before_s)

    def make_room(self, spare: int | None) -> int:
        """Retire what the policy does not keep of the steps there are; return how many went.

        Args:
            spare: a step that stays all the same.
        """
        return self._let_go(spare, "there is no room, and")

    def _let_go(self, spare: int | None, said: str) -> int:
        gone = 0
        with self._warning(said):
            # Steps found damaged are no reason to let go of good ones, nor may they be the one
            # kept.
            good = [s for s in self.steps() if s not in self.damaged and self._is_judged(s)]
            metrics = {s: header.metrics for s, header in self._headers.items()}
            others = {s for s in self.steps() if s not in good}
            kept = self.keep.kept(good, metrics) | others
            # What a step needs that cannot be read is not known, but that it is older.
            unread = max(others - self.damaged, default=-1)
            kept |= {s for s in good if s < unread}
            kept = self._with_bases(kept | ({spare} if spare is not None else set()))
            if set(good) - kept:
                self._settle()
            for step in sorted(set(good) - kept, reverse=True):  # none before what needs it
                if step in kept:
                    continue
                below = self._with_bases({step})
                with self._warning(said):
                    self._retire(step, functools.partial(self._check_unneeded, step, others))
                    gone, below = gone + 1, set()
                kept |= below  # of what could not go
        return gone

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
            base = self._headers[step].base if step in self._headers else None
            below = step_of(base.name) if base else None
            if below is not None and below not in found:
                waiting.add(below)
        return found

    @contextlib.contextmanager
    def _warning(self, said: str) -> Iterator[None]:
        """Log an error, and go on."""
        try:
            yield
        except HoldfastError as error:
            logger.warning("%s tidying %s failed: %s", said, self.root, error)

    def _is_judged(self, step: int) -> bool:
        """Read what a step says of itself, where the policy does not keep every step."""
        if self.keep.keeps_all:
            return True
        name = f"{step_name(step)}/{spec.MANIFEST_NAME}"
        try:
            stamp = self._store.stamp(name)
            if step not in self._headers or self._stamps[step] != stamp:
                data = self._store.get(name, spec.MANIFEST_BYTES_MAX)
                manifest = decode_manifest(data, f"{self.root}/{name}")
                # Without what may be large.
                self._headers[step] = manifest.table.header.part(())
                self._stamps[step] = stamp  # the older of the two: what came since is read again
        except (CorruptError, StoreError, VersionError) as error:
            logger.warning("step %d cannot be read, and is not deleted: %s", step, error)
            self._headers.pop(step, None)
            return False
        return True

    def _step_names(self) -> list[str]:
        """List the directories of steps, committed or not."""
        found = list_if_there(self._store)
        if found is None:
            return []
        self._seen = True
        return [e.name for e in found if e.kind == "directory" and step_of(e.name) is not None]

    def _step_store(self, name: str) -> Store:
        return self._store.below(name)

    def _latest(self) -> str | None:
        try:
            return self._store.get(LATEST_NAME, LATEST_BYTES_MAX).decode(errors="replace").strip()
        except StoreError:
            return None

    def _disk_bytes(self, step: int) -> int:
        below = f"{step_name(step)}/{spec.DATA_DIRECTORY}"
        saves = self._store.list(below) if self._store.exists(below) else []
        names = [f"{below}/{save.name}" for save in saves if save.kind == "directory"]
        return sum(file.size_bytes for name in names for file in self._store.list(name))
