"""Runs unchanged training programs, kills them, starts them again, and compares every bit.

``python tests/integrations/frameworks/play.py [NAME ...]``, by the Python of `make frameworks`.
Each program runs on two ranks: once with DCP alone to its end, then with HOLDFAST_DCP=every, where
SIGKILL ends all ranks in the middle of a save, and in the middle of a step. ``--short`` leaves the
second kill out. ``--write`` puts the table into docs/frameworks.md.
"""

import argparse
import contextlib
import functools
import json
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

from integrations.page import Page  # noqa: E402

PAGE = Page("frameworks.md", "<!-- the table of make frameworks -->")
RANKS = 2
LIMIT_S, POLL_S = 240, 0.0005
WORD = ".manifest-dcp"  # what the drop-in leaves beside the data while it saves
MERGED = "model.safetensors"
RUN = str(HERE.parent / "run_example.py")  # what ends processes where gloo could abort them


@dataclass(frozen=True)
class Start:
    """One start of a program.

    Attributes:
        kill: "save" or "step": in the middle of what all ranks are killed; empty: they end.
        at: of which save or step of this start.
        given: further arguments of the program.
    """

    kill: str = ""
    at: int = 1
    given: tuple[str, ...] = ()


TWICE = (Start("save", 3), Start("step", 3), Start())


@dataclass(frozen=True)
class Program:
    """A program, and how it is played.

    Attributes:
        versions: packages whose versions the table has.
        does: for the table.
        starts: with holdfast, one after the other.
        begins: the step that the last start has to begin with, at least.
        merges: a checkpoint of which ``accelerate merge-weights`` makes one file.
        script: whose it is; default: that of its own name.
        is_url: whether it is given a ``holdfast://`` URL, where it saves through holdfast.
        late: checkpoints that it deletes in the background: they may or may not be there yet.
    """

    versions: tuple[str, ...]
    does: str
    starts: tuple[Start, ...] = TWICE
    begins: int = 3
    merges: str = ""
    script: str = ""
    is_url: bool = False
    late: tuple[str, ...] = ()


LATE = ("step-4", "step-6")  # with keep_latest_k=2; of those after step 2, which is gone for sure

PROGRAMS = {
    "accelerate": Program(
        ("accelerate",),
        "FSDP2, `save_state` every other step, `load_state` of the newest that is whole",
        merges="step-12/pytorch_model_fsdp_0",
    ),
    "lightning": Program(
        ("lightning",),
        "`ModelParallelStrategy`, `ModelCheckpoint(save_last=True, save_top_k=2)`, resumed from "
        "`last.ckpt`, which each save replaces",
    ),
    "trainer": Program(
        ("transformers", "accelerate"),
        "`Trainer` with FSDP2, resumed from step 4 over the checkpoints of steps 6 and 8, which "
        "hold other values",
        starts=(
            Start("save", 5),
            Start(given=("checkpoint-4", "8", "1000")),
            Start("save", 2, ("checkpoint-4",)),
            Start(given=("checkpoint-4",)),
        ),
        begins=5,
        merges="checkpoint-8/pytorch_model_fsdp_0",
    ),
    "torchtitan": Program(
        ("torchtitan",),
        "`Trainer` with `CheckpointManager`: `async_mode=async`, `keep_latest_k=2`, resumed from "
        "the newest step that it finds",
        late=LATE,
    ),
    "torchtitan-url": Program(
        ("torchtitan",),
        "the same with `checkpoint.folder` a `holdfast://` path, which it lists and deletes by "
        "fsspec, and `HOLDFAST_DCP=1`",
        script="torchtitan",
        is_url=True,
        late=LATE,
    ),
}


def environment(rank: int, port: int, dcp: str, folder: str) -> dict[str, str]:
    """Return the environment of one rank."""
    ours = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "RANK": rank, "LOCAL_RANK": rank}
    ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    ours |= {"HF_HUB_OFFLINE": 1, "HOLDFAST_DCP": dcp, "FOLDER": folder}
    return os.environ | {name: str(value) for name, value in ours.items()}


class Ranks:
    """The processes of one start."""

    def __init__(
        self, script: str, arguments: list[str], logs: Path, dcp: str, folder: str
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, RUN, str(HERE / f"{script}_loop.py"), *arguments]
        self.logs = [Path(f"{logs}.{rank}.log") for rank in range(RANKS)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as output:
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(rank, port, dcp, folder),
                    start_new_session=True,
                )
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, and to whatever they have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def steps(self) -> int:
        """Return how many steps rank 0 has said."""
        return self.logs[0].read_text().count("\nstep ") + self.logs[0].read_text().startswith("s")

    def wait(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the end; or until something holds, then return True."""
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in self.processes):
            if until():
                return True
            failed = any(process.poll() not in (None, 0) for process in self.processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if any(process.poll() != 0 for process in self.processes):
            tails = "\n".join(f"--- {log}\n{log.read_text()[-3000:]}" for log in self.logs)
            sys.exit(f"a program failed, or took more than {LIMIT_S} s\n{tails}")
        return False


def words_in(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the saves that are under way: their directories and ids."""
    for path in root.rglob(WORD):
        with contextlib.suppress(OSError, ValueError, KeyError):
            yield path.parent, json.loads(path.read_bytes())["save_id"]


def is_committed(place: Path, save_id: str) -> bool:
    """Return whether the checkpoint at a place is of a save."""
    import holdfast

    with contextlib.suppress(holdfast.errors.HoldfastError):
        return holdfast.open(place).save_id == save_id
    return False


def kill_in_save(ranks: Ranks, root: Path, at: int) -> str:
    """Kill all ranks in the middle of a save, the ``at``-th or a later one; return its place."""
    seen: set[str] = set()

    def is_enough() -> bool:
        seen.update(save for _, save in words_in(root))
        return len(seen) >= at

    while ranks.wait(is_enough):
        ranks.send(signal.SIGSTOP)
        time.sleep(0.02)  # until all have stopped
        under_way = [(p, s) for p, s in words_in(root) if not is_committed(p, s)]
        if under_way:
            ranks.send(signal.SIGKILL)
            return str(under_way[0][0].relative_to(root))
        at = len(seen) + 1  # it was committed this moment
        ranks.send(signal.SIGCONT)
    sys.exit(f"the program ended before save {at} was met")


def start(name: str, each: Start, root: Path, result: Path, *, routed: bool) -> str:
    """Start a program once; say how it ended."""
    program, arguments = PROGRAMS[name], [str(root), str(result), *each.given]
    is_url = program.is_url and routed
    dcp = ("1" if is_url else "every") if routed else "0"
    folder = f"holdfast://{root}" if is_url else ""
    logs = result.with_suffix(f".{time.time_ns()}")
    with Ranks(program.script or name, arguments, logs, dcp, folder) as ranks:
        if each.kill == "save":
            return f"killed in the save of {kill_in_save(ranks, root, each.at)}"
        if each.kill == "step":
            if not ranks.wait(lambda: ranks.steps() >= each.at):
                sys.exit(f"the program ended before its step {each.at}")
            return f"killed in step {each.at} of the start"
        ranks.wait()
        return "ended"


def results(result: Path) -> list[dict[str, Any]]:
    """Return what the ranks have ended with."""
    return [json.loads(Path(f"{result}.{rank}.json").read_text()) for rank in range(RANKS)]


def differences(program: Program, stock: Path, ours: Path) -> list[str]:
    """Compare a run that was killed and resumed with one that was not."""
    found = []
    for rank, (one, other) in enumerate(zip(results(stock), results(ours), strict=True)):
        if one["digest"] != other["digest"]:
            found.append(f"rank {rank} ends with other parameters or moments")
        wrong = [step for step, loss in other["losses"].items() if one["losses"][step] != loss]
        if wrong:
            found.append(f"rank {rank} has other losses in the steps {', '.join(wrong)}")
        if (first := min(map(int, other["losses"]))) < program.begins:
            found.append(f"rank {rank} began with step {first}: it resumed nothing")
    return found


def faults_of_files(stock: Path, root: Path, late: tuple[str, ...] = ()) -> list[str]:
    """Say what is wrong with the checkpoints that a routed program has left."""
    import holdfast

    found = [f"{path} is DCP's own" for path in root.rglob("*.distcp")]
    places = [path.parent for path in root.rglob("MANIFEST")]
    kept = {str(place.relative_to(root)) for place in places}.difference(late)
    written = {str(path.parent.relative_to(stock)) for path in stock.rglob(".metadata")}
    if kept != (expected := written.difference(late)):
        found.append(f"it kept {sorted(kept)}; DCP alone keeps {sorted(expected)}")
    for place in places:
        found += [f"{place}: {fault.what}" for fault in holdfast.verify(place).damage]
        if not (place / ".metadata").exists():
            found.append(f"{place} has no marker")
    return found


def merge(source: Path, *, routed: bool) -> bytes:
    """Run ``accelerate merge-weights`` on a checkpoint; return the file that it makes."""
    target = Path(f"{source}.merged")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    there = os.environ | {"HOLDFAST_DCP": "every" if routed else "0"}
    subprocess.run([*command, str(source), str(target)], check=True, env=there, stdout=sys.stderr)
    return (target / MERGED).read_bytes()


def play(name: str, root: Path, short: bool) -> list[str]:
    """Play one program; return what differs."""
    program, begun = PROGRAMS[name], time.monotonic()
    stock, ours = root / f"{name}-dcp", root / f"{name}-holdfast"
    for place in (stock, ours):
        place.mkdir()
    start(name, Start(), stock, stock, routed=False)
    assert not list(stock.rglob("MANIFEST")), "the run to compare with is DCP's alone"
    starts = [each for each in program.starts if not (short and each.kill == "step")]
    ended = [start(name, each, ours, ours, routed=True) for each in starts]
    found = differences(program, stock, ours) + faults_of_files(stock, ours, program.late)
    if what := program.merges:
        merged = merge(stock / what, routed=False), merge(ours / what, routed=True)
        found += ["merge-weights makes another file"] if merged[0] != merged[1] else []
    seconds = time.monotonic() - begun
    verdict = "; ".join(found) or "the same bits"
    print(f"{name}: {', '.join(ended)}: {verdict} ({seconds:.0f} s)", flush=True)
    return found


@functools.cache
def pinned() -> dict[str, str]:
    """Return the versions that are installed."""
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def table() -> str:
    """Return the table of the page."""
    lines = ["| program | what it does | killed | compared with DCP, not killed |"]
    lines.append("|---|---|---|---|")
    for program in PROGRAMS.values():
        versions = ", ".join(f"{package} {pinned()[package]}" for package in program.versions)
        kills = ", ".join(f"in a {each.kill}" for each in program.starts if each.kill)
        also = "; `accelerate merge-weights` makes the same file" if program.merges else ""
        lines.append(f"| {versions} | {program.does} | {kills} | the same bits{also} |")
    return "\n".join(lines)


def main() -> None:
    """Play the programs; fail when one differs, or the page has another table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*PROGRAMS], help="some of them")
    parser.add_argument("--short", action="store_true", help="one kill a program, in a save")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    given = parser.parse_args()
    if unknown := set(given.names) - PROGRAMS.keys():
        parser.error(f"there is no {unknown.pop()}; expected some of {', '.join(PROGRAMS)}")
    root = Path(tempfile.mkdtemp(prefix="holdfast-frameworks-"))
    try:
        found = [fault for name in given.names for fault in play(name, root, given.short)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    PAGE.keep(table(), write=given.write)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
