"""Real signals at random moments of one call: in frames of holdfast, of torch, and of Python's own.

Half of them a timer sends, so that the kernel interrupts what the thread waits in; half another
thread of this process sends, as a debugger or a notebook does.
"""

import random
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from .points import KINDS, NUMBER, OWN, Place
from .states import train

AGAIN_S = 0.002


class Strike:
    """Interrupts one call after a random time; perhaps once more, while it ends for that.

    Attributes:
        hit: where.
        met_training: whether that was in a step of training within the call.
    """

    def __init__(self, rng: random.Random, longest_s: float, *, twice: bool = False) -> None:
        self.kind = rng.choice(KINDS)
        self.hit: Place | None = None
        self.met_training = False
        self._delay_s = rng.uniform(1e-6, longest_s)
        self._by_timer = rng.random() < 0.5
        self.is_twice = twice
        self._again_s = rng.uniform(1e-6, AGAIN_S) if twice else None
        self._live = False

    def call(self, function: Callable[[], Any]) -> Any:
        """Call it, in the main thread; raise what it raises, or what the handler raised."""
        number = signal.SIGALRM if self._by_timer else NUMBER
        alarm = signal.getsignal(signal.SIGALRM)
        before = signal.signal(number, self._handle)
        sender = threading.Thread(target=self._send, args=(threading.get_ident(),))
        self._live = True
        try:
            if self._by_timer:
                signal.setitimer(signal.ITIMER_REAL, self._delay_s)
            else:
                sender.start()
            return function()
        finally:
            self._live = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            if sender.ident is not None:
                sender.join()
            signal.signal(number, before)
            signal.signal(signal.SIGALRM, alarm)

    def _send(self, thread: int) -> None:
        end = time.perf_counter() + self._delay_s
        while time.perf_counter() < end:
            time.sleep(0)
        signal.pthread_kill(thread, NUMBER)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._live:
            return
        again_s, self._again_s = self._again_s, None  # first: the next may come within this one
        self._live = again_s is not None
        self.hit = Place.of(_ours(frame))
        self.met_training = _is_in(frame, train.__code__)
        if again_s is not None:
            signal.signal(signal.SIGALRM, self._handle)
            signal.setitimer(signal.ITIMER_REAL, again_s)
        raise self.kind(f"came at {Place.of(frame)}")


def _is_in(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _ours(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the package, where there is one: faults are counted by it."""
    found = frame
    while found is not None and not found.f_code.co_filename.startswith(OWN):
        found = found.f_back
    return found or frame
