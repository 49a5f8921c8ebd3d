"""Plays programs of DeepSpeed and Megatron-Core with holdfast, beside the frameworks alone.

``python tests/integrations/frameworks/engines.py [NAME ...]``, by a Python with the frameworks.
Each program runs with the framework alone, to its end. Then it runs with holdfast: SIGKILL ends all
ranks in the middle of two saves, and the last start runs to the end. Its losses, its weights and
its moments are the same to the bit. It also moves between layouts and numbers of ranks, killed in a
save each time, and trains on through a full disk.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []

from integrations.frameworks import play  # noqa: E402
from integrations.frameworks.results import unlike  # noqa: E402

Layout = tuple[int, str]  # number of ranks, and what the program is told of the layout


@dataclass(frozen=True)
class Program:
    """A program, and how it is played.

    Attributes:
        script: its file.
        exact: a layout in which it is compared to the bit.
        moves: layouts in which it goes on, one after the other; empty: it does not move.
        fills: whether it trains on through a full disk.
        how: of the program: how holdfast saves.
        tolerance: of losses in other layouts, relative: sums have another order there.
        kept: how many checkpoints are left; 0: nothing deletes any.
        whole: the file that ends the framework's own checkpoint of a step. Then the framework alone
            is killed too, and resumes from the same steps in the same layouts: the same bits.
    """

    script: str
    exact: Layout
    moves: tuple[Layout, ...] = ()
    fills: bool = False
    how: str = "sync"
    tolerance: float = 1e-5
    kept: int = 2
    whole: str = ""


WHOLE = "iter_{:07d}/metadata.json"  # of Megatron


def _megatron(exact: Layout, **given: Any) -> Program:
    return Program("megatron_native.py", exact, kept=0, whole=WHOLE, **given)


PROGRAMS = {
    "deepspeed-zero1": Program("deepspeed_native.py", (2, "zero1-bf16"), how="eager"),
    "deepspeed-zero2": Program("deepspeed_native.py", (2, "zero2-fp16"), how="eager"),
    "deepspeed-zero3": Program(
        "deepspeed_native.py",
        (2, "zero3-drop"),
        moves=((2, "zero3"), (1, "zero1"), (3, "zero2")),
        fills=True,
    ),
    "deepspeed-offload": Program("deepspeed_native.py", (2, "zero2-offload")),
    "deepspeed-moe": Program("deepspeed_native.py", (2, "zero1-moe")),
    "deepspeed-pipe": Program(
        "deepspeed_native.py",
        (2, "zero1-pipe"),
        moves=((2, "zero1-pipe"), (1, "zero1-pipe"), (3, "zero0-pipe")),
    ),
    "megatron": _megatron((2, "tp2-drop"), moves=((4, "tp2"), (1, "tp1"), (2, "pp2")), fills=True),
    "megatron-eager": _megatron((2, "tp1-bf16-drop-full"), how="eager", fills=True),
    "megatron-moe": _megatron(
        (2, "ep2-moe-drop-buckets"), moves=((2, "ep2-moe"), (4, "ep4-moe"), (4, "pp2-ep2-moe"))
    ),
}


class Team(play.Ranks):
    """The ranks of one start."""

    def __init__(self, script: str, ranks: int, arguments: list[str], logs: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-W", "ignore", play.RUN, str(HERE / script), *arguments]
        self.logs = [Path(f"{logs}.{rank}.log") for rank in range(ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            own = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            with log.open("w") as output:
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=play.environment(rank, port, "0", "") | own,
                    start_new_session=True,
                )
            self.processes.append(process)

    def first_step(self) -> int:
        """Return the step that rank 0 has begun with."""
        lines = self.logs[0].read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("step "))


def saves_in(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the saves whose data lies under a directory: (the checkpoint's directory, save id)."""
    # Not rglob: it fails where a directory goes while it looks into it.
    for data in (*root.glob("*/data"), *root.glob("*/holdfast/data")):
        with contextlib.suppress(OSError):
            for entry in os.scandir(data):
                yield data.parent, entry.name


def kill_in_save(team: Team, root: Path, at: int) -> str:
    """Kill all ranks in the middle of a save, the ``at``-th or a later one; return its place."""
    before = {save for _, save in saves_in(root)}
    seen: set[str] = set()

    def is_enough() -> bool:
        known = len(seen)
        seen.update(save for _, save in saves_in(root) if save not in before)
        return len(seen) >= at and len(seen) > known

    while team.wait(is_enough):
        team.send(signal.SIGSTOP)
        time.sleep(0.02)  # until all have stopped
        torn = [(p, s) for p, s in saves_in(root) if s in seen and not play.is_committed(p, s)]
        if torn and not (torn[0][0] / f".manifest-{torn[0][1]}").is_dir():  # that is retired
            team.send(signal.SIGKILL)
            return str(torn[0][0].relative_to(root))
        team.send(signal.SIGCONT)
    sys.exit(f"the program ended before save {at} was met")


class Play:
    """One program, played under a directory."""

    def __init__(self, program: Program, place: Path) -> None:
        self.program, self.place = program, place
        self.stock_runs: dict[Layout, Path] = {}

    def team(self, root: Path, layout: Layout, how: str) -> Team:
        """Start the program."""
        ranks, kind = layout
        arguments = [str(root), str(root), kind, *([how] if how else [])]
        return Team(self.program.script, ranks, arguments, Path(f"{root}.{time.time_ns()}"))

    def folder(self, name: str) -> Path:
        """Make a directory for checkpoints."""
        root = self.place / name
        root.mkdir()
        return root

    def stock(self, layout: Layout) -> Path:
        """Run with the framework alone, to the end; once for each layout."""
        if layout not in self.stock_runs:
            root = self.folder(f"stock-{len(self.stock_runs)}")
            with self.team(root, layout, "") as team:
                team.wait()
            assert not list(root.rglob("MANIFEST")), "the run to compare with is the framework's"
            self.stock_runs[layout] = root
        return self.stock_runs[layout]

    def bits(self) -> list[str]:
        """Kill in two saves, resume, and compare every bit with the stock run."""
        layout, root = self.program.exact, self.folder("bits")
        starts = self.killed(root, [layout] * 3)
        found = differences(self.stock(layout), root, layout)
        return found + self.beside("bits-stock", starts, root) + self.left(root, layout)

    def killed(self, root: Path, layouts: Sequence[Layout]) -> list[tuple[Layout, int]]:
        """Run with holdfast: killed in a save in each layout but the last, which runs to its end.

        Returns:
            (layout, first step) of each start.
        """
        starts = []
        for at, layout in zip((3, 2, 0), layouts, strict=True):
            with self.team(root, layout, self.program.how) as team:
                if at:
                    print(f"    {layout}: killed in {kill_in_save(team, root, at)}", flush=True)
                else:
                    team.wait()
            starts.append((layout, team.first_step()))
        return starts

    def beside(self, name: str, starts: Sequence[tuple[Layout, int]], ours: Path) -> list[str]:
        """Resume with the framework alone from the same steps, and compare every bit."""
        if not self.program.whole:
            return []
        root = self.folder(name)
        for (layout, _), (_, first) in pairwise(starts):
            whole = root / self.program.whole.format(first - 1)
            with self.team(root, layout, "") as team:
                team.wait(lambda: is_filled(whole))  # noqa: B023 (it is called at once)
            for later in (p for p in root.iterdir() if p.name > whole.parent.name):
                shutil.rmtree(later)
        layout, first = starts[-1]
        with self.team(root, layout, "") as team:
            team.wait()
        assert team.first_step() == first, "both resume from the same step"
        found = [f"{fault}: the framework alone" for fault in differences(root, ours, layout)]
        return found + ["the framework was not alone"] * bool([*root.rglob("MANIFEST")])

    def left(self, root: Path, layout: Layout) -> list[str]:
        """Say if the last start has resumed nothing, and what is wrong with what is left."""
        return begun_late(root, layout) + faults_of_files(root, self.program.kept)

    def moved(self) -> list[str]:
        """Go on in one layout after the other; compare the losses of each with the stock run."""
        root, stock = self.folder("moves"), self.stock(self.program.moves[0])
        starts = self.killed(root, self.program.moves)
        last, _ = starts[-1]
        one = results(stock, self.program.moves[0])[0]["losses"]
        found = []
        for step, text in results(root, last)[0]["losses"].items():
            here, there = float.fromhex(text), float.fromhex(one[step])
            if abs(here - there) > self.program.tolerance * abs(there):
                found.append(f"step {step} has the loss {here}; expected {there}")
        return found + self.beside("moves-stock", starts, root) + self.left(root, last)

    def full_disk(self) -> list[str]:
        """Fill the disk for some steps: training goes on, an older step stays, a later is saved."""
        layout, root = self.program.exact, self.place / "disk"
        stock, faults = self.stock(layout), []
        with small_disk(root, 64 << 20), self.team(root, layout, self.program.how) as team:
            if not team.wait(lambda: team.steps() >= 5):
                sys.exit("the program ended before its step 5")
            fill(root / "ballast")
            if not team.wait(lambda: team.steps() >= 9):
                sys.exit("the program ended on the full disk")
            team.send(signal.SIGSTOP)
            older = [path.parent for path in root.rglob("MANIFEST")]
            faults += [] if older else ["no older checkpoint is left on the full disk"]
            faults += [fault for path in older for fault in damage_of(path)]
            (root / "ballast").unlink()
            team.send(signal.SIGCONT)
            team.wait()
            if "is not saved" not in team.logs[0].read_text():
                faults.append("no save has failed")
            faults += faults_of_files(root, self.program.kept)
        for one, other in zip(results(stock, layout), results(root, layout), strict=True):
            if one["digest"] != other["digest"] or one["losses"] != other["losses"]:
                faults.append("training went on otherwise")
        return faults


def is_filled(path: Path) -> bool:
    """Return whether a file is there, and has been written."""
    return path.exists() and path.stat().st_size > 0


def differences(stock: Path, root: Path, layout: Layout) -> list[str]:
    """Compare the ends of two runs, as `unlike` does."""
    return unlike(results(stock, layout), results(root, layout))


def results(root: Path, layout: Layout) -> list[dict[str, Any]]:
    """Return what the ranks have ended with."""
    return [json.loads(Path(f"{root}.{rank}.json").read_text()) for rank in range(layout[0])]


def begun_late(root: Path, layout: Layout) -> list[str]:
    """Say if the last start has resumed nothing."""
    first = min(int(step) for rank in results(root, layout) for step in rank["losses"])
    return [f"it began with step {first}: it resumed nothing"] if first < 3 else []


def faults_of_files(root: Path, kept: int) -> list[str]:
    """Say what is wrong with the checkpoints that are left."""
    places = [path.parent for path in root.rglob("MANIFEST")]
    found = [fault for place in places for fault in damage_of(place)]
    if kept and len(places) != kept:
        found.append(f"it kept {sorted(place.name for place in places)}; expected {kept}")
    return found


def damage_of(place: Path) -> list[str]:
    """Return what `holdfast.verify` finds."""
    import holdfast

    return [f"{place.name}: {fault.what}" for fault in holdfast.verify(place).damage]


def fill(path: Path) -> None:
    """Fill a disk, to its last block."""
    for size in (1 << 16, 512):
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(size))


@contextlib.contextmanager
def small_disk(root: Path, size_bytes: int) -> Iterator[None]:
    """Mount a small disk in memory."""
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "holdfast", str(root)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def play_one(name: str, place: Path) -> list[str]:
    """Play one program; return what differs."""
    program, begun = PROGRAMS[name], time.monotonic()
    place.mkdir()
    one = Play(program, place)
    rounds: list[tuple[str, Callable[[], list[str]]]] = [("bits", one.bits)]
    rounds += [("moves", one.moved)] if program.moves else []
    rounds += [("full disk", one.full_disk)] if program.fills and os.geteuid() == 0 else []
    faults = []
    for what, run in rounds:
        found = run()
        faults += found
        print(f"{name}, {what}: {'; '.join(found) or 'good'}", flush=True)
    print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    return faults


def main() -> None:
    """Play the programs; fail when one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*PROGRAMS], help="some of them")
    given = parser.parse_args()
    if unknown := set(given.names) - PROGRAMS.keys():
        parser.error(f"there is no {unknown.pop()}; expected some of {', '.join(PROGRAMS)}")
    place = Path(tempfile.mkdtemp(prefix="holdfast-engines-"))
    try:
        faults = [fault for name in given.names for fault in play_one(name, place / name)]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
