"""Saves that are recorded, and the promises that every crash state of their log must keep.

A checkpoint that was acknowledged loads bit-exact; one whose MANIFEST is visible does too; any
other place says `NotCommittedError`. Knows what is promised; not how the commit keeps it.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crash_content import OPTIONS, State, WrongContentError, load_number, make_state
from disk_model import CrashState, Tree, crash_states, materialize

import holdfast
from holdfast._core import Vfs
from holdfast.errors import HoldfastError, NotCommittedError
from holdfast.format.names import step_name, step_of
from holdfast.group.base import Group
from holdfast.testing import Fault, faulty

Load = Callable[[Path], int | None]


@dataclass(frozen=True, slots=True)
class Saved:
    """A save of a state's number at a place, and the length of the log when it was acknowledged."""

    place: str
    number: int
    acknowledged: int


@dataclass(slots=True)
class Record:
    """Saves below ``base`` through a recording disk."""

    base: Path
    disk: Vfs
    begun: set[tuple[str, int]] = field(default_factory=set)
    saved: list[Saved] = field(default_factory=list)
    replaced: set[tuple[str, int]] = field(default_factory=set)

    def replace(self, place: str, number: int, group: Group | None = None) -> None:
        """Save in the place of a lower number."""
        self.replacing(place, number)
        state, path = make_state(number), self.base / place
        holdfast.save(state, path, options=OPTIONS, group=group, replace=True)
        self.acknowledge(place, number)

    def replacing(self, place: str, number: int) -> None:
        """Note that a save in the place of a lower number begins."""
        self.begun.add((place, number))
        self.replaced.add((place, number))

    def save(self, place: str, number: int, group: Group | None = None) -> None:
        """Save a lone checkpoint; when it returns, it counts as acknowledged."""
        self.begun.add((place, number))
        holdfast.save(make_state(number), self.base / place, options=OPTIONS, group=group)
        self.acknowledge(place, number)

    def acknowledge(self, place: str, number: int) -> None:
        """Note that a save has returned."""
        self.saved.append(Saved(place, number, len(self.disk.trace())))


@contextlib.contextmanager
def record(base: Path, *faults: Fault) -> Iterator[Record]:
    """Record saves below an empty directory, on a disk that may have faults."""
    with faulty(*faults, base=Vfs.recording()) as disk:
        yield Record(base, disk)


@dataclass(frozen=True, slots=True)
class FoundRun:
    """What a crash left of a run.

    Attributes:
        verdicts: of each step that has a directory: the number it holds, None when there is no
            checkpoint, or what is wrong.
        restored: the same of what the run restores.
        hint: the bytes of LATEST.
    """

    verdicts: dict[int, int | str | None]
    restored: int | str | None
    hint: bytes | None


def promises_broken(found: FoundRun, acknowledged: Iterable[int], keep: int) -> list[str]:
    """Return the promises that are broken for a run with ``Keep.latest(keep)``.

    A step that was acknowledged may be gone only when ``keep`` newer ones are there.
    """
    faults = [f"step {s} {found}" for s, found in found.verdicts.items() if isinstance(found, str)]
    good = [step for step, verdict in found.verdicts.items() if verdict == step]
    for step in sorted(acknowledged):
        if step not in good and len([s for s in good if s > step]) < keep:
            faults.append(f"step {step} was acknowledged, but there are only {good}")
    if found.restored != max(good, default=None):
        faults.append(f"restore gives {found.restored}, but there are {good}")
    hints = [f"{step_name(step)}\n".encode() for step in good]
    if found.hint is not None and found.hint not in hints:
        faults.append(f"LATEST says {found.hint!r}, but there are {good}")
    return faults


class Judge:
    """Says what a tree is, by writing it out and loading it; equal trees are judged once."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._verdicts: dict[bytes, int | str | None] = {}

    @property
    def loads(self) -> int:
        """Number of different trees that were written out and loaded."""
        return len(self._verdicts)

    def checkpoint(self, tree: Tree | None) -> int | str | None:
        """Return the number a checkpoint holds, None when there is none, or what is wrong."""
        return self._judge(tree, b"checkpoint", load_number)

    def run(self, tree: Tree | None) -> int | str | None:
        """Return the step that a run restores, None when it has none, or what is wrong with it."""
        return self._judge(tree, b"run", _restore_number)

    def _judge(self, tree: Tree | None, kind: bytes, load: Load) -> int | str | None:
        key = kind + _digest(tree)
        if key not in self._verdicts:
            place = self._scratch / f"state-{len(self._verdicts)}"
            if tree is not None:
                materialize(tree, place)
            self._verdicts[key] = verdict_of(place, load)
            shutil.rmtree(place, ignore_errors=True)
        return self._verdicts[key]


def verdict_of(place: Path, load: Load) -> int | str | None:
    """Return what a load gives: a number, None when there is no checkpoint, or what is wrong."""
    try:
        return load(place)
    except NotCommittedError as error:
        manifest = (place / "MANIFEST").exists()
        return f"has a MANIFEST, but: {error}" if manifest else None
    except (HoldfastError, WrongContentError) as error:
        return f"{type(error).__name__}: {error}"


def _restore_number(root: Path) -> int | None:
    return restore_number(root, make_state)


def restore_number(root: Path, make: Callable[[int], State]) -> int | None:
    """Return the step that a run restores, which must hold the state of its number."""
    into = make(-1)
    step = holdfast.Checkpointer(root, options=OPTIONS).restore(into)
    if step is not None and into["loop"]["number"] != step:
        raise WrongContentError(f"step {step} holds state {into['loop']['number']}")
    return step


def _digest(tree: Tree | bytes | None) -> bytes:
    if not isinstance(tree, dict):
        return hashlib.blake2b(tree or b"", digest_size=16, person=b"file").digest()
    parts = [
        name.encode() + (b"/" if isinstance(node, dict) else b"\0") + _digest(node)
        for name, node in tree.items()
    ]
    return hashlib.blake2b(b"".join(parts), digest_size=16, person=b"directory").digest()


def _find(tree: Tree, place: str) -> Tree | None:
    found: Tree | bytes | None = tree
    for part in Path(place).parts:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def checkpoint_faults(state: CrashState, record: Record, judge: Judge) -> list[str]:
    """Return the promises that a crash state breaks for lone checkpoints."""
    faults = []
    for place in sorted({place for place, _ in record.begun}):
        found = judge.checkpoint(_find(state.tree, place))
        known = {number for where, number in record.begun if where == place}
        acknowledged = _acknowledged(state, record, place)
        if newest := max(acknowledged, default=0):
            later = {n for where, n in record.replaced if where == place and n > newest}
            gone = {n for n in acknowledged if n < max(acknowledged) and record.replaced}
            acknowledged = (acknowledged - gone) | later
        if isinstance(found, str):
            faults.append(f"{place} {found}")
        elif found is not None and found not in known:
            faults.append(f"{place} holds {found}, which was never saved there")
        elif acknowledged and found not in acknowledged:
            faults.append(f"{place} holds {found}, but {acknowledged} was acknowledged")
    return [f"call {state.position}, {state.kind}: {fault}" for fault in faults]


def run_faults(state: CrashState, record: Record, judge: Judge, root: str, keep: int) -> list[str]:
    """Return the promises that a crash state breaks for a run with ``Keep.latest(keep)``."""
    tree = _find(state.tree, root) or {}
    steps = {step_of(name): node for name, node in tree.items() if step_of(name) is not None}
    hint = tree.get("LATEST")
    found = FoundRun(
        {step: judge.checkpoint(node) for step, node in steps.items()},
        judge.run(_find(state.tree, root)),
        hint if isinstance(hint, bytes) else None,
    )
    faults = promises_broken(found, _acknowledged(state, record, root), keep)
    return [f"call {state.position}, {state.kind}: {fault}" for fault in faults]


def _acknowledged(state: CrashState, record: Record, place: str) -> set[int]:
    return {
        saved.number
        for saved in record.saved
        if saved.place == place and saved.acknowledged <= state.position
    }


def checkpoint_states(
    record: Record, scratch: Path, *, seed: int, subsets: int
) -> tuple[int, list[str]]:
    """Judge every crash state of lone checkpoints; return how many, and all faults."""
    judge = Judge(scratch)
    count, faults = 0, []
    for state in crash_states(record.disk.trace(), record.base, seed, subsets):
        count += 1
        faults += checkpoint_faults(state, record, judge)
    print(f"{count} crash states, {judge.loads} different, {len(faults)} faults, seed {seed}")
    return count, faults


def run_states(
    record: Record, scratch: Path, root: str, *, keep: int, seed: int, subsets: int
) -> tuple[int, list[str]]:
    """Judge every crash state of a run; return how many, and all faults."""
    judge = Judge(scratch)
    count, faults = 0, []
    for state in crash_states(record.disk.trace(), record.base, seed, subsets):
        count += 1
        faults += run_faults(state, record, judge, root, keep)
    print(f"{count} crash states, {judge.loads} different, {len(faults)} faults, seed {seed}")
    return count, faults


def assert_kept(faults: Sequence[str]) -> None:
    """Fail with the first faults when there are any."""
    assert not faults, f"{len(faults)} broken promises:\n" + "\n".join(faults[:5])
