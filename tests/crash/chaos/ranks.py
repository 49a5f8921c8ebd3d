"""What a rank does: it restores, saves step after step, and tells what it sees, line by line.

Knows nothing of what is going to strike it.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import forked_ranks
import torch
import torch.distributed as dist
from crash_content import State, make_state

import holdfast
from holdfast.errors import HoldfastError
from holdfast.testing import Fault, faulty

OPTIONS = replace(forked_ranks.OPTIONS, pool_bytes=5 << 20)
STEPS_MAX = 1000  # of one job
GOOD_SAVES = 2  # one after the other end a job that trains on
PAUSE_S = 0.1  # a step of training after a save that failed
TRAINED_ON_S = 40.0  # by then a job that trains on has saved again, or never will
THREADS_GONE_S = 25.0  # what was held by a peer or a disk that came back is let go by then
TEXT_CHARACTERS = 600  # a line goes into a pipe in one piece


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job saves.

    Attributes:
        stage: as Checkpointer's.
        saves: it makes so many; a job that trains on at least so many, and until the last are good.
        trains_on: in the same processes, after a save that failed; else a rank ends with its error.
        deadline_s: of a save in the background.
        collective_s: timeout of the process group.
        call_s: the deadline of what waits in the foreground.
        keep: so many steps are kept; with all of them, all are judged in the end.
        write_ms: every write takes so long, so that what strikes strikes in the middle.
    """

    stage: str = "eager"
    saves: int = STEPS_MAX - 1
    trains_on: bool = False
    deadline_s: float = 1.0
    collective_s: float = 4.0
    call_s: float = 60.0
    keep: int = 3
    write_ms: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank told.

    Attributes:
        what: "ready" (restored ``step``), "calls" (to save ``step``), "waits" (for a save in the
            background), "saved", "told" (of the ``error``, with its text), or "over" (the text
            names threads that are left).
        at: by the monotonic clock, which all processes of a machine share.
    """

    job: int
    rank: int
    what: str
    step: int
    at: float
    error: str = ""
    text: str = ""


def number_of(job: int, step: int) -> int:
    """Return the number of the state that a job saves as a step."""
    return job * STEPS_MAX + step


class Teller:
    """Writes events to a pipe."""

    def __init__(self, job: int, rank: int, pipe: int) -> None:
        self._job, self._rank, self._pipe = job, rank, pipe

    def tell(self, what: str, step: int, error: str = "", text: str = "") -> None:
        """Write one."""
        text = text.encode("ascii", "replace").decode()[:TEXT_CHARACTERS]
        event = Event(self._job, self._rank, what, step, time.monotonic(), error, text)
        os.write(self._pipe, f"{json.dumps(asdict(event))}\n".encode())


def be_rank(
    plan: Plan, job: int, rank: int, root: Path, teller: Teller, faults: tuple[Fault, ...] = ()
) -> None:
    """Restore the run and save it on, in a process group that is there.

    Raises:
        HoldfastError: after a save that failed, unless the job trains on.
    """
    if plan.write_ms:
        slow = Fault("write", persistent=True, action="delay", argument=plan.write_ms)
        faults = (slow, *faults)
    with faulty(*faults):
        try:
            run = open_run(root, plan)
            start = run.restore(make_state(-1)) or 0
            teller.tell("ready", start)
            _save_on(plan, run, job, start, teller)
        except HoldfastError as error:
            teller.tell("told", 0, type(error).__name__, str(error))
            raise
    teller.tell("over", 0, text=", ".join(_threads_left()))
    dist.barrier()  # who serves the others' store ends with them


def open_run(root: Path, plan: Plan) -> holdfast.Checkpointer:
    """Open a run as all jobs do."""
    return holdfast.Checkpointer(
        root,
        every=1,
        keep=holdfast.Keep.latest(plan.keep),
        stage=plan.stage,
        signals=(),
        deadline_s=plan.deadline_s,
        options=OPTIONS,
    )


def _save_on(plan: Plan, run: holdfast.Checkpointer, job: int, start: int, teller: Teller) -> None:
    good, until = 0, time.monotonic() + TRAINED_ON_S
    for step in count(start + 1):
        if plan.trains_on:
            good_everywhere, time_left = _train(good, until)
            if step > start + plan.saves and (good_everywhere >= GOOD_SAVES or not time_left):
                return
        elif step > start + plan.saves:
            return
        try:
            _save(run, step, make_state(number_of(job, step)), teller)
        except HoldfastError as error:
            teller.tell("told", step, type(error).__name__, str(error))
            if not plan.trains_on:
                raise
            good = 0
            time.sleep(PAUSE_S)
        else:
            good += 1
            teller.tell("saved", step)


def _save(run: holdfast.Checkpointer, step: int, state: State, teller: Teller) -> None:
    teller.tell("calls", step)
    run.step(step, state)
    teller.tell("waits", step)
    run.wait()


def _train(good: int, until: float) -> tuple[int, bool]:
    """Meet as training does; return what all ranks agree on: saves that were good, time left."""
    numbers = torch.tensor([good, int(time.monotonic() < until)])
    dist.all_reduce(numbers, dist.ReduceOp.MIN)
    return int(numbers[0]), bool(numbers[1])


def _threads_left() -> list[str]:
    """Name the threads of saves and of calls to the ranks' store that do not end."""
    until = time.monotonic() + THREADS_GONE_S
    while left := [t.name for t in threading.enumerate() if _serves_a_save(t)]:
        if time.monotonic() > until:
            break
        time.sleep(PAUSE_S)
    return left


def _serves_a_save(thread: threading.Thread) -> bool:
    return thread.name in ("holdfast-save", "holdfast-call")


Prepare = Callable[[int], None]  # called in a rank, before it meets the others
