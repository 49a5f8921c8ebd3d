"""What lies under the directory of a run: steps, committed or not, and the hint. Opens no step."""

import contextlib
import errno
import math
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ..errors import StoreError
from ..format import spec
from ..format.names import DCP_METADATA_NAME, LATEST_BYTES_MAX, LATEST_NAME, is_foreign
from ..format.unfinished import ELSEWHERE, unfinished
from ..stores.base import Store, file_names
from ..stores.url import open_store
from .behind import lacks_manifest

_NUMBERED = re.compile(r"[^0-9]*([0-9]+)")  # step-5, checkpoint-00000005, global_step5
STEP_PREFIX = "step-"  # users may name steps without the zeros that a Checkpointer writes
LOOKS_AT_ONCE = 16  # at steps of a store of objects


@dataclass(frozen=True, slots=True)
class Step:
    """A directory of a run that is a step: ``step-*``, or a checkpoint of another name.

    Attributes:
        location: where it is.
        committed: whether it has a MANIFEST, or cannot be looked at.
        disk_bytes: of everything in it that a save may have written.
        foreign: the names in it, where none of them is holdfast's.
        is_gone: whether it was deleted from a store of objects, which keeps its place for a while.
    """

    name: str
    location: str
    committed: bool
    disk_bytes: int
    foreign: tuple[str, ...] = ()
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class RunListing:
    """A directory of steps; ``latest`` is what its LATEST says, or None without one.

    Attributes:
        earlier: how many steps before these were not looked at.
    """

    location: str
    steps: tuple[Step, ...]
    latest: str | None
    earlier: int = 0

    @property
    def committed(self) -> list[Step]:
        """The steps that are checkpoints."""
        return [step for step in self.steps if step.committed]

    @property
    def checked(self) -> list[Step]:
        """The steps that are checkpoints, and the one that LATEST says was."""
        return [step for step in self.steps if step.committed or step.name == self.latest]


def find_run(path: str | os.PathLike[str], newest: int | None = None) -> RunListing | None:
    """Return the run at ``path``, or None when there are no steps or it is a checkpoint itself.

    Programs that save through DCP name directories as they like: where none is named ``step-*``,
    all checkpoints are steps.

    Args:
        newest: look at no more steps than so many of the newest; default: at all.

    Raises:
        OptionError: ``path`` is no path.
    """
    store = open_store(path)
    if store.exists(spec.MANIFEST_NAME):
        return None
    try:
        names = run_names(store)
    except StoreError:
        return None  # opening it as a checkpoint says why
    if not names:
        return None
    shown = names[-newest:] if newest is not None else names
    steps = tuple(step for name in shown if not (step := look_at(store, name)).is_gone)
    return RunListing(store.location, steps, _latest(store), len(names) - len(shown))


def run_names(store: Store) -> list[str]:
    """List the names of the steps of a run, in their order; none: it is no run.

    Raises:
        StoreError: it cannot be listed.
    """
    directories = [e.name for e in store.list() if e.kind == "directory"]
    names = [name for name in directories if name.startswith(STEP_PREFIX)]
    if names:
        return sorted(without_retired(store, names), key=_order)
    return sorted((name for name in directories if is_checkpoint(store, name)), key=_order)


def without_retired(
    store: Store, names: Iterable[str], looks_max: int | None = None
) -> Iterable[str]:
    """Leave the steps out that were deleted from a store of objects; of each a bar is there.

    Args:
        looks_max: where there are more steps than this, none is looked at.
    """
    if store.shows_pending:
        return names
    listed = [*names]
    steps = [name for name in listed if name.startswith(STEP_PREFIX)]
    if looks_max is not None and len(steps) > looks_max:
        return listed
    with ThreadPoolExecutor(LOOKS_AT_ONCE, "holdfast-look") as threads:
        looks = zip(steps, threads.map(partial(_is_gone, store), steps), strict=True)
        gone = {name for name, is_gone in looks if is_gone}
    return [name for name in listed if name not in gone]


def _is_gone(store: Store, name: str) -> bool:
    """Whether nothing is below a name; some servers list directories in which no object is left."""
    try:
        entries = store.list(name)
    except StoreError as error:
        return error.errno == errno.ENOENT  # what cannot be listed is shown
    if store.shows_pending:
        return not entries
    return all(e.kind == "directory" and _is_gone(store, f"{name}/{e.name}") for e in entries)


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


def why_unfinished(step: Store) -> str:
    """Say why a step is not committed."""
    if lacks_manifest(step):
        return ELSEWHERE
    return unfinished(file_names(step), tells=step.shows_pending)


def look_at(store: Store, name: str) -> Step:
    """Look at the directory of a step, without opening the step."""
    try:
        committed = store.exists(f"{name}/{spec.MANIFEST_NAME}")
    except StoreError:
        committed = True  # for all that is known; who opens it says why it cannot be read
    names = [] if committed else _names(store, name)
    # Without MANIFEST `.metadata` is DCP's, and of the drop-in's marker there is nothing to say.
    others = [n for n in names if is_foreign(n) or n == DCP_METADATA_NAME]
    foreign = tuple(names) if len(others) == len(names) else ()
    is_gone = not committed and not store.can_link and _is_gone(store, name)
    size = disk_bytes(store, name)
    return Step(name, f"{store.location}/{name}", committed, size, foreign, is_gone)


def is_checkpoint(store: Store, name: str) -> bool:
    """Whether a directory is a committed checkpoint, of holdfast or of DCP."""
    try:
        files = (spec.MANIFEST_NAME, DCP_METADATA_NAME)
        return any(store.exists(f"{name}/{file}" if name else file) for file in files)
    except StoreError:
        return False


def _names(store: Store, name: str) -> list[str]:
    try:
        return sorted(entry.name for entry in store.list(name))
    except StoreError:
        return []


def _order(name: str) -> tuple[float, str]:
    """Sort numbers as numbers, whatever their zeros, and before everything else."""
    match = _NUMBERED.fullmatch(name)
    # A file name is short enough for int(), which refuses thousands of digits.
    return (int(match[1]), name) if match else (math.inf, name)


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
