"""The directory of a run: what is let go of it, and swept. `run_steps.py` says what is there.

Knows names and the policy; no ranks, no tensors. Used by one thread at a time.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator

from ..engine.retire import GRACE_S, leaving, retire, revoke_links, sweep, sweep_pending
from ..errors import HoldfastError, StoreError
from ..format.names import LATEST_NAME, step_name, step_of
from ..format.progress import PROGRESS_PREFIX
from .described import Described
from .fence import PENDING_EPOCH_PREFIX, Fence
from .metrics_file import MetricsFile
from .retention import Keep
from .run_steps import RunSteps

logger = logging.getLogger("holdfast")

PENDING_LATEST_PREFIX = ".latest-"


class Run(RunSteps):
    """The directory that a `holdfast.Checkpointer` saves to.

    Attributes:
        described: what the policy looks at.
        fence: who may write here; every removal looks at it.
        metrics: what saves and restores have measured.
        is_full: whether steps go since there is no room for another.
        on_retired: called with each step that was deleted; None: nobody wants to know.
    """

    def __init__(
        self, root: str | os.PathLike[str], keep: Keep, limit_s: float | None = None
    ) -> None:
        super().__init__(root, keep, limit_s)
        self.fence = Fence(self._store)
        self.metrics = MetricsFile(self._store, self.fence)
        self.described = Described(self._store)
        self._clean: dict[str, float] = {}  # steps that need no sweep, until when: see `_sweep`
        self.is_full = False
        self._committed: int | None = None  # the step that this job saved last: it is durable
        self.on_retired: Callable[[int], object] | None = None

    def look(self) -> None:
        """Take note of which job has the run now: one that comes later is newer than this one."""
        self.fence.look()

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
            prefixes = PENDING_LATEST_PREFIX, PENDING_EPOCH_PREFIX, PROGRESS_PREFIX
            sweep_pending(self._store, before_s, *prefixes)

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

    def doomed(self, spare: Collection[int] = ()) -> list[int]:
        """Return the steps that the policy does not keep, none before what needs it.

        Args:
            spare: steps that stay all the same.
        """
        return self._judged(spare)[0]

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
        Among objects what is listed is durable.
        """
        if not self._store.shows_pending:
            return
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

    def drop_latest(self, steps: Collection[int]) -> None:
        """Remove LATEST, if it names a step that is none of these: that one is gone on purpose."""
        latest = self._latest()
        if latest is not None and step_of(latest) not in steps:
            self._store.remove(LATEST_NAME)
