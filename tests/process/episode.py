"""One process that trains and saves while things happen to it, and tells its parent what it did.

The parent judges what is on the disk. Here, every call is guarded: what it raises has to be of the
kinds that are promised, and what it acknowledges is told with the digest of the state at the call.
"""

import faulthandler
import gc
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import holdfast
from holdfast.errors import HoldfastError

from .dumps import DUMP, DUMP_S, frames
from .points import KINDS
from .states import OPTIONS, State, content_of, digest_of, make_state
from .verbs import LATER_S, SETTLE_S, WATCHED, descriptors, said_of, says_filled, threads

Call = Callable[[], Any]
Name = TypeVar("Name")
CHILD_S = 15.0  # a forked child that lives longer hangs
LIMITED = (MemoryError, RuntimeError)  # torch's own, where memory or descriptors are short


class Leave(SystemExit):
    """Raised by a forked child to end as a program ends."""


class Episode:
    """What the events of one process share.

    Attributes:
        acknowledged: checkpoints that are durable, with width and digest.
        interrupted, limited: whether such a thing has happened, so that its errors may come.
        only: names of what has to happen, where there is a choice.
    """

    def __init__(self, seed: int, place: Path, descriptor: int, only: Collection[str] = ()) -> None:
        self.rng = random.Random(f"episode {seed}")
        self.place, self._descriptor, self.only = place, descriptor, only
        self.acknowledged: list[tuple[Path, int, str]] = []
        self.interrupted = self.limited = False
        self._number = 0
        self._lock = threading.Lock()
        self.spare = make_state(5)  # for a handler, which may come where none can be made
        self._spare_digest = digest_of(content_of(self.spare))
        self._handlers = [signal.getsignal(number) for number in WATCHED]
        self._threads: list[str] = []
        self._descriptors: list[str] = []

    def pick(self, names: Iterable[Name]) -> Name:
        """Return one of these at random: of those that have to happen, where they are there."""
        names = list(names)
        return self.rng.choice([name for name in names if name in self.only] or names)

    def has(self, chance: float, names: Iterable[str]) -> bool:
        """Return whether something of these names happens, at random if it does not have to."""
        return self.rng.random() < chance or any(name in self.only for name in names)

    def say(self, **what: Any) -> None:
        """Tell the parent, at once."""
        os.write(self._descriptor, json.dumps(what).encode() + b"\n")

    def fault(self, text: str) -> None:
        """Tell the parent of a broken promise."""
        self.say(fault=text)

    def new_path(self, name: str) -> Path:
        """Return a path of the episode where nothing is."""
        with self._lock:
            self._number += 1
            return self.place / f"{name}-{self._number}"

    def begin(self, path: Path, state: State) -> tuple[Path, int, str]:
        """Tell that a state is about to be saved; return what is to be there."""
        is_spare = state is self.spare
        width = state["model"][0].in_features
        digest = self._spare_digest if is_spare else digest_of(content_of(state))
        self.say(begin=str(path), width=width, digest=digest)
        return path, width, digest

    def acknowledge(self, saved: tuple[Path, int, str]) -> None:
        """Tell that it is durable."""
        self.acknowledged.append(saved)
        self.say(ack=str(saved[0]), digest=saved[2])

    def guard(self, what: str, call: Call) -> tuple[bool, Any]:
        """Call it; return whether it returned, and what: its error if not."""
        try:
            return True, call()
        except Leave:
            raise
        except BaseException as error:
            allowed: tuple[type[BaseException], ...] = (HoldfastError,)
            allowed += KINDS if self.interrupted else ()
            allowed += LIMITED if self.limited else ()
            if not isinstance(error, allowed):
                self.fault(f"{what} raises {said_of(error)}")
            self.say(raised=f"{what}: {said_of(error)}")
            return False, error

    def save(self, state: State, path: Path, around: Callable[[Call], Any] = lambda c: c()) -> bool:
        """Save in the foreground; return whether that was acknowledged."""
        saved = self.begin(path, state)
        call: Call = lambda: holdfast.save(state, path, options=OPTIONS)  # noqa: E731
        done, _ = self.guard("save", lambda: around(call))
        if done:
            self.acknowledge(saved)
        return done

    def save_async(self, state: State, path: Path, **given: Any) -> None:
        """Save in the background, and wait for it."""
        saved = self.begin(path, state)
        done, handle = self.guard(
            "save_async", lambda: holdfast.save_async(state, path, options=OPTIONS, **given)
        )
        if done and not handle.skipped and self.guard("result", handle.result)[0]:
            self.acknowledge(saved)

    def fork(self, what: str, work: Call) -> None:
        """Do something in a forked child, which then ends at once, or as a program if it leaves."""
        trace = (self.place / ".child").open("w+")
        process = os.fork()
        if process == 0:
            faulthandler.register(DUMP, file=trace)
            status = 0
            try:
                work()
            except Leave:
                raise
            except BaseException as error:
                self.fault(f"forked child, {what}: {said_of(error)}")
                status = 1
            os._exit(status)
        end = time.monotonic() + CHILD_S
        while time.monotonic() < end:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                trace.close()
                if status != 0:
                    ended = os.waitstatus_to_exitcode(status)
                    self.fault(f"forked child, {what}: ended with {ended}")
                return
            time.sleep(0.001)
        os.kill(process, DUMP)
        time.sleep(DUMP_S)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        trace.seek(0)
        self.fault(f"forked child hangs: {what}: {frames(trace.read())}")
        trace.close()

    def join(self, started: list[threading.Thread], what: str) -> None:
        """Wait for threads of the episode."""
        for thread in started:
            thread.join(CHILD_S)
            if thread.is_alive():
                self.fault(f"thread hangs: {what}")

    def warm(self) -> None:
        """Save once in each way, so that all that stays is there; then take count."""
        state = make_state(1)
        self.save(state, self.new_path("first"))
        self.save_async(state, self.new_path("first"))
        self.load(*self.acknowledged[0])
        self._threads, self._descriptors = threads(), descriptors()

    def load(
        self, path: Path, width: int, digest: str, around: Callable[[Call], Any] = lambda c: c()
    ) -> None:
        """Load what was acknowledged, and compare."""
        target = make_state(1 << 20, width)
        before = digest_of(content_of(target))
        call: Call = lambda: holdfast.load(path, into=target, options=OPTIONS)  # noqa: E731
        done, error = self.guard("load", lambda: around(call))
        found = digest_of(content_of(target))
        if done and found != digest:
            self.fault(f"load of {path.name} returns other bits than were saved")
        if not done and found not in (before, digest) and not says_filled(error):
            self.fault(f"load of {path.name} fills a part, and does not say so: {said_of(error)}")

    def settle(self) -> None:
        """Save again in both ways, soon, and find nothing left over."""
        self.interrupted = self.limited = False
        state, before = make_state(2), len(self.acknowledged)
        for save in (self.save_async, self.save):
            started = time.perf_counter()
            save(state, self.new_path("later"))
            if time.perf_counter() - started > LATER_S:
                self.fault(f"a later {save.__name__} takes {time.perf_counter() - started:.1f} s")
        if len(self.acknowledged) < before + 2:
            self.fault("a later save fails")
        end = time.monotonic() + SETTLE_S
        while (more := self._more()) and time.monotonic() < end:
            time.sleep(0.001)
        for left in more:
            self.fault(left)

    def _more(self) -> list[str]:
        """Name what this process has more than when it began."""
        found = []
        gc.collect()
        for what, was, now in (
            ("thread", self._threads, threads()),
            ("descriptor", self._descriptors, descriptors()),
        ):
            if more := Counter(now) - Counter(was):
                found.append(f"{what} left: {', '.join(sorted(more))}")
        if [signal.getsignal(number) for number in WATCHED] != self._handlers:
            found.append("handler left: of a signal that was watched for")
        return found
