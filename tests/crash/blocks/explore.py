"""Records a workload on a logged disk, then mounts crash states of it and has each judged.

Knows no checkpoint format: what is saved, and what is looked for afterwards, is given to it.
"""

import contextlib
import os
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from .disks import FileSystem, Loop, logged_disk, make_image, mend, mounted
from .states import Cut, Replay, choose_cuts, position_of
from .write_log import Entry, read_log

MEMORY = Path("/dev/shm")
Told = tuple[int, int]  # a step, and the length of the log in bytes when it was acknowledged
Save = Callable[[Path, Path], list[Told]]  # saves below a directory, on a disk with this log
LookedT = TypeVar("LookedT")


@dataclass(frozen=True, slots=True)
class Recording:
    """A workload's log, the empty file system it began with, and where it acknowledged what."""

    kind: FileSystem
    base: Path
    entries: list[Entry]
    begin: int
    told: list[tuple[int, int]]  # step, position in the log

    def acknowledged(self, position: int) -> set[int]:
        """Return the steps that were acknowledged by a position of the log."""
        return {step for step, at in self.told if at <= position}


@dataclass(slots=True)
class Tally:
    """What was seen of the crash states of one recording, or of several."""

    states: int = 0
    different: int = 0
    mended: int = 0
    unmountable: int = 0
    went_on: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add another's counts and faults."""
        for name in ("states", "different", "mended", "unmountable", "went_on"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kinds += other.kinds
        self.faults += other.faults

    def __str__(self) -> str:
        return (
            f"{self.states} states, {self.different} of them different, {self.mended} mended, "
            f"{self.unmountable} not mountable, {self.went_on} saved to again, "
            f"{len(self.faults)} faults"
        )


@contextlib.contextmanager
def work_directory() -> Iterator[Path]:
    """Make a directory in memory for the images."""
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="holdfast-blocks-") as path:
        (Path(path) / "mount").mkdir()
        yield Path(path)


def record(kind: FileSystem, work: Path, save: Save, options: str = "") -> Recording:
    """Let a workload save on a new file system; options are those of its mount."""
    base, live, log, where = (work / name for name in ("base", "live", "log", "mount"))
    for leftover in (base, live, log):
        leftover.unlink(missing_ok=True)
    make_image(kind, base)
    subprocess.run(["cp", "--sparse=always", base, live], check=True)
    with (
        logged_disk(live, log, work / "fuse") as file,
        contextlib.closing(Loop(file)) as loop,
        mounted(loop, kind, where, options),
    ):
        begin = os.path.getsize(log)
        told = save(where, log)
        end = os.path.getsize(log)  # what unmounting writes is of no interest
    entries = read_log(log)
    live.unlink()
    log.unlink()
    marks = [(step, position_of(entries, at)) for step, at in told]
    entries = entries[: position_of(entries, end)]
    return Recording(kind, base, entries, position_of(entries, begin), marks)


class Explorer(Generic[LookedT]):
    """Mounts crash states of a recording, looks at each, and judges it.

    Args:
        look: says what is on a mounted file system. States that are alike are looked at once.
        judge: names the promises broken by what was seen, given what was acknowledged.
        go_on: uses what a crash has left, and names what fails; called for one state of ten.
    """

    def __init__(
        self,
        work: Path,
        look: Callable[[Path], LookedT],
        judge: Callable[[LookedT, set[int]], list[str]],
        go_on: Callable[[Path], str] = lambda root: "",
    ) -> None:
        self._where, self._image = work / "mount", work / "image"
        self._look, self._judge, self._go_on = look, judge, go_on

    def explore(
        self, recording: Recording, count: int, rng: random.Random, *, stop: bool = False
    ) -> Tally:
        """Judge ``count`` states, all along the log; or stop at the first broken promise."""
        marks = [position for _, position in recording.told]
        cuts = choose_cuts(recording.entries, recording.begin, marks, count, rng)
        replay = Replay(recording.base, recording.entries, self._image)
        tally, known = Tally(), {}
        with contextlib.closing(replay), contextlib.closing(Loop(self._image)) as loop:
            for cut, digest in replay.states(cuts, recording.kind.atomic, rng):
                if digest not in known:
                    loop.forget()
                    known[digest] = self._see(recording.kind, loop, tally)
                    tally.different += 1
                self._count(cut, known[digest], recording, tally)
                if stop and tally.faults:
                    break
        return tally

    def _count(
        self, cut: Cut, seen: "tuple[LookedT | None, str]", recording: Recording, tally: Tally
    ) -> None:
        looked, failed = seen
        acknowledged = recording.acknowledged(cut.position)
        tally.states += 1
        tally.kinds[cut.kind] += 1
        if looked is None:
            tally.unmountable += 1
            broken = [failed]
        else:
            broken = self._judge(looked, acknowledged) + ([failed] if failed else [])
        where = f"{recording.kind.name}, write {cut.position}, {cut.kind}"
        tally.faults += [f"{where}: {fault}" for fault in broken]

    def _see(self, kind: FileSystem, loop: Loop, tally: Tally) -> "tuple[LookedT | None, str]":
        try:
            with mounted(loop, kind, self._where):
                return self._look_and_go_on(tally)
        except OSError as error:
            if error.filename is not None:
                raise
        mend(kind, loop)
        tally.mended += 1
        try:
            with mounted(loop, kind, self._where):
                return self._look_and_go_on(tally)
        except OSError as error:
            return None, f"it does not mount: {error}"

    def _look_and_go_on(self, tally: Tally) -> tuple[LookedT, str]:
        looked = self._look(self._where)
        if tally.different % 10:
            return looked, ""
        tally.went_on += 1
        return looked, self._go_on(self._where)
