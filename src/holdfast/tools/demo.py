"""`holdfast demo`: kill a training run in the middle of a save, go on, prove that nothing is lost.

Trains a small GPT with FSDP2 on two processes, checkpointed by the Checkpointer (`demo_train`).
Every number that it shows is measured in this run; a claim that fails makes the exit code 1.
"""

import argparse
import dataclasses
import json
import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from .. import Checkpointer
from ..errors import HoldfastError, OptionError
from ..stores.url import absolute
from .demo_check import compare, flip_one_bit, measure, try_open
from .demo_picture import draw
from .demo_report import align, brief, earlier, finding, save_times, verdict, write_markdown
from .demo_results import Results, Timing, judge, same_bits
from .demo_run import DemoRun, Kill, finish, kill_in_save, launch, wait
from .demo_show import Screen
from .text import show_bytes

GOOD, FAILED = 0, 1
STEPS, QUICK_STEPS = 37, 13
STEPS_MIN = 13  # six checkpoints at least two steps apart, and one step more
ROUNDS, QUICK_ROUNDS = 7, 3
ATTEMPTS = 3  # a save can be over before the signal arrives
TAKES = {"small": "about three minutes", "tiny": "one to two minutes"}  # by size, on two cores
ERROR_LINES = 3  # of an error on the terminal; report.md has all of it


@dataclass(frozen=True, slots=True)
class Plan:
    """What one demo does, and where.

    Attributes:
        scratch: checkpoints and logs; removed at the end of a good demo.
        every: steps from checkpoint to checkpoint, six of them.
    """

    out: Path
    scratch: Path
    size: str
    steps: int
    every: int
    rounds: int

    def run(self, name: str, processes: int, root: str, *, saves: bool = True) -> DemoRun:
        """Describe a start of the training script."""
        every = self.every if saves else None
        return DemoRun(name, processes, self.scratch / root, self.size, self.steps, every)

    def path(self, root: str, step: int) -> str:
        """Return the directory of a step of one of the runs."""
        with Checkpointer(self.scratch / root) as checkpointer:
            return checkpointer.path(step)

    def brief(self, text: str) -> str:
        """Shorten the paths in a text."""
        return brief(text, self.scratch)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see '{self.prog} --help'")


def main(arguments: list[str]) -> int:
    """DemoRun the demo; return 0 when every claim holds, 1 when one does not.

    Raises:
        OptionError: an invalid argument.
    """
    try:
        plan = _plan(arguments)
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)
    screen = Screen()
    results = Results(plan.size, plan.steps, plan.every, _machine())
    _announce(plan, screen)
    started = time.perf_counter()
    try:
        _tell(plan, results, screen)
    except HoldfastError as error:
        screen.clear()
        screen.lines(f"The demo cannot go on: {type(error).__name__}: {error}".splitlines())
        screen.say(f"What it did so far is in {plan.scratch}.")
        return FAILED
    except KeyboardInterrupt:
        shutil.rmtree(plan.scratch, ignore_errors=True)
        raise
    results.seconds = time.perf_counter() - started
    return _conclude(plan, results, screen)


_DESCRIPTION = """Kill a training run in the middle of a save, resume it, and show that nothing is
lost. It trains a small GPT with FSDP2 on two processes, and a Checkpointer saves it. Every number
is measured in this run. When a claim fails, the exit code is 1."""


def _plan(arguments: list[str]) -> Plan:
    parser = _Parser(
        prog="holdfast demo",
        description=_DESCRIPTION,
        epilog="Example: holdfast demo --quick",
    )
    results = "directory for the results; default: demo-out"
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help=results)
    steps_min = f"number of training steps, at least {STEPS_MIN}"
    parser.add_argument("--steps", type=int, help=steps_min)
    parser.add_argument("--quick", action="store_true", help="use a tiny model and few steps")
    chosen = parser.parse_args(arguments)
    steps = chosen.steps or (QUICK_STEPS if chosen.quick else STEPS)
    if steps < STEPS_MIN:
        raise OptionError(f"--steps is {steps}; expected at least {STEPS_MIN}")
    out = Path(absolute(chosen.out, "--out"))
    try:
        out.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="runs-", dir=out))
    except OSError as error:
        raise OptionError(f"--out {out} cannot be written: {error}") from error
    size, rounds = ("tiny", QUICK_ROUNDS) if chosen.quick else ("small", ROUNDS)
    return Plan(out, scratch, size, steps, (steps - 1) // 6, rounds)


def _machine() -> str:
    return (
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def _announce(plan: Plan, screen: Screen) -> None:
    screen.say(
        "holdfast demo: train a small GPT on 2 processes, kill it in the middle of a save, start "
        "it again and compare every bit. Then load on 1 and 3 processes, flip a bit, and time "
        f"saves. On 2 cores this takes {TAKES[plan.size]}."
    )


def _tell(plan: Plan, results: Results, screen: Screen) -> None:
    """Do everything, in order; what is seen goes into the results."""
    _train_unbroken(plan, results, screen)
    _kill(plan, results, screen)
    if results.kill is None:
        return
    _resume(plan, results, screen)
    _reshard(plan, results, screen)
    _flip(plan, results, screen)
    _time(plan, results, screen)


def _train_unbroken(plan: Plan, results: Results, screen: Screen) -> None:
    screen.heading("1. A run without interruption")
    screen.say(
        f"{plan.steps} steps on Python's standard library with FSDP2; a checkpoint every "
        f"{plan.every}."
    )
    run = plan.run("unbroken", 2, "unbroken")
    finish(run, screen.progress)
    screen.clear()
    results.unbroken = run.losses()
    results.final_step = plan.every * ((plan.steps - 1) // plan.every)
    path = plan.path("unbroken", results.final_step)
    results.parameters, results.state_bytes = measure(path)
    screen.say(
        f"{results.parameters:,} parameters, {show_bytes(results.state_bytes)} of state. Loss "
        f"{results.unbroken[1]:.3f}, after {plan.steps} steps {results.unbroken[plan.steps]:.3f}."
    )


def _kill(plan: Plan, results: Results, screen: Screen) -> None:
    screen.heading("2. The same run, killed in the middle of a save")
    step = 4 * plan.every
    screen.say(f"SIGKILL to every process when data of step {step} is on the disk, no MANIFEST.")
    run = plan.run("killed", 2, "killed")
    for _ in range(ATTEMPTS):
        results.kill = kill_in_save(run, step, screen.progress)
        screen.clear()
        if results.kill is None or not results.kill.committed:
            break
        screen.progress(f"step {results.kill.step} was committed first; once more")
    results.killed = run.losses()
    if results.kill is None:
        screen.say("The run came to its end before a save could be hit.")
        return
    with Checkpointer(run.root) as checkpointer:
        results.kept = checkpointer.steps()
    results.refusal = try_open(plan.path("killed", results.kill.step))
    _show_kill(plan, results, results.kill, screen)


def _show_kill(plan: Plan, results: Results, kill: Kill, screen: Screen) -> None:
    screen.say(
        f"Killed {kill.processes} processes {kill.after_s:.3f} s into the save of step "
        f"{kill.step}{earlier(kill)}. Left:"
    )
    screen.lines([f"{size:>13,} bytes  {plan.brief(name)}" for name, size in kill.files.items()])
    screen.lines([f"{'yes' if kill.committed else 'none':>13}        MANIFEST"])
    screen.say(f"Opening it: {plan.brief(results.refusal or 'it opens')}", lines_max=2)
    screen.say(f"Committed steps: {', '.join(map(str, results.kept)) or 'none'}.")


def _resume(plan: Plan, results: Results, screen: Screen) -> None:
    screen.heading("3. The same command again")
    run = plan.run("resumed", 2, "killed")
    finish(run, screen.progress)
    screen.clear()
    results.restored, results.resumed = run.restored(), run.losses()
    paths = [plan.path(root, results.final_step) for root in ("unbroken", "killed")]
    results.equal_tensors, results.tensors = compare(*paths)
    same = same_bits(results.resumed, results.unbroken)
    screen.say(
        f"It restored step {results.restored} and trained to step {plan.steps}. Equal to the "
        f"unbroken run's bit for bit: {same} of {len(results.resumed)} losses, and "
        f"{results.equal_tensors} of {results.tensors} tensors at step {results.final_step}."
    )


def _reshard(plan: Plan, results: Results, screen: Screen) -> None:
    screen.heading("4. The same checkpoint on other numbers of processes")
    step = results.final_step + 1
    screen.say(f"Each loads step {results.final_step}. Loss of step {step}:")
    rows = [("2 processes, FSDP2", results.unbroken[step])]
    # Started with 0 processes: a plain one, without torchrun, torch.distributed and FSDP2.
    for processes, how in ((0, "1 process, plain"), (3, "3 processes, FSDP2")):
        run = plan.run(f"on-{processes or 1}", processes, "killed", saves=False)
        run = dataclasses.replace(run, steps=step)
        finish(run, screen.progress)
        screen.clear()
        results.next_losses[processes or 1] = run.losses()[step]
        rows.append((how, run.losses()[step]))
    screen.lines([f"{how:20}{loss:.8f}" for how, loss in rows])


def _flip(plan: Plan, results: Results, screen: Screen) -> None:
    screen.heading("5. One flipped bit in a copy")
    source = plan.path("killed", results.final_step)
    copy = plan.scratch / "flipped"
    flip = results.flip = flip_one_bit(source, copy, plan.size)
    shutil.rmtree(copy)
    screen.say(f"Bit {flip.bit} of byte {flip.byte:,} of {plan.brief(flip.file)}.")
    said = plan.brief(flip.load_error or "it was loaded")
    screen.say(f"load: {said}", lines_max=ERROR_LINES)
    screen.say(f"verify: {plan.brief('; '.join(flip.faults)) or 'no fault'}", lines_max=1)


def _time(plan: Plan, results: Results, screen: Screen) -> None:
    screen.heading("6. The same state saved durably, by turns")
    record, scratch = plan.scratch / "timings.json", plan.scratch / "timings"
    scratch.mkdir()
    words = ["--root", str(plan.scratch / "killed"), "--size", plan.size]
    words += ["--rounds", str(plan.rounds), "--scratch", str(scratch), "--record", str(record)]
    log = record.with_suffix(".log")
    wait(launch("demo_timing", 2, words, log), log, lambda: screen.progress("saving"))
    screen.clear()
    results.timings = [Timing(**row) for row in json.loads(record.read_text())]
    screen.lines(align(save_times(results)))


def _conclude(plan: Plan, results: Results, screen: Screen) -> int:
    """Judge, and leave the report, the numbers and the picture; return the exit code."""
    claims = judge(results)
    good = all(claim.holds for claim in claims)
    picture = plan.out / "demo.png"
    title = finding(results) if good else "Not every claim held: see report.md"
    drawn = bool(results.timings) and draw(results, title, picture)
    if not drawn:
        picture.unlink(missing_ok=True)  # that of an earlier demo
    report = write_markdown(results, claims, picture=picture.name if drawn else None)
    document = dataclasses.asdict(results)
    document["claims"] = [dataclasses.asdict(claim) for claim in claims]
    (plan.out / "report.md").write_text(report)
    (plan.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    screen.heading("Claims")
    for line in verdict(claims):
        screen.say(line, hanging=4)
    screen.heading("Results")
    screen.say(f"{results.machine}; {results.seconds:.0f} s.")
    left = "report.md, results.json" + (", demo.png" if drawn else "")
    here = Path.cwd()
    shown = plan.out.relative_to(here) if plan.out.is_relative_to(here) else plan.out
    screen.say(f"{shown}: {left}.")
    if results.timings and not drawn:
        screen.say("No picture: matplotlib is not installed.")
    if not good:
        screen.say(f"NOT EVERY CLAIM HOLDS. Checkpoints and logs are in {plan.scratch}.")
        return FAILED
    shutil.rmtree(plan.scratch)
    return GOOD
