"""A child process that interrupts one verb again and again, and tells its parent what it saw.

Each child is forked from a process without threads. It ends at the first fault: what follows in
the same process could be the same one. A dump of all threads ends a child that hangs.
"""

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

import holdfast
from holdfast.errors import HoldfastError

from .points import AGAIN_MAX, KINDS, Place, Watch, points_of
from .states import OPTIONS, content_of, make_state
from .strikes import Strike
from .verbs import SETTLE_S, VERBS, WATCHED, Scene, descriptors, judge, prepare, said_of, threads

HANG_S = 10.0
WARM_ROUNDS = 2  # after them, no pool is made, no module imported and no cache filled

Said = dict[str, Any]


class Batch:
    """What a child needs between two interrupts."""

    def __init__(self, verb: str, work: Path, seed: str) -> None:
        self.verb, self.work, self.seed = verb, work, seed
        self.old = work / "old"
        state = make_state(3)
        self.old_content = content_of(state)
        holdfast.save(state, self.old, options=OPTIONS)
        self._numbers = itertools.count()
        for _ in range(WARM_ROUNDS):
            for name in VERBS:
                self.untouched(name)
        self.handlers = [signal.getsignal(number) for number in WATCHED]
        self.threads, self.descriptors = threads(), descriptors()

    def scene(self, verb: str) -> tuple[Scene, Callable[[], Any]]:
        place = self.work / f"{verb}-{next(self._numbers)}"
        return prepare(verb, place, self.old, self.old_content)

    def untouched(self, verb: str) -> float:
        """Call a verb as it is; return how long that took."""
        scene, act = self.scene(verb)
        started = time.perf_counter()
        act()
        took_s = time.perf_counter() - started
        if faults := list(judge(scene, None, KeyboardInterrupt)):
            raise AssertionError(f"{verb}, without an interrupt: {faults}")
        shutil.rmtree(scene.place)
        return took_s

    def points(self) -> list[tuple[int, Place]]:
        """Return the points of the verb, in order."""
        scene, act = self.scene(self.verb)
        found = points_of(act)
        list(judge(scene, None, KeyboardInterrupt))
        return found

    def interrupt(self, watch: Watch | Strike) -> Said:
        """Interrupt one call; return where, and what was wrong afterwards."""
        scene, act = self.scene(self.verb)
        lost: list[Any] = []
        before, sys.unraisablehook = sys.unraisablehook, lost.append
        error: BaseException | None = None
        try:
            watch.call(act)
        except BaseException as came:
            error = came
        finally:
            sys.unraisablehook = before
        faults = []
        if watch.is_twice and error is not None:  # no `with` that its frames hold ends later
            error.__context__ = error.__cause__ = None
            error.with_traceback(None)
            gc.collect()
        if watch.is_twice or (isinstance(watch, Strike) and watch.met_training):
            torch.set_grad_enabled(True)  # a `with torch.no_grad()` that cannot end leaves it off
        if not torch.is_grad_enabled():
            faults.append("mode left: autograd is off")
            torch.set_grad_enabled(True)
        if watch.hit is not None:
            if error is None and not any(isinstance(each.exc_value, watch.kind) for each in lost):
                faults.append("swallowed: the call returned as if nothing had come")
            try:
                faults += judge(scene, error, watch.kind)
            except HoldfastError as failure:  # of a load: what was saved can no longer be judged
                faults.append(f"later load fails: {said_of(failure)}")
            faults += self.left()
        where = str(watch.hit) if watch.hit is not None else None
        shutil.rmtree(scene.place, ignore_errors=True)
        return {"place": where, "faults": faults}

    def left(self) -> list[str]:
        """Say what this process has more than before, and still has after a while."""
        end = time.monotonic() + SETTLE_S
        while (more := list(self._more())) and time.monotonic() < end:
            time.sleep(0.001)
        return more

    def _more(self) -> Iterator[str]:
        gc.collect()
        for what, was, now in (
            ("thread", self.threads, threads()),
            ("descriptor", self.descriptors, descriptors()),
        ):
            if more := Counter(now) - Counter(was):
                yield f"{what} left: {', '.join(sorted(more))}"
        if [signal.getsignal(number) for number in WATCHED] != self.handlers:
            yield "handler left: of a signal that was watched for"


def play(
    verb: str,
    numbers: list[int],
    work: Path,
    seed: str,
    *,
    real: bool,
    twice: bool,
    out: TextIO,
) -> None:
    """Interrupt at these points, or at random moments with these numbers, until the first fault."""

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    trace = (work / "trace").open("w")
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=trace)
    batch = Batch(verb, work, seed)
    gc.freeze()  # to collect what is there already would take most of the time
    gc.disable()  # its callbacks come at other events each time
    points = [] if real else batch.points()
    longest_s = 1.2 * min(batch.untouched(verb) for _ in range(3))
    say(points=[str(place) for _, place in points])
    for number in numbers:
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=trace)
        say(at=number)
        rng = random.Random(f"{seed} {verb} {number}")
        if real:
            watch: Watch | Strike = Strike(rng, longest_s, twice=twice)
        elif number < len(points):
            again = rng.randrange(1, AGAIN_MAX) if twice else None
            watch = Watch(points[number][0], KINDS[number % len(KINDS)], again=again)
        else:
            continue
        result = batch.interrupt(watch)
        say(done=number, **result)
        if result["faults"]:
            break
    say(ended=True)


def start(
    verb: str, numbers: list[int], work: Path, seed: str, *, real: bool, twice: bool = False
) -> tuple[int, int]:
    """Fork a child that plays; return its process, and the descriptor that it tells through."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    status = 1
    with contextlib.suppress(BaseException):
        os.close(reading)
        errors = os.open(work / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 2)
        os.close(errors)
        with os.fdopen(writing, "w") as out:
            try:
                play(verb, numbers, work, seed, real=real, twice=twice, out=out)
                status = 0
            except BaseException as error:
                out.write(json.dumps({"broken": f"{type(error).__name__}: {error}"}) + "\n")
                raise
    os._exit(status)
