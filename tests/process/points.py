"""Every point at which CPython may raise what a signal handler raises, in one call of holdfast.

The interpreter looks for signals at a few instructions: as a function begins, after a call of C,
on a jump back. A watch marks a signal as come at an event of the tracer, in the calling thread,
and the interpreter itself handles it where it looks next; so no point is invented, and none is
left out. One run marks it at every event and notes each place where it is handled: these are the
points, each known by the last event before it. Another run marks it from that event on, once.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import holdfast

OWN = str(Path(holdfast.__file__).parent) + os.sep
LOCKS = (OWN + "worker.py", threading.__file__)
WAITS = (*LOCKS, OWN + "engine/pool.py", contextlib.__file__)
# Locks and context managers: what holdfast holds is let go of in their frames.
TRACED = (OWN, threading.__file__, contextlib.__file__)
NUMBER = signal.SIGUSR2  # a Checkpointer watches for SIGTERM and SIGUSR1
AGAIN_MAX = 300  # events from the first interrupt to the second


class Stop(BaseException):
    """What a program may raise in a handler of its own."""


KINDS = (KeyboardInterrupt, Stop)


class _Signal(int):
    """Reading ``come`` marks the signal as come, with no instruction that looks for signals."""

    come = property(_thread.interrupt_main)


@dataclass(frozen=True)
class Place:
    """Where the interpreter handled a signal."""

    file: str
    line: int
    function: str

    @staticmethod
    def of(frame: FrameType | None) -> "Place":
        if frame is None:
            return Place("?", 0, "?")
        name = frame.f_code.co_filename
        short = name[len(OWN) :] if name.startswith(OWN) else name.rpartition("/lib/")[2]
        return Place(short, frame.f_lineno, frame.f_code.co_name)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


class Watch:
    """Marks a signal as come at events of the calling thread, while it calls one function."""

    def __init__(
        self,
        at: int | None = None,
        kind: type[BaseException] = KeyboardInterrupt,
        *,
        again: int | None = None,
        within: tuple[str, ...] = TRACED,
    ):
        """Prepare to interrupt one call.

        Args:
            at: the first event; None: all of them, and nothing is raised.
            again: raise once more, so many events after the first.
            within: events count in files whose names begin so, and in what these call.
        """
        self.kind = kind
        self.at, self._again, self.is_twice = at, again, again is not None
        self._within = within
        self.events = 0
        self.points: list[tuple[int, Place]] = []
        self.hit: Place | None = None
        self._live = False
        self._code: set[CodeType] = set()

    def call(self, function: Callable[[], Any]) -> Any:
        """Call it, in the main thread; raise what it raises, or what the handler raised."""
        before = signal.signal(NUMBER, self._handle)
        trace = self._tracer()
        self._live = True
        sys.settrace(trace)
        try:
            return function()
        finally:
            self._live = False
            sys.settrace(None)
            signal.signal(NUMBER, before)

    def _tracer(self) -> Callable[..., Any]:
        number, at, watch = _Signal(NUMBER), self.at, self

        def event(frame: FrameType, what: str, argument: Any) -> Callable[..., Any]:
            watch.events += 1
            if at is None or watch.events >= at:
                number.come  # noqa: B018
            return event

        def call(frame: FrameType, what: str, argument: Any) -> Callable[..., Any] | None:
            code = frame.f_code
            if code in watch._code:
                return None
            frame.f_trace_lines = False
            if code.co_filename.startswith(watch._within):
                frame.f_trace_opcodes = True
            elif not watch._counts(frame.f_back):
                return None  # what is called by strangers is not ours to count
            watch.events += 1
            if at is None or watch.events >= at:
                number.come  # noqa: B018
            return event

        self._code = {event.__code__, call.__code__, Watch._handle.__code__, Place.of.__code__}
        self._code |= {Watch._note.__code__, Watch.call.__code__, Place.__init__.__code__}
        return call

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The tracer's own frames look for signals too: what is seen there is no point.
        if not self._live or frame is None or frame.f_code in self._code:
            return
        self._note(frame)

    def _note(self, frame: FrameType) -> None:
        if self.at is None:
            self.points.append((self.events, Place.of(frame)))
            return
        self.hit = Place.of(frame)
        if self._again is None:
            self._live = False
            sys.settrace(None)
        else:
            self.at, self._again = self.events + self._again, None
        raise self.kind(f"injected at {self.hit}")

    def _counts(self, frame: FrameType | None) -> bool:
        return frame is not None and frame.f_code.co_filename.startswith(self._within)


def points_of(function: Callable[[], Any]) -> list[tuple[int, Place]]:
    """Call it once; return its points: the last event before each, and the place."""
    watch = Watch()
    watch.call(function)
    return watch.points
