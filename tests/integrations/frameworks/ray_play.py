"""Plays a program of Ray Train: kills a worker in a save, takes a node away, compares every bit.

``python tests/integrations/frameworks/ray_play.py``, by a Python with the frameworks and Ray. The
program trains with Ray alone, to its end. Then it trains with holdfast: SIGKILL ends a worker in
the middle of a save, twice, and Ray starts the workers again. Losses, weights and moments are the
same to the bit. On a cluster that loses a node and gets another, losses are the same to a
tolerance.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []

from integrations.frameworks import engines, play  # noqa: E402

LIMIT_S, POLL_S, TOLERANCE = 480, 0.001, 1e-5
KEPT = 2  # as the program's Keep says
TWO = (2, "")  # as `engines` has layouts: two workers


class Job:
    """One run of the program, with all processes of its cluster."""

    def __init__(self, root: Path, workers: str, how: str) -> None:
        self.root, self.log = root, Path(f"{root}.log")
        command = [sys.executable, str(HERE / "ray_native.py"), str(root), str(root), workers, how]
        own = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | own,
                start_new_session=True,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def alive(self) -> bool:
        """Return whether it still runs; fail if it has failed."""
        if self.process.poll() in (None, 0):
            return self.process.returncode is None
        sys.exit(f"the program failed\n{self.log.read_text()[-6000:]}")

    def wait(self) -> None:
        """Wait for its end."""
        deadline = time.monotonic() + LIMIT_S
        while self.alive():
            if time.monotonic() > deadline:
                sys.exit(f"the program took more than {LIMIT_S} s\n{self.log.read_text()[-6000:]}")
            time.sleep(0.1)

    def workers(self) -> list[int]:
        """Return the processes of the workers that were started last."""
        return [int(Path(f"{self.root}.pid.{rank}").read_text()) for rank in (0, 1)]

    def kill_in_save(self, at: int, rank: int) -> str:
        """Kill a worker in the middle of a save, the ``at``-th from now or a later one."""
        before = {save for _, save in saves_in(self.root)}
        seen: set[str] = set()
        while self.alive():
            new = {save for _, save in saves_in(self.root)} - before - seen
            seen |= new
            if not new or len(seen) < at:
                time.sleep(POLL_S)
                continue
            workers = self.workers()
            self.send(workers, signal.SIGSTOP)
            time.sleep(0.02)  # until both have stopped
            torn = [(p, s) for p, s in saves_in(self.root) if s in seen]
            torn = [(p, s) for p, s in torn if not play.is_committed(p, s)]
            if torn and not (torn[0][0] / f".manifest-{torn[0][1]}").is_dir():
                self.send([workers[rank]], signal.SIGKILL)
                self.send([workers[1 - rank]], signal.SIGCONT)
                return torn[0][0].name
            self.send(workers, signal.SIGCONT)
        sys.exit(f"the program ended before save {at} was met")

    @staticmethod
    def send(workers: list[int], number: signal.Signals) -> None:
        """Send a signal to workers."""
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def saves_in(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the saves whose data lies under a run: (the step's directory, save id)."""
    yield from engines.saves_in(root)


def run(root: Path, workers: str, how: str) -> None:
    """Run to the end."""
    with Job(root, workers, how) as job:
        job.wait()


def groups_of(root: Path) -> list[str]:
    """Return how many workers each step of rank 0 was taken on, in the order of the steps."""
    lines = Path(f"{root}.0.log").read_text().splitlines()
    return [line.split()[-1] for line in lines]


def killed(place: Path) -> list[str]:
    """Kill workers in saves; compare with a run that was not killed."""
    stock, root = place / "stock", place / "killed"
    run(stock, "2", "stock")
    assert not [*stock.rglob("MANIFEST")], "the run to compare with saves nothing"
    with Job(root, "2", "holdfast") as job:
        for at, rank in ((2, 1), (2, 0)):
            print(f"    worker {rank} killed in {job.kill_in_save(at, rank)}", flush=True)
        job.wait()
    found = engines.differences(stock, root, TWO) + engines.begun_late(root, TWO)
    return found + engines.faults_of_files(root, KEPT) + faults_of_reports(root)


def faults_of_reports(root: Path) -> list[str]:
    """Say if Ray holds more than pointers."""
    files = [p for p in Path(f"{root}.ray").rglob("*") if p.is_file()]
    large = [p.name for p in files if p.stat().st_size > 1 << 16]
    pointers = [p for p in files if p.name == "holdfast.json"]
    found = [f"Ray has copied {name}" for name in large]
    if len(pointers) > 4:  # two, as the program says, and one for each worker killed as it reports
        found.append(f"Ray keeps {len(pointers)} pointers; at most 4 are expected")
    return found


def elastic(place: Path) -> list[str]:
    """Go on with one worker when a node is lost, and with two when there is another."""
    stock, root = place / "even", place / "elastic"
    run(stock, "elastic", "stock")
    run(root, "elastic", "holdfast")
    groups = groups_of(root)
    turns = [size for size, before in zip(groups, ["", *groups], strict=False) if size != before]
    print(f"    workers: {', '.join(turns)}", flush=True)
    found = [] if turns == ["2", "1", "2"] else [f"there were {turns} workers, not 2, 1, 2"]
    one = json.loads(Path(f"{stock}.0.json").read_text())["losses"]
    for step, text in json.loads(Path(f"{root}.0.json").read_text())["losses"].items():
        here, there = float.fromhex(text), float.fromhex(one[step])
        if abs(here - there) > TOLERANCE * abs(there):
            found.append(f"step {step} has the loss {here}; expected {there}")
    return found + engines.faults_of_files(root, KEPT)


def main() -> None:
    """Play the program; fail when it differs."""
    place = Path(tempfile.mkdtemp(prefix="holdfast-ray-"))
    faults = []
    try:
        for what, play_it in (("killed workers", killed), ("elastic", elastic)):
            begun = time.monotonic()
            found = play_it(place)
            faults += found
            seconds = time.monotonic() - begun
            print(f"ray, {what}: {'; '.join(found) or 'good'} ({seconds:.0f} s)", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
