"""Delivers events to observers, each in a thread of its own. Knows no files.

Invariants:
  1. Who tells an event never waits for an observer, and never sees its error.
  2. An observer that hangs or is slow loses events; a bounded number waits for it.
  3. `close`, and the end of Python, wait for what was told, for a bounded time.
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .. import threads, worker
from ..errors import OptionError, shown
from ..saving import handle  # noqa: F401  the end of Python waits for a save first, then here
from .events import Event, Observer

if TYPE_CHECKING:
    from ..engine.ledger import Ledger
    from ..group.base import Group

logger = logging.getLogger("holdfast")

WAITING_MAX = 1000  # events for one observer
FLUSH_S = 5.0  # for all observers together, when a Checkpointer is closed and when Python ends
TICK_S = 1.0  # between the calls of an observer's `tick`


class _Line:
    """The events that wait for one observer, and the thread that calls it."""

    def __init__(self, call: Observer) -> None:
        self._call, self._tick = call, getattr(call, "tick", None)
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._has_begun = self._has_failed = False
        self._lost = 0
        self._empty = worker.Latch()  # after the last event

    def put(self, event: Event) -> None:
        """Let an event wait, if there is room."""
        if self._queue.qsize() >= WAITING_MAX:
            self._lost += 1
            if self._lost == 1:
                logger.warning(
                    "the observer %s is too slow: %d events wait for it, and further ones are "
                    "dropped",
                    *(_name_of(self._call), WAITING_MAX),
                )
            return
        self._queue.put(event)
        if not self._has_begun:
            self._has_begun = True
            _lines.add(self)
            if worker.start(self._work, "holdfast-observer") is None:
                self._lost = 1
                self._ended()
                logger.warning("no thread can be started: %s sees no events", _name_of(self._call))

    def end(self) -> None:
        """Let the thread end, after what waits."""
        self._queue.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; return False when it has not in that time."""
        return not self._has_begun or self._empty.wait(timeout_s)

    def _work(self, may_begin: threads.MayBegin) -> None:
        if not may_begin():
            return
        while True:
            try:
                event = self._queue.get(timeout=None if self._tick is None else TICK_S)
            except Empty:
                self._deliver(self._tick)
                continue
            if event is None:
                break
            self._deliver(self._call, event)
        if self._lost:
            text = "the observer %s was too slow, and lost %d events"
            logger.warning(text, _name_of(self._call), self._lost)
        self._ended()

    def _ended(self) -> None:
        _lines.discard(self)
        self._empty.set()

    def _deliver(self, call: Any, *given: Event) -> None:
        try:
            call(*given)
        except BaseException as error:  # whatever it is, a SystemExit too: the thread goes on
            what = f"{type(error).__name__}: {error}"
            trace = None if self._has_failed else error  # once; the next ones are alike
            self._has_failed = True
            logger.warning("the observer %s failed: %s", _name_of(self._call), what, exc_info=trace)


class Observers:
    """Tells events to what the user gave to a Checkpointer. Thread-safe."""

    def __init__(self, calls: Iterable[Observer], run: str, ranks: "Group") -> None:
        """Check what was given.

        Raises:
            OptionError: it is not a list of functions.
        """
        found = list(calls) if isinstance(calls, Iterable) else [calls]
        for call in found:
            if not callable(call) or not isinstance(calls, Iterable):
                raise OptionError(
                    f"observe is {shown(calls)}; expected a list of functions of one "
                    "holdfast.Event, such as [print]"
                )
        self._run, self._rank, self._world_size = run, ranks.rank, ranks.world_size
        self._lines = [_Line(call) for call in found]
        self._is_closed, self._process = not found, os.getpid()

    def __bool__(self) -> bool:
        return not self._is_closed

    def tell(self, kind: str, step: int | None, **more: Any) -> None:
        """Tell every observer of an event, without waiting for any."""
        if self._is_closed or os.getpid() != self._process:
            return
        known: dict[str, Any] = {"run": self._run, "rank": self._rank}
        known |= {"world_size": self._world_size, "time_s": time.time()}
        event = Event(kind=kind, step=step, **known, **more)
        for line in self._lines:
            line.put(event)

    def end(self) -> None:
        """Tell nothing more; what was told is still delivered."""
        if not self._is_closed:
            self._is_closed = True
            for line in self._lines:
                line.end()

    def close(self) -> None:
        """Do as `end`, and wait until all is delivered, but no longer than `FLUSH_S`."""
        self.end()
        if os.getpid() == self._process:
            _flush(self._lines)


class SaveEvents:
    """Tells of one save; given to its ledger, which calls it at each stage."""

    def __init__(self, observers: Observers, step: int) -> None:
        self._observers, self._step = observers, step
        self._ledger: Ledger | None = None

    def __call__(self, kind: str, ledger: "Ledger") -> None:
        """Tell how far the save is."""
        self._ledger = ledger
        self._tell(kind)

    def committed(self, metrics: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> None:
        """Tell that it is durable, with what each rank has measured."""
        ranks = tuple(MappingProxyType(dict(record)) for record in records)
        self._tell("committed", metrics=MappingProxyType(dict(metrics)), ranks=ranks)

    def failed(self, error: BaseException) -> None:
        """Tell why it failed."""
        self._tell("failed", text=f"{type(error).__name__}: {error}")

    def _tell(self, kind: str, **more: Any) -> None:
        measured: dict[str, Any] = {}
        if self._ledger is not None:
            record = self._ledger.record()
            kept = ("bytes", "stored_bytes", "seconds", "stall_s")
            measured = {name: record[name] for name in kept}
            measured["seconds"] = MappingProxyType(measured["seconds"])
        self._observers.tell(kind, self._step, **measured, **more)


def _name_of(call: object) -> str:
    return getattr(call, "__qualname__", type(call).__qualname__)


_lines: set[_Line] = set()  # whose threads have begun and not ended


def _flush(lines: Iterable[_Line]) -> None:
    until = time.monotonic() + FLUSH_S
    for line in lines:
        if not line.wait(max(0.0, until - time.monotonic())):
            logger.warning("an observer has not returned within %g s: not waiting for it", FLUSH_S)
            return


def _end_all() -> None:
    """Deliver what was told, before Python ends daemon threads."""
    every = list(_lines)
    for line in every:
        line.end()
    _flush(every)


os.register_at_fork(after_in_child=_lines.clear)
worker.before_python_ends(_end_all)
