"""Plays training programs with holdfast's own classes for a framework, beside the stock ones.

``python tests/integrations/frameworks/loops.py [NAME ...]``, by a Python with the frameworks.
Each program runs with the framework alone, to its end. Then it runs with holdfast: SIGKILL ends all
ranks in the middle of a save, then in the middle of a step, and the last start runs to the end. Its
losses and what it ends with are the same to the bit. It also goes on with other numbers of ranks,
and through a disk that is full for a while.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []

from integrations.frameworks import play  # noqa: E402

TOLERANCE = 1e-4  # of a mean loss on another number of ranks, whose sums have another order
ROOM_BYTES = 16 << 20  # of the small disk, beside three times what the framework alone keeps


@dataclass(frozen=True)
class Native:
    """A program, and how it is played.

    Attributes:
        script: its file.
        kind: what it is told to use.
        ranks: on which it runs to be compared to the bit.
        sizes: pairs of numbers of ranks: it is killed on the first, and goes on with the second.
        fills: whether it goes on through a full disk.
        more: of its environment.
    """

    script: str
    kind: str
    ranks: int = 2
    sizes: tuple[tuple[int, int], ...] = ()
    fills: bool = False
    more: tuple[tuple[str, str], ...] = ()


RESIZED = ((2, 1), (1, 3))
NATIVES = {
    "lightning": Native("lightning_native.py", "mp", sizes=RESIZED, fills=True),
    "lightning-lazy": Native("lightning_native.py", "mp", more=(("STAGE", "lazy"),)),
    "lightning-ddp": Native("lightning_native.py", "ddp", sizes=((2, 1),)),
    "lightning-fsdp1": Native("lightning_native.py", "fsdp1", sizes=((2, 1),)),
    "lightning-io": Native("lightning_native.py", "io", ranks=1, fills=True),
    "fabric": Native("fabric_native.py", "mp", sizes=RESIZED, fills=True),
    "torchtitan": Native("torchtitan_native.py", "own", fills=True),
    "torchtitan-dealt": Native("torchtitan_native.py", "dealt", sizes=RESIZED),
}


class Team(play.Ranks):
    """The ranks of one start."""

    def __init__(self, native: Native, ranks: int, arguments: list[str], logs: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, play.RUN, str(HERE / native.script), *arguments]
        self.logs = [Path(f"{logs}.{rank}.log") for rank in range(ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            own = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "PYTHONFAULTHANDLER": 1}
            own |= dict(native.more)
            env = play.environment(rank, port, "0", "") | {n: str(v) for n, v in own.items()}
            with log.open("w") as output:
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
            self.processes.append(process)

    def wait(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait; where a rank fails or hangs, let the others say where they are."""
        try:
            return super().wait(until)
        except SystemExit:
            self.send(signal.SIGABRT)  # faulthandler prints the stacks
            time.sleep(1)
            tails = "\n".join(f"--- {log}\n{log.read_text()[-6000:]}" for log in self.logs)
            sys.exit(f"a program failed, or took more than {play.LIMIT_S} s\n{tails}")


@dataclass
class Stage:
    """Where one comparison takes place."""

    native: Native
    root: Path
    dropout: str

    def team(self, who: str, ranks: int, place: Path) -> Team:
        """Start the program."""
        arguments = [str(place), str(place), self.native.kind, who, self.dropout]
        return Team(self.native, ranks, arguments, place.with_suffix(f".{time.time_ns()}"))

    def stock(self, ranks: int) -> Path:
        """Run with the framework alone, to the end."""
        place = self.root / f"stock-{ranks}-{self.dropout}"
        if not place.exists():
            place.mkdir()
            with self.team("STOCK", ranks, place) as team:
                team.wait()
            assert not list(place.rglob("MANIFEST")), "the run to compare with is the framework's"
        return place


def saves_under(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the saves whose data lies under a directory: (directory of the checkpoint, save id)."""
    for data in root.glob("*/data"):
        with contextlib.suppress(OSError):
            for save in os.scandir(data):
                if any(os.scandir(save)):
                    yield data.parent, save.name


def kill_in_save(team: Team, root: Path, at: int) -> str:
    """Kill all ranks in the middle of a save, the ``at``-th or a later one; return its place."""
    seen: set[str] = set()

    def is_enough() -> bool:
        before = len(seen)
        seen.update(save for _, save in saves_under(root))
        return len(seen) >= at and len(seen) > before

    while team.wait(is_enough):
        team.send(signal.SIGSTOP)
        time.sleep(0.02)  # until all have stopped
        torn = [(p, s) for p, s in saves_under(root) if not play.is_committed(p, s)]
        if torn and not any(is_being_retired(p, s) for p, s in torn):
            team.send(signal.SIGKILL)
            return torn[0][0].name
        team.send(signal.SIGCONT)
    sys.exit(f"the program ended before save {at} was met")


def is_being_retired(place: Path, save: str) -> bool:
    """Return whether what is not committed is on its way out."""
    return (place / f".manifest-{save}").is_dir()


def start(stage: Stage, kill: str, at: int, ranks: int, place: Path) -> None:
    """Start the program with holdfast, and kill it, or let it end."""
    with stage.team("HOLDFAST", ranks, place) as team:
        if kill == "save":
            print(f"    killed in the save of {kill_in_save(team, place, at)}", flush=True)
        elif kill == "step":
            if not team.wait(lambda: team.steps() >= at):
                sys.exit(f"the program ended before its step {at}")
        else:
            team.wait()


def results(place: Path, ranks: int) -> list[dict[str, Any]]:
    """Return what the ranks have ended with."""
    return [play.json.loads(Path(f"{place}.{rank}.json").read_text()) for rank in range(ranks)]


def means(found: list[dict[str, Any]]) -> dict[int, float]:
    """Return the mean loss of all ranks, by step."""
    steps = map(int, found[0]["losses"])
    return {
        step: sum(float.fromhex(rank["losses"][str(step)]) for rank in found) / len(found)
        for step in steps
    }


def faults_of_files(place: Path, kept: set[str], *, exactly: bool = False) -> list[str]:
    """Say what is wrong with the checkpoints that are left.

    Args:
        kept: what the framework alone has kept.
        exactly: nothing else may be there: a kill may leave what nobody deletes any more.
    """
    import holdfast

    places = [path.parent for path in place.rglob("MANIFEST")]
    found = [f"{p}: {fault.what}" for p in places for fault in holdfast.verify(p).damage]
    names = {p.name for p in places}
    if not kept <= names or (exactly and names != kept):
        found.append(f"it kept {sorted(names)}; the framework alone keeps {sorted(kept)}")
    if hidden := [entry.name for entry in place.iterdir() if entry.name.startswith(".")]:
        found.append(f"it left {hidden}")
    return found


def same_bits(stage: Stage) -> list[str]:
    """Kill in a save and in a step, resume, and compare every bit with the stock run."""
    ranks, place = stage.native.ranks, stage.root / "bits"
    stock = stage.stock(ranks)
    place.mkdir()
    for kill, at in (("save", 3), ("step", 3), ("", 0)):
        start(stage, kill, at, ranks, place)
    found = []
    for rank, (one, other) in enumerate(
        zip(results(stock, ranks), results(place, ranks), strict=True)
    ):
        if one["digest"] != other["digest"]:
            found.append(f"rank {rank} ends with other parameters or moments")
        wrong = [step for step, loss in other["losses"].items() if one["losses"][step] != loss]
        if wrong:
            found.append(f"rank {rank} has other losses in the steps {', '.join(wrong)}")
        if (first := min(map(int, other["losses"]))) < 3:
            found.append(f"rank {rank} began with step {first}: it resumed nothing")
    return found + faults_of_files(place, kept_by(stock))


def kept_by(stock: Path) -> set[str]:
    """Return the names of the checkpoints that the framework alone has left.

    torchtitan may end before it has deleted all that it wanted to.
    """
    return {entry.name for entry in stock.iterdir() if entry.name not in play.LATE}


def other_sizes(stage: Stage, before: int, after: int) -> list[str]:
    """Kill on one number of ranks, go on with another; compare mean losses with the stock run."""
    # That of the first number: on others, some programs begin with other weights.
    place, stock = stage.root / f"from-{before}-to-{after}", stage.stock(before)
    place.mkdir()
    start(stage, "save", 3, before, place)
    start(stage, "", 0, after, place)
    one, other = means(results(stock, before)), means(results(place, after))
    wrong = [
        f"step {step} on {after} ranks has the loss {loss}; expected {one[step]}"
        for step, loss in other.items()
        if abs(loss - one[step]) > TOLERANCE * abs(one[step])
    ]
    if min(other) < 3:
        wrong.append(f"{after} ranks began with step {min(other)}: they resumed nothing")
    return wrong + faults_of_files(place, kept_by(stock))


def full_disk(stage: Stage) -> list[str]:
    """Fill the disk for some steps: training goes on, an older step stays, a later one is saved."""
    ranks, place = stage.native.ranks, stage.root / "disk"
    stock = stage.stock(ranks)
    size = ROOM_BYTES + 3 * sum(file.stat().st_size for file in stock.rglob("*"))
    with small_disk(place, size), stage.team("HOLDFAST", ranks, place) as team:
        fill = place / "ballast"
        if not team.wait(lambda: team.steps() >= 5):
            sys.exit("the program ended before its step 5")
        team.send(signal.SIGSTOP)
        filled(fill)
        team.send(signal.SIGCONT)
        if not team.wait(lambda: filled(fill) and team.steps() >= 8):
            sys.exit("the program ended on the full disk")
        team.send(signal.SIGSTOP)
        older = [path for path in place.rglob("MANIFEST")]
        faults = [] if older else ["no older checkpoint is left on the full disk"]
        faults += [f"{p}: {f}" for p in older for f in damage_of(p.parent)]
        fill.unlink()
        team.send(signal.SIGCONT)
        team.wait()
        said = "".join(log.read_text() for log in team.logs)
        if "No space left" not in said and "not enough space" not in said:
            faults.append("no save has failed")
        faults += faults_of_files(place, kept_by(stock), exactly=True)
    for one, other in zip(results(stock, ranks), results(place, ranks), strict=True):
        if one["digest"] != other["digest"] or one["losses"] != other["losses"]:
            faults.append("training went on otherwise")
    return faults


def damage_of(place: Path) -> list[str]:
    """Return what `holdfast.verify` finds."""
    import holdfast

    return [fault.what for fault in holdfast.verify(place).damage]


def filled(path: Path) -> bool:
    """Fill a disk, to its last block; again, where a checkpoint was deleted meanwhile."""
    for size in (1 << 16, 512):
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(size))
    return True


@contextlib.contextmanager
def small_disk(place: Path, size_bytes: int) -> Iterator[None]:
    """Mount a small disk in memory."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "holdfast", str(place)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def play_one(name: str, root: Path, only: set[str]) -> list[str]:
    """Play one program; return what differs."""
    native, begun = NATIVES[name], time.monotonic()
    root.mkdir()
    exact, plain = Stage(native, root, "0.1"), Stage(native, root, "0")
    rounds: list[tuple[str, Callable[[], list[str]]]] = [("bits", lambda: same_bits(exact))]
    for before, after in native.sizes:
        sizes = f"{before}to{after}"
        rounds.append((sizes, lambda b=before, a=after: other_sizes(plain, b, a)))  # type: ignore
    if native.fills and os.geteuid() == 0:  # only root may mount
        rounds.append(("disk", lambda: full_disk(exact)))
    faults = []
    for what, run in rounds:
        if only and what not in only:
            continue
        found = run()
        faults += found
        print(f"{name}, {what}: {'; '.join(found) or 'good'}", flush=True)
    print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    return faults


def main() -> None:
    """Play the programs; fail when one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*NATIVES], help="some of them")
    parser.add_argument("--only", action="append", default=[], help="bits, 2to1, 1to3 or disk")
    parser.add_argument("--keep", action="store_true", help="leave the directory")
    given = parser.parse_args()
    if unknown := set(given.names) - NATIVES.keys():
        parser.error(f"there is no {unknown.pop()}; expected some of {', '.join(NATIVES)}")
    root = Path(tempfile.mkdtemp(prefix="holdfast-natives-"))
    try:
        found = [f for name in given.names for f in play_one(name, root / name, set(given.only))]
    finally:
        if given.keep:
            print(root)
        else:
            shutil.rmtree(root, ignore_errors=True)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
