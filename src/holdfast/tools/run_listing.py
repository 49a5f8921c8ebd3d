"""What lies under the directory of a run: steps, committed or not, and the hint. Opens no step."""

import contextlib
import math
import os
from dataclasses import dataclass

from ..errors import StoreError
from ..format import spec
from ..format.names import LATEST_BYTES_MAX, LATEST_NAME
from ..stores.base import Store
from ..stores.url import open_store

STEP_PREFIX = "step-"  # users may name steps without the zeros that a Checkpointer writes


@dataclass(frozen=True, slots=True)
class Step:
    """A directory ``step-*`` of a run.

    Attributes:
        location: where it is.
        committed: whether it has a MANIFEST, or cannot be looked at.
        disk_bytes: of everything in it that a save may have written.
    """

    name: str
    location: str
    committed: bool
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class RunListing:
    """A directory of steps; ``latest`` is what its LATEST says, or None without one."""

    location: str
    steps: tuple[Step, ...]
    latest: str | None

    @property
    def committed(self) -> list[Step]:
        """The steps that are checkpoints."""
        return [step for step in self.steps if step.committed]

    @property
    def checked(self) -> list[Step]:
        """The steps that are checkpoints, and the one that LATEST says was."""
        return [step for step in self.steps if step.committed or step.name == self.latest]


def find_run(path: str | os.PathLike[str]) -> RunListing | None:
    """Return the run at ``path``, or None when there are no steps or it is a checkpoint itself.

    Raises:
        OptionError: ``path`` is no path.
    """
    store = open_store(path)
    if store.exists(spec.MANIFEST_NAME):
        return None
    try:
        entries = store.list()
    except StoreError:
        return None  # opening it as a checkpoint says why
    names = [e.name for e in entries if e.kind == "directory" and e.name.startswith(STEP_PREFIX)]
    if not names:
        return None
    steps = tuple(_step(store, name) for name in sorted(names, key=_order))
    return RunListing(store.location, steps, _latest(store))


def disk_bytes(store: Store, name: str) -> int:
    """Sum the sizes of the files a save writes below a directory; what cannot be listed is 0."""
    total = 0
    with contextlib.suppress(StoreError):
        total += sum(e.size_bytes for e in store.list(name) if e.kind == "file")
    data = f"{name}/{spec.DATA_DIRECTORY}" if name else spec.DATA_DIRECTORY
    with contextlib.suppress(StoreError):
        for save in store.list(data):
            if save.kind == "directory":
                files = store.list(f"{data}/{save.name}")
                total += sum(e.size_bytes for e in files if e.kind == "file")
    return total


def _step(store: Store, name: str) -> Step:
    try:
        committed = store.exists(f"{name}/{spec.MANIFEST_NAME}")
    except StoreError:
        committed = True  # for all that is known; who opens it says why it cannot be read
    return Step(name, f"{store.location}/{name}", committed, disk_bytes(store, name))


def _order(name: str) -> tuple[float, str]:
    """Sort numbers as numbers, whatever their zeros, and before everything else."""
    digits = name.removeprefix(STEP_PREFIX)
    is_number = digits.isascii() and digits.isdigit()
    # A file name is short enough for int(), which refuses thousands of digits.
    return (int(digits), name) if is_number else (math.inf, name)


def _latest(store: Store) -> str | None:
    try:
        return store.get(LATEST_NAME, LATEST_BYTES_MAX).decode(errors="replace").strip()
    except StoreError:
        return None


def elements_bytes(path: str) -> int:
    """Return the bytes of all elements of a checkpoint, tied ones once."""
    from .. import open

    with open(path) as checkpoint:
        infos = (checkpoint.info(name) for name in checkpoint.names())
        return sum(info.size_bytes for info in infos if info.tied_to is None)
