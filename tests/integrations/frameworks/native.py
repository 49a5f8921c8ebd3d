"""Plays programs whose framework has an integration of its own, beside the framework alone.

``python tests/integrations/frameworks/native.py [NAME ...]``, by a Python with the frameworks.
Each program trains with the framework alone, to its end. Then it trains with holdfast: SIGKILL ends
all ranks in the middle of saves, and it resumes by the framework's own switch. Losses and weights
are compared bit for bit; from 2 ranks on 1, and from 1 on 3, to a tolerance. Every checkpoint is
verified, and the framework's own option must have kept as many. A disk that is full during a save
ends no training.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []

from integrations.frameworks.play import RUN, pinned  # noqa: E402
from integrations.frameworks.results import unlike  # noqa: E402
from integrations.page import Page  # noqa: E402

LIMIT_S, POLL_S = 150, 0.0005
TOLERANCE = 2e-4  # sums have another order on another number of ranks


@dataclass(frozen=True)
class Start:
    """One start of a program; its settings, which it is given as JSON.

    Attributes:
        kind: which variant of the program.
        root: where it saves.
        result: where it writes how it ended.
        ranks: how many processes.
        ours: how holdfast is active: "class", "install"; empty: not at all.
        resume: what the framework's own switch is given; empty: it begins.
        full_disk: whether the disk is full during one save.
    """

    kind: str
    root: str
    result: str
    ranks: int = 2
    ours: str = ""
    resume: Any = ""
    full_disk: bool = False


@dataclass(frozen=True)
class Program:
    """A program, and how it is played.

    Attributes:
        versions: packages whose versions the table has.
        does: for the table.
        page: of docs/frameworks, which has the table.
        script: its file.
        kind: variant of the program.
        ours: how holdfast is active.
        resume: the framework's own switch: take the newest.
        pattern: of the directories of checkpoints, below the root.
        ranks: how many it trains on.
        moves: further numbers of ranks: (trained on, resumed on).
        kills: of which save of each start it is killed.
        full_disk: whether it trains once more, with a disk that is full during a save.
    """

    versions: tuple[str, ...]
    does: str
    page: str
    script: str
    kind: str
    ours: str
    resume: Any = True
    pattern: str = "checkpoint-*"
    ranks: int = 2
    moves: tuple[tuple[int, int], ...] = ()
    kills: tuple[int, ...] = (2, 2)
    full_disk: bool = False


HF = ("transformers", "accelerate")
NUMBERED = "checkpoints/checkpoint_*"
TRAINER = ("transformers", "trainer_program.py")


def _accelerate(how: str, kind: str, **given: Any) -> Program:
    does = f"{how}, `automatic_checkpoint_naming`, `total_limit=2`, a custom object"
    more = {"page": "accelerate", "script": "accelerate_program.py", "pattern": NUMBERED}
    return Program(("accelerate",), does, kind=kind, ours="install", **more, **given)


PROGRAMS = {
    "trainer-ddp": Program(
        *(HF, 'DDP, `install("transformers")`, `save_total_limit=2`'),
        *(*TRAINER, "ddp", "install"),
        full_disk=True,
    ),
    "trainer-fsdp2": Program(HF, "FSDP2, `HoldfastTrainer`", *TRAINER, "fsdp", "class"),
    "trainer-fsdp1": Program(
        *(HF, 'FSDP1, `install("transformers")`', *TRAINER, "fsdp1-exact", "install"),
        kills=(2,),
        moves=((2, 1),),
    ),
    "trainer-lora": Program(
        *(("transformers", "peft"), "LoRA with FSDP2", *TRAINER, "fsdp-lora", "class"), kills=(2,)
    ),
    "trainer-zero2": Program(
        (*HF, "deepspeed"), "DeepSpeed ZeRO-2, `HoldfastTrainer`", *TRAINER, "zero2", "class"
    ),
    "trainer-zero3": Program(
        (*HF, "deepspeed"),
        'DeepSpeed ZeRO-3 in bf16, with its own optimizer and schedule, `install("transformers")`',
        *(*TRAINER, "zero3-bf16-own", "install"),
        kills=(2,),
    ),
    "trainer-zero-lora": Program(
        ("transformers", "peft", "deepspeed"),
        "LoRA with DeepSpeed ZeRO-3",
        *(*TRAINER, "zero3-lora", "class"),
        kills=(2,),
    ),
    "trainer-moves": Program(
        *(HF, "FSDP2, on another number of ranks", *TRAINER, "fsdp-exact", "install"),
        kills=(),
        moves=((2, 1), (1, 3)),
    ),
    "accelerate-ddp": _accelerate("DDP", "ddp", full_disk=True),
    "accelerate-fsdp2": _accelerate("FSDP2", "fsdp"),
    "accelerate-fsdp1": _accelerate("FSDP1", "fsdp1-exact", kills=(2,), moves=((2, 1),)),
    "accelerate-moves": _accelerate(
        "FSDP2, on another number of ranks", "fsdp-exact", kills=(), moves=((2, 1), (1, 3))
    ),
}


class Ranks:
    """The processes of one start."""

    def __init__(self, script: str, start: Start) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._start = start
        self.logs = [Path(f"{start.result}.{rank}.log") for rank in range(start.ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, RUN, str(HERE / script), json.dumps(asdict(start))],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment(rank, port),
                    start_new_session=True,
                )
            self.processes.append(process)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        ours: dict[str, Any] = {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "HOLDFAST_DCP": 0}
        ours["PYTHONUNBUFFERED"] = 1
        if self._start.ranks > 1:
            ours |= {"WORLD_SIZE": self._start.ranks, "LOCAL_WORLD_SIZE": self._start.ranks}
            ours |= {"RANK": rank, "LOCAL_RANK": rank}
            ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        return os.environ | {name: str(value) for name, value in ours.items()}

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

    def run(self) -> bool:
        """Return whether all ranks are still running; end the program if one failed."""
        codes = [process.poll() for process in self.processes]
        if any(code not in (None, 0) for code in codes):
            tails = "\n".join(f"--- {log}\n{log.read_text()[-4000:]}" for log in self.logs)
            sys.exit(f"a program failed: {self._start}\n{tails}")
        return None in codes

    def wait(self) -> None:
        """Wait for the end."""
        deadline = time.monotonic() + LIMIT_S
        while self.run():
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {log}\n{log.read_text()[-4000:]}" for log in self.logs)
                sys.exit(f"a program took more than {LIMIT_S} s: {self._start}\n{tails}")
            time.sleep(0.02)


def saves_in(root: Path, pattern: str) -> Iterator[tuple[Path, str]]:
    """Yield the saves whose data is there: their directories and ids."""
    for place in root.glob(f"{pattern}/data/*"):
        yield place.parents[1], place.name


def is_committed(place: Path, save_id: str) -> bool:
    """Return whether the checkpoint at a place is of a save."""
    import holdfast

    with contextlib.suppress(holdfast.errors.HoldfastError):
        return holdfast.open(place).save_id == save_id
    return False


def kill_in_save(ranks: Ranks, root: Path, pattern: str, at: int) -> str:
    """Kill all ranks in the middle of a save, the ``at``-th or a later one; return its place."""
    before = {save for _, save in saves_in(root, pattern)}
    seen: set[str] = set()
    while ranks.run():
        now = [(p, s) for p, s in saves_in(root, pattern) if s not in before]
        seen |= {save for _, save in now}
        if len(seen) < at:
            time.sleep(POLL_S)
            continue
        ranks.send(signal.SIGSTOP)
        time.sleep(0.02)  # until all have stopped
        under_way = [(p, s) for p, s in now if p.exists() and not is_committed(p, s)]
        if under_way:
            ranks.send(signal.SIGKILL)
            return str(under_way[0][0].relative_to(root))
        at = len(seen) + 1  # it was committed this moment
        ranks.send(signal.SIGCONT)
    sys.exit(f"the program ended before save {at} was met")


def result_of(start: Start) -> list[dict[str, Any]]:
    """Return what the ranks have ended with."""
    found = [Path(f"{start.result}.{rank}.json") for rank in range(start.ranks)]
    return [json.loads(path.read_text()) for path in found]


def differences(stock: Start, ours: Start) -> list[str]:
    """Compare a run that was killed and resumed with one that was not, as `unlike` does."""
    return unlike(result_of(stock), result_of(ours))


def resumed(start: Start) -> list[str]:
    """Say if a start resumed nothing, or everything."""
    steps = {step for rank in result_of(start) for step in rank["losses"]}
    if not steps or "1" in steps:
        return [f"it took the steps {sorted(steps)}: it resumed nothing"]
    return []


def near(stock: Start, ours: Start) -> list[str]:
    """Compare the weights of runs on different numbers of ranks, to the tolerance."""
    import torch

    one, other = (torch.load(f"{start.result}.weights") for start in (stock, ours))
    if one.keys() != other.keys():
        return [f"other names: {sorted(one.keys() ^ other.keys())[:3]}"]
    far = {n: (one[n] - other[n]).abs().max().item() for n in one}
    name = max(far, key=lambda each: far[each])
    return [] if far[name] <= TOLERANCE else [f"{name} is {far[name]:.2e} away"]


def faults_of_files(root: Path, pattern: str, stock: Path) -> list[str]:
    """Say what is wrong with the checkpoints that a program has left."""
    import holdfast

    found = []
    kept = {str(place.parent.relative_to(root)) for place in root.glob(f"{pattern}/MANIFEST")}
    wanted = {str(place.relative_to(stock)) for place in stock.glob(pattern)}
    if kept != wanted:
        found.append(f"it kept {sorted(kept)}; the framework alone keeps {sorted(wanted)}")
    for name in kept:
        verified = holdfast.verify(root / name)
        found += [f"{name}: {fault.what}" for fault in verified.damage]
    return found


class Play:
    """One program, played under a directory."""

    def __init__(self, name: str, program: Program, place: Path) -> None:
        self.name, self.program, self.place = name, program, place
        self.found: list[str] = []
        self.done: list[str] = []

    def start(self, folder: str, **given: Any) -> Start:
        """Return a start that saves into a folder."""
        root = self.place / folder
        root.mkdir(exist_ok=True)
        result = str(root / f"result-{time.time_ns()}")
        return replace(
            Start(self.program.kind, str(root), result, self.program.ranks, self.program.ours),
            **given,
        )

    def run(self, start: Start) -> Start:
        """Run a start to its end."""
        with Ranks(self.program.script, start) as ranks:
            ranks.wait()
        return start

    def play(self) -> list[str]:
        """Play it; return what is wrong."""
        program = self.program
        stock = self.run(self.start("stock", ours=""))
        if program.kills:
            self._killed(stock)
        if program.full_disk:
            self._full_disk(stock)
        for trained, resumed_on in program.moves:
            self._moved(stock, trained, resumed_on)
        return self.found

    def _killed(self, stock: Start) -> None:
        program, resume = self.program, ""
        for at in program.kills:
            start = self.start("ours", resume=resume)
            with Ranks(program.script, start) as ranks:
                where = kill_in_save(ranks, Path(start.root), program.pattern, at)
            self.done.append(f"killed in the save of {where}")
            resume = program.resume
        last = self.run(self.start("ours", resume=resume))
        self.found += differences(stock, last) + resumed(last)
        self.found += faults_of_files(Path(last.root), program.pattern, Path(stock.root))

    def _full_disk(self, stock: Start) -> None:
        start = self.run(self.start("full", full_disk=True))
        self.found += differences(stock, start)
        self.found += faults_of_files(Path(start.root), self.program.pattern, Path(stock.root))
        log = Path(f"{start.result}.0.log").read_text()
        if "training goes on" not in log:
            self.found.append("no save failed for the full disk")
        self.done.append("trained on with a full disk")

    def _moved(self, stock: Start, trained: int, resumed_on: int) -> None:
        folder = f"moved-{trained}-{resumed_on}"
        begun = self.start(folder, ranks=trained)
        with Ranks(self.program.script, begun) as ranks:
            kill_in_save(ranks, Path(begun.root), self.program.pattern, 3)
        last = self.run(self.start(folder, ranks=resumed_on, resume=self.program.resume))
        self.found += near(stock, last) + resumed(last)
        self.found += faults_of_files(Path(last.root), self.program.pattern, Path(stock.root))
        self.done.append(f"from {trained} to {resumed_on} ranks")


def page_of(name: str) -> Page:
    """Return a page of docs/frameworks."""
    return Page(f"frameworks/{name}.md", "<!-- the table of make frameworks-native -->")


def table(page: str) -> str:
    """Return the table of a page."""
    lines = ["| versions | program | killed | compared with the framework alone, not killed |"]
    lines.append("|---|---|---|---|")
    for program in (each for each in PROGRAMS.values() if each.page == page):
        versions = ", ".join(f"{package} {pinned()[package]}" for package in program.versions)
        kills = f"in {len(program.kills) or 1} save{'s' * (len(program.kills) > 1)}"
        moves = "; ".join(f"{one} → {other} ranks" for one, other in program.moves)
        said = ["the same bits"] * bool(program.kills)
        said += [f"{moves}: weights to {TOLERANCE:g}"] * bool(moves)
        said += ["trains on with a full disk"] * program.full_disk
        lines.append(f"| {versions} | {program.does} | {kills} | {'; '.join(said)} |")
    return "\n".join(lines)


def main() -> None:
    """Play the programs; fail when one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*PROGRAMS], help="some of them")
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    given = parser.parse_args()
    if unknown := set(given.names) - PROGRAMS.keys():
        parser.error(f"there is no {unknown.pop()}; expected some of {', '.join(PROGRAMS)}")
    root, failed = Path(tempfile.mkdtemp(prefix="holdfast-native-")), False
    try:
        for name in given.names:
            begun, place = time.monotonic(), root / name
            place.mkdir()
            play = Play(name, PROGRAMS[name], place)
            found = play.play()
            verdict, seconds = "; ".join(found) or "good", time.monotonic() - begun
            print(f"{name}: {', '.join(play.done)}: {verdict} ({seconds:.0f} s)", flush=True)
            failed |= bool(found)
    finally:
        if not given.keep:
            shutil.rmtree(root, ignore_errors=True)
    for page in sorted({program.page for program in PROGRAMS.values()}):
        page_of(page).keep(table(page), write=given.write)
    sys.exit(failed)


if __name__ == "__main__":
    main()
