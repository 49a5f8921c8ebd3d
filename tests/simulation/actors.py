"""Actors under one baton: exactly one runs at a time, and chance from one seed says which is next.

Promises that a run is repeatable to the event: time, order and upsets come from the world's
`random.Random` alone. An actor is a thread; it gives the baton away only within `Scheduler.step`,
`wait` and at its end. Knows processes that are killed, frozen and cut off; no files.
"""

import random
import threading
from collections.abc import Callable

from holdfast.engine.epochs import Epoch

NEVER = float("inf")


class Killed(BaseException):
    """The actor's process is gone: it unwinds without touching anything."""


class Process:
    """A simulated process: what it holds in memory, and what has become of it."""

    def __init__(self, name: str, job: int, rank: int) -> None:
        self.name, self.job, self.rank = name, job, rank
        self.dead = self.cut_off = False
        self.frozen_until = 0.0
        self.frozen_s = 0.0  # in all
        self.clock_off_s = 0.0
        self.sent_s: float | None = None  # when a request was sent that stands for it
        self.epochs: dict[str, Epoch] = {}
        self.names: list[str] = []  # see `holdfast.engine.epochs`
        self.synced: dict[str, float] = {}  # directories, and when they were last changed
        self.saving = (0, 0)  # the step and the value that it saves
        self.forced: set[int] = set()  # steps that it retires because it is told to
        self.retired: set[int] = set()
        self.tidied_at = 0.0  # when it last began to tidy
        self.is_plain = False  # what it saves is under no epoch
        self.in_call = False  # it replaces a step in a call that has no deadline
        self.flight: object = None  # the last save in the background
        self.preparing: tuple[int, int] | None = None  # who prepares one
        self.last_link = ""
        self.bars: dict[str, str] = {}  # see `holdfast.stores.objects`
        self.known: dict[str, object] = {}  # see `holdfast.engine.known`


class _Worker(threading.Thread):
    """A thread that runs one actor after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.baton = threading.Lock()
        self.baton.acquire()
        self.work: Callable[[], None] = lambda: None
        self.start()

    def run(self) -> None:
        while True:
            self.baton.acquire()
            self.work()


_idle: list[_Worker] = []  # of earlier worlds


class Actor:
    """A thread of a process; ``ready`` is when it goes on."""

    __slots__ = ("baton", "keys", "number", "process", "ready")

    def __init__(self, process: Process, number: int, baton: threading.Lock) -> None:
        self.process, self.number, self.baton = process, number, baton
        self.ready = 0.0
        self.keys: object = None  # what it waits for


class Scheduler:
    """The clock, the baton and the upsets of one world.

    Attributes:
        now: seconds, of `time.monotonic` on every machine.
        calls: made so far, by all.
        upsets: (number of the call before which it happens, what happens), ascending.
        trace: of every call, where that is asked for.
    """

    def __init__(self, rng: random.Random, enter: Callable[[Process, Process], None]) -> None:
        """Prepare; the thread that calls this is the driver.

        Args:
            enter: called when another process goes on: (the one before, the one that does).
        """
        self.rng, self._enter = rng, enter
        self.now = 0.0
        self.calls = 0
        self.operation = ""  # of the call that is made now
        self.density = 0.1  # share of calls that take time, so that another may come in between
        self.upsets: list[tuple[int, Callable[[Process], None]]] = []
        self.trace: list[str] | None = None
        self.hung = False
        self.driver = Actor(Process("driver", -1, 0), 0, threading.Lock())
        self.driver.baton.acquire()
        self.current = self.driver
        self.actors = [self.driver]
        self.errors: list[BaseException] = []
        self._count = 0

    def start(self, process: Process, work: Callable[[], None]) -> Actor:
        """Make an actor; it begins when its turn comes."""
        worker = _idle.pop() if _idle else _Worker()
        self._count += 1
        actor = Actor(process, self._count, worker.baton)

        def run() -> None:
            try:
                if not process.dead:
                    work()
            except Killed:
                pass
            except BaseException as error:
                self.errors.append(error)
            self._end(actor, worker)

        worker.work = run
        actor.ready = self.now
        self.actors.append(actor)
        return actor

    def step(self, operation: str, what: str = "") -> None:
        """Come to a call: let time pass, upsets happen, others go on."""
        actor = self.current
        process = actor.process
        if process.dead:
            raise Killed
        self.calls += 1
        self.operation = operation
        while self.upsets and self.calls >= self.upsets[0][0]:
            self.upsets.pop(0)[1](process)
        if self.trace is not None:
            self.trace.append(f"{self.calls:5} {self.now:14.3f} {process.name} {operation} {what}")
        if process.dead:
            raise Killed
        rng = self.rng
        if rng.random() < self.density:
            self.pause(0.002 * rng.random())
        elif process.frozen_until > self.now:
            self.pause(0.0)

    def note(self, text: str) -> None:
        """Put a line into the trace."""
        if self.trace is not None:
            self.trace.append(f"      {self.now:14.3f} {text}")

    def pause(self, seconds: float) -> None:
        """Let so much time pass for this actor."""
        self.current.ready = max(self.now + seconds, self.current.process.frozen_until)
        self._turn()

    def wait(self, keys: object, seconds: float, found: Callable[[], bool]) -> bool:
        """Wait until ``found``, which is asked after each `wake` of the keys; False: too late."""
        actor, until = self.current, self.now + seconds
        while not found():
            if self.now >= until:
                return False
            actor.keys, actor.ready = keys, max(until, actor.process.frozen_until)
            self._turn()
            actor.keys = None
        return True

    def wake(self, keys: object) -> None:
        """Let those who wait for these keys look again."""
        for actor in self.actors:
            if actor.keys is keys:
                actor.ready = min(actor.ready, max(self.now, actor.process.frozen_until))

    def kill(self, process: Process) -> None:
        """End a process, without a word."""
        process.dead = True
        for actor in self.actors:
            if actor.process is process:
                actor.ready = self.now

    def freeze(self, process: Process, seconds: float) -> None:
        """Stop a process; it goes on when the time is over, or at `thaw`."""
        process.frozen_until = self.now + seconds
        process.frozen_s += seconds
        for actor in self.actors:
            if actor.process is process:
                actor.ready = max(actor.ready, process.frozen_until)

    def thaw(self, process: Process) -> None:
        """Let a process go on."""
        if process.frozen_until > self.now:
            process.frozen_s -= process.frozen_until - self.now
            process.frozen_until = self.now
            for actor in self.actors:
                if actor.process is process:
                    actor.ready = self.now

    def _turn(self) -> None:
        """Give the baton to whoever is ready first; come back when it is this one's turn again."""
        mine = self.current
        if self._pass_on():  # from here on the other runs
            mine.baton.acquire()
        if mine.process.dead:
            raise Killed

    def _pass_on(self) -> bool:
        mine = self.current
        best = self.driver
        for actor in self.actors:
            if actor.ready < best.ready:
                best = actor
        if best.ready == NEVER:
            self.hung, best = True, self.driver
        elif best.ready > self.now:
            self.now = best.ready
        if best is mine:
            return False
        if best.process is not mine.process:
            self._enter(mine.process, best.process)
        self.current = best
        best.baton.release()
        return True

    def _end(self, actor: Actor, worker: _Worker) -> None:
        self.actors.remove(actor)
        self.wake("end")
        _idle.append(worker)
        self._pass_on()
