"""Which steps a run has, and whether another fits: looks, and changes nothing.

Knows names, sizes and the group; no tensors. Used by one thread at a time, but for `steps` and
`path`.
"""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..arguments import checked_step
from ..brief import show_bytes
from ..engine.newest import steps_in
from ..engine.uncommitted import lost_manifest
from ..errors import StoreError
from ..format import spec
from ..format.names import LATEST_BYTES_MAX, LATEST_NAME, step_name, step_of
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..loading.reach import Reach
from ..stores.base import list_if_there
from ..stores.url import open_store
from .place import Lack, Place
from .retention import Keep

if TYPE_CHECKING:
    from ..group.base import Group

ROOM = (
    "The newest step is written before an old one is deleted, so n steps take the room of n + 1. "
    "Keep fewer steps, or free space for one more"
)


class RunSteps:
    """See `Run`.

    Attributes:
        keep: the policy.
        damaged: steps that could not be restored; the same on every rank.
        room: what its steps need.
    """

    def __init__(self, root: str | os.PathLike[str], keep: Keep, limit_s: float | None) -> None:
        self._store = open_store(root, "root", limit_s)
        self.keep = keep
        self.damaged: set[int] = set()
        self.room = ROOM
        self._seen = False  # whether the directory was there

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

    def manifest_path(self, step: int) -> str:
        """Return the directory that has the MANIFEST of a step."""
        return self.path(step)

    def steps(self) -> list[int]:
        """List the committed steps, ascending.

        Raises:
            StoreError: the run cannot be listed, or the listing lacks the step of LATEST.
        """
        steps = steps_in(self._store, self.step_names)
        if steps or not self._names_a_step():
            return steps
        if (steps := steps_in(self._store, self.step_names)) or not self._names_a_step():
            return steps  # another process saved or deleted it meanwhile
        raise StoreError(
            f"the store lists no step in {self.root}, but LATEST names {self._latest()}, which "
            "exists. Try again. If this error comes back, the store's listings are wrong"
        )

    def _names_a_step(self) -> bool:
        """Return whether LATEST names a step that is there."""
        latest = self._latest() or ""
        return step_of(latest) is not None and self._store.exists(f"{latest}/{spec.MANIFEST_NAME}")

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

    def step_names(self) -> list[str]:
        """List the directories of steps, committed or not."""
        found = list_if_there(self._store)
        if found is None:
            return []
        self._seen = True
        return [e.name for e in found if e.kind == "directory" and step_of(e.name) is not None]

    def uncommitted(self) -> list[str]:
        """List the directories of steps that are not committed, and were not: LATEST says which."""
        names = self.step_names()
        there = self._store.having(names, spec.MANIFEST_NAME) if names else ()
        steps = {*there, self._latest()}
        return [name for name in names if name not in steps]

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
        self.check_there()
        return self._store.free_bytes()

    def check_there(self) -> None:
        """Check that the run that was here still is: its disk may have been unmounted.

        Objects are on no disk, and what lists the names of those that are gone has nothing there.

        Raises:
            StoreError: it is gone.
        """
        if self._seen and self._store.shows_pending and not self._store.exists(""):
            raise StoreError(
                f"cannot save to {self.root}: the directory is gone. Check that its disk is "
                "mounted; the next save then works. To go on without its steps, create it"
            )

    def advice(self) -> str:
        """Say what a full disk has to do with the policy."""
        steps = self.steps()
        taken = show_bytes(sum(self.disk_bytes(step) for step in steps))
        kept = f"Steps kept here: {len(steps)}, of {taken} together ({self.keep!r})"
        return f"{kept}. {self.room}"

    def room_advice(self) -> str:
        """Say what is known of that without asking the disk, which may take long."""
        return f"The policy is {self.keep!r}. {self.room}"

    def disk_bytes(self, step: int) -> int:
        """Return the size of the data files of a step."""
        below = f"{step_name(step)}/{spec.DATA_DIRECTORY}"
        saves = self._store.list(below) if self._store.exists(below) else []
        names = [f"{below}/{save.name}" for save in saves if save.kind == "directory"]
        return sum(file.size_bytes for name in names for file in self._store.list(name))

    def _latest(self) -> str | None:
        try:
            return self._store.get(LATEST_NAME, LATEST_BYTES_MAX).decode(errors="replace").strip()
        except StoreError:
            return None
