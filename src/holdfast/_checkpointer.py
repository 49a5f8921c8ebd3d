"""A run of checkpoints: save when due, keep what the policy keeps, restore the newest good one."""

import errno
import json
import logging
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ._keep import Keep
from ._load import load_from
from ._save import save
from .engine.retire import retire, sweep, sweep_pending
from .errors import (
    AlreadyCommittedError,
    CorruptError,
    HoldfastError,
    OptionError,
    PeerError,
    StoreError,
    VersionError,
)
from .format import spec
from .format.manifest import decode_manifest
from .format.names import step_name, step_of
from .group.base import COORDINATOR, Phase
from .group.torch import find_group
from .options import Options
from .stores.local import LocalStore
from .stores.url import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .group.base import Group

logger = logging.getLogger("holdfast")

LATEST_NAME = "LATEST"
PENDING_LATEST_PREFIX = ".latest-"
# Longer than any save takes, shorter than a disk takes to fill with what dead ones left.
GRACE_S = 24 * 3600.0


class Checkpointer:
    """Saves, keeps and restores the checkpoints of one run under ``root``.

    All ranks of the group make one and call its methods together. Saving is synchronous: `step`
    returns when the checkpoint is committed and durable on every rank.

    Example::

        with holdfast.Checkpointer("runs/a", every=500, keep=Keep.latest(3)) as checkpointer:
            start = checkpointer.restore(state) or 0
            for step in range(start + 1, steps + 1):
                train()
                checkpointer.step(step, state)
    """

    def __init__(
        self,
        root: "str | os.PathLike[str]",
        *,
        every: int | None = None,
        keep: Keep | None = None,
        codec: str = "raw",
        group: "ProcessGroup | Group | Literal['alone'] | None" = None,
        options: Options | None = None,
    ) -> None:
        """Prepare; nothing is written before the first save.

        Args:
            root: directory of the run.
            every: `step` saves at multiples of this; None: only `save` saves.
            keep: what is kept after each save; default: everything.
            codec, group, options: as `holdfast.save` takes them.

        Raises:
            OptionError: an argument that cannot be.
        """
        if every is not None and (type(every) is not int or every < 1):
            raise OptionError(f"every is {every!r}; expected a number of steps from 1, or None")
        if keep is not None and not isinstance(keep, Keep):
            raise OptionError(f"keep is {keep!r}; expected a Keep, such as Keep.latest(3)")
        self._store = open_store(root)
        self._every = every
        self._keep = keep or Keep.all()
        self._codec = codec
        self._ranks = find_group(group)
        self._options = options
        self._damaged: set[int] = set()
        self._metrics: dict[int, dict[str, float]] = {}
        self._closed = False

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the use of this object; idempotent."""
        self._closed = True

    @property
    def root(self) -> str:
        """Directory of the run."""
        return self._store.location

    def steps(self) -> list[int]:
        """List the committed steps, ascending, as this rank sees them."""
        if not self._store.exists(""):
            return []
        found = [step_of(entry.name) for entry in self._store.list() if entry.kind == "directory"]
        steps = sorted(step for step in found if step is not None)
        return [s for s in steps if self._store.exists(f"{step_name(s)}/{spec.MANIFEST_NAME}")]

    def path(self, step: int) -> str:
        """Return the directory of a step."""
        if type(step) is not int or step < 0:
            raise OptionError(f"step is {step!r}; expected an integer from 0")
        return f"{self._store.location}/{step_name(step)}"

    def step(
        self, step: int, state: Mapping[Any, Any], *, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Save when the step is due (a multiple of ``every``); return whether it was.

        Args:
            metrics: recorded in the checkpoint, for `Keep.best`; equal on all ranks.

        Raises:
            HoldfastError: as `holdfast.save`; older checkpoints are untouched.
        """
        self._check_open()
        self.path(step)  # refuses what is no step, due or not
        if self._every is None or step % self._every:
            return False
        self.save(step, state, metrics=metrics)
        return True

    def save(
        self, step: int, state: Mapping[Any, Any], *, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Save this step now, then let go of what the policy does not keep.

        Raises:
            AlreadyCommittedError: the run holds this step already.
            HoldfastError: as `holdfast.save`.
        """
        self._check_open()
        if lacking := self._keep.metrics - set(metrics or ()):
            raise OptionError(
                f"{self._keep} looks at {', '.join(sorted(lacking))}, but metrics has "
                f"{', '.join(sorted(metrics or ())) or 'nothing'}; give it, as NaN if unknown"
            )
        if step in self._damaged:
            self._replace_damaged(step)
        try:
            save(
                state,
                self.path(step),
                step=step,
                metrics=metrics,
                codec=self._codec,
                group=self._ranks,
                options=self._options,
            )
        except AlreadyCommittedError as error:
            raise AlreadyCommittedError(
                f"{error}. To train on from an earlier step, call retire_after(step) first"
            ) from error
        if self._ranks.rank == COORDINATOR:
            self._after_save(step)

    def restore(self, into: Mapping[Any, Any], *, step: int | None = None) -> int | None:
        """Fill a state from the newest good step, or a given one; return that step.

        Damaged steps are skipped, loudly: each is logged as an error, and is replaced when the run
        reaches it again. All ranks restore the same step. A file that does not belong to a
        checkpoint is let be; `holdfast.load` and ``holdfast verify`` refuse it.

        Args:
            into: as `holdfast.load` takes it.
            step: this step and no other.

        Returns:
            The step, or None when the run has no checkpoint yet.

        Raises:
            CorruptError: there are checkpoints, and all are damaged.
            NotCommittedError: the given step is not there.
            MismatchError: the state does not fit.
        """
        self._check_open()
        if step is not None:
            self._load(step, into)
            return step
        faults = []
        for candidate in reversed(self._agreed_steps()):
            damage = self._try(candidate, into)
            if not damage:
                return candidate
            logger.error("step %d is damaged and is skipped: %s", candidate, damage)
            faults.append(f"step {candidate}: {damage}")
        if faults:
            raise CorruptError(f"every checkpoint of {self.root} is damaged. {' '.join(faults)}")
        return None

    def _load(self, step: int, into: Mapping[Any, Any]) -> None:
        # A stranger in the directory is no reason to go back to an older step.
        options = self._options or Options()
        where, ranks = self.path(step), self._ranks
        load_from(
            where,
            ranks,
            into,
            strict=True,
            partial=False,
            cast=False,
            options=options,
            strangers=True,
        )

    def _try(self, step: int, into: Mapping[Any, Any]) -> str:
        """Load a step; return what is damaged, the same on every rank, or "" when it is good."""
        failure: HoldfastError | None = None
        try:
            self._load(step, into)
        except HoldfastError as error:
            failure = error
        with Phase(self._ranks) as judged:
            # What is no damage is raised here, and so on every rank; a peer's error is the peer's.
            if failure is not None and not isinstance(failure, PeerError):
                if not _is_damage(failure):
                    raise failure
                judged.answer = str(failure).encode(errors="replace")
        found = [answer.decode() for answer in judged.answers if answer]
        if found:
            self._damaged.add(step)
        elif failure is not None:
            raise failure
        return " ".join(found)

    def retire_after(self, step: int) -> list[int]:
        """Remove every step after ``step``, to train on from there in another way; return them."""
        self._check_open()
        later = [s for s in self._agreed_steps() if s > step]
        with Phase(self._ranks):
            for s in reversed(later if self._ranks.rank == COORDINATOR else []):
                retire(LocalStore(self.path(s), self._store.vfs))
        return later

    def _check_open(self) -> None:
        if self._closed:
            raise OptionError(f"the Checkpointer of {self.root} is closed; make a new one")

    def _agreed_steps(self) -> list[int]:
        """Return the steps that the coordinator sees, on every rank."""
        with Phase(self._ranks) as listed:
            if self._ranks.rank == COORDINATOR:
                listed.answer = json.dumps(self.steps()).encode()
        result: list[int] = json.loads(listed.answers[COORDINATOR])
        return result

    def _replace_damaged(self, step: int) -> None:
        """Retire a step that could not be restored, so that it can be saved again."""
        with Phase(self._ranks):
            if self._ranks.rank == COORDINATOR and self._store.exists(step_name(step)):
                logger.warning("replacing step %d, which was found damaged", step)
                retire(LocalStore(self.path(step), self._store.vfs))
        self._damaged.discard(step)

    def _after_save(self, step: int) -> None:
        """Move the hint, retire, sweep: none of it may fail a save that is committed."""
        try:
            hint = f"{step_name(step)}\n".encode()
            self._store.replace(LATEST_NAME, f"{PENDING_LATEST_PREFIX}{os.urandom(8).hex()}", hint)
            # Steps found damaged are no reason to let go of good ones, nor may they be the one
            # kept.
            good = [s for s in self.steps() if s not in self._damaged and self._is_judged(s)]
            for s in set(good) - self._keep.kept(good, self._metrics) - {step}:
                retire(LocalStore(self.path(s), self._store.vfs))
            for entry in self._store.list():
                if step_of(entry.name) is not None:
                    self._sweep(entry.name)
            sweep_pending(self._store, PENDING_LATEST_PREFIX, GRACE_S)
        except HoldfastError as error:
            logger.warning("step %d is saved, but tidying %s failed: %s", step, self.root, error)

    def _sweep(self, name: str) -> None:
        try:
            sweep(LocalStore(f"{self.root}/{name}", self._store.vfs), GRACE_S)
        except CorruptError as error:  # what else lies there cannot be told from what it names
            logger.warning("%s/%s is left as it is: %s", self.root, name, error)

    def _is_judged(self, step: int) -> bool:
        """Read the metrics of a step, once, where the policy asks for them."""
        if self._keep.metrics and step not in self._metrics:
            name = f"{step_name(step)}/{spec.MANIFEST_NAME}"
            try:
                data = self._store.get(name, spec.MANIFEST_BYTES_MAX)
                manifest = decode_manifest(data, f"{self.root}/{name}")
            except (CorruptError, VersionError) as error:
                logger.warning("step %d is neither kept nor removed: %s", step, error)
                return False
            self._metrics[step] = manifest.table.header.metrics
        return True


def _is_damage(error: HoldfastError) -> bool:
    """Whether an error says that this checkpoint cannot be read, and another perhaps can."""
    if isinstance(error, StoreError):
        return error.errno == errno.EIO
    return isinstance(error, CorruptError)
