"""Start training runs of the demo with torchrun, wait for them, kill one in the middle of a save.

Knows processes and directories; not what the losses mean.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PeerError

POLL_S = 0.001  # a small save takes milliseconds, and the kill has to fall into it
SHOW_S = 0.2
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TAIL_LINES = 60  # of a log, in the error: torchrun's own report alone takes 40
PAGE_BYTES = 4096

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One start of `demo_train`.

    Attributes:
        name: of its files: ``<name>.jsonl`` (losses) and ``<name>.log``.
        processes: ranks under torchrun; 0: one plain process, without torch.distributed.
        root: directory of its checkpoints.
        every: saves at multiples of this step; None: never.
    """

    name: str
    processes: int
    root: Path
    size: str
    steps: int
    every: int | None = None

    @property
    def record(self) -> Path:
        """File of JSON lines with the losses."""
        return self.root.parent / f"{self.name}.jsonl"

    def start(self) -> "subprocess.Popen[bytes]":
        """Start it, in a session of its own."""
        words = ["--root", self.root, "--size", self.size, "--steps", self.steps]
        words += ["--record", self.record]
        words += [] if self.every is None else ["--every", self.every]
        log = self.record.with_suffix(".log")
        return launch("demo_train", self.processes, [str(word) for word in words], log)

    def rows(self) -> list[dict[str, Any]]:
        """Read what it has recorded so far."""
        if not self.record.exists():
            return []
        lines = self.record.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        """Return the losses by step; of a step that was done twice, the later."""
        return {row["step"]: row["loss"] for row in self.rows() if "step" in row}

    def restored(self) -> int:
        """Return the step that its last start went on from; 0 when there was nothing to restore."""
        return int([row["restored"] for row in self.rows() if "restored" in row][-1])


@dataclass(frozen=True, slots=True)
class Kill:
    """What a SIGKILL in the middle of a save left.

    Attributes:
        step: the step that was being saved.
        processes: that were killed, torchrun included.
        after_s: from the first sight of a data file to the kill.
        saves_s: the same to MANIFEST, in the run's earlier saves.
        files: names and sizes left in the step's directory.
        written_bytes: of the data files, in pages that are not all zero.
        committed: whether MANIFEST was there: then the kill came too late.
    """

    step: int
    processes: int
    after_s: float
    saves_s: list[float]
    files: dict[str, int]
    written_bytes: int
    committed: bool


def launch(module: str, processes: int, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a module of the demo under torchrun, on loopback and a free port, or plainly for 0."""
    command = [sys.executable]
    if processes:
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(processes)]
    command += ["-m", f"{__package__}.{module}", *words]
    outside = {name: text for name, text in os.environ.items() if name not in RANK_VARIABLES}
    # Bits repeat only when every start splits its sums alike: one thread a rank, always.
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            env={**outside, **fixed},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(process: "subprocess.Popen[bytes]", log: Path, tick: Callable[[], None]) -> None:
    """Wait for a process to end well; on any error end it with all its children.

    Raises:
        PeerError: it ended badly; the text has the end of its log.
    """
    try:
        while process.poll() is None:
            tick()
            time.sleep(SHOW_S)
    finally:
        kill_all(process)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        text = f"a run of the demo ended with {process.returncode}; its log is {log}:\n{tail}"
        raise PeerError(text, rank=-1, cause=tail)


def finish(run: DemoRun, progress: Progress) -> None:
    """Start a run and wait for its end."""
    wait(run.start(), run.record.with_suffix(".log"), lambda: progress(_position(run)))


def kill_in_save(run: DemoRun, step: int, progress: Progress) -> Kill | None:
    """Start a run, and kill it in the middle of a save of this step or a later one.

    Returns:
        What was left; None when the run ended before it could be killed.
    """
    process = run.start()
    watch = SaveWatch(run.root)
    shown_s = 0.0
    try:
        while process.poll() is None:
            place = watch.look()
            if place is not None and _step(place) >= step and not _committed(place):
                return _kill(process, place, watch)
            if time.perf_counter() - shown_s > SHOW_S:
                shown_s = time.perf_counter()
                progress(_position(run))
            time.sleep(POLL_S)
    finally:
        kill_all(process)
    return None


class SaveWatch:
    """Sees saves begin and commit, from outside, by the files in the directory of the run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._took_s: dict[Path, float] = {}  # from first data file to MANIFEST; 0: not seen begin
        self.begun_s: dict[Path, float] = {}  # when the first data file of a step was seen

    @property
    def saves_s(self) -> list[float]:
        """Times from first data file to MANIFEST, of the saves seen from begin to end."""
        return [seconds for seconds in self._took_s.values() if seconds]

    def look(self) -> Path | None:
        """Return the directory of a step that is being saved and holds written data, if any."""
        now = time.perf_counter()
        for place in self._root.glob("step-*"):
            if place in self._took_s:
                continue
            if _committed(place):
                self._took_s[place] = now - self.begun_s.get(place, now)
            elif files := list(_data_files(place)):
                self.begun_s.setdefault(place, now)
                if any(_holds_data(path) for path in files):
                    return place
        return None


def kill_all(process: "subprocess.Popen[bytes]") -> int:
    """SIGKILL a process and everything below it; return how many, when all are gone."""
    if process.poll() is not None:
        return 0
    # torchrun puts each worker into a session of its own, so one signal to a group would miss them.
    family = [process.pid, *_descendants(process.pid)]
    for pid in family:  # parents first: none sees a child die, and none starts another
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    while any(_alive(pid) for pid in family):
        time.sleep(0.01)
    return len(family)


def _kill(process: "subprocess.Popen[bytes]", place: Path, watch: SaveWatch) -> Kill:
    after_s = time.perf_counter() - watch.begun_s[place]
    processes = kill_all(process)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    return Kill(
        step=_step(place),
        processes=processes,
        after_s=after_s,
        saves_s=watch.saves_s,
        files={str(path.relative_to(place)): path.stat().st_size for path in files},
        written_bytes=sum(_written_bytes(path) for path in _data_files(place)),
        committed=_committed(place),
    )


def _step(place: Path) -> int:
    return int(place.name.removeprefix("step-"))


def _committed(place: Path) -> bool:
    return (place / "MANIFEST").exists()


def _data_files(place: Path) -> Iterator[Path]:
    return place.glob("data/*/*.hf")


def _holds_data(path: Path) -> bool:
    """Whether anything is written yet: space that is only reserved counts as a hole."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False  # gone since it was listed
    try:
        return os.lseek(fd, 0, os.SEEK_DATA) >= 0
    except OSError:
        return False  # ENXIO: no data up to the end
    finally:
        os.close(fd)


def _written_bytes(path: Path) -> int:
    """Count the pages that hold anything: a file has its full size from the start of a save."""
    pages = np.fromfile(path, dtype=np.uint8)
    pages = pages[: len(pages) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
    return int(pages.any(axis=1).sum()) * PAGE_BYTES


def _position(run: DemoRun) -> str:
    losses = run.losses()
    step = max(losses, default=0)
    return f"step {step} of {run.steps}, loss {losses[step]:.3f}" if losses else "starting"


def _descendants(pid: int) -> list[int]:
    """List the processes below one, nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields:
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += parents.get(parent, [])
    return found[1:]


def _alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """Return state, parent and so on of a process; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
