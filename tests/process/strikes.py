"""Real signals at random moments of one call: in frames of holdfast, of torch, and of Python's own.

Half of them a timer sends, so that the kernel interrupts what the thread waits in; half another
thread of this process sends, as a debugger or a notebook does.
"""

import random
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from .points import KINDS, NUMBER, OWN, Place


class Strike:
    """Interrupts one call after a random time."""

    def __init__(self, rng: random.Random, longest_s: float) -> None:
        self.kind = rng.choice(KINDS)
        self.hit: Place | None = None
        self._delay_s = rng.uniform(1e-6, longest_s)
        self._by_timer = rng.random() < 0.5
        self._live = False

    def call(self, function: Callable[[], Any]) -> Any:
        """Call it, in the main thread; raise what it raises, or what the handler raised."""
        number = signal.SIGALRM if self._by_timer else NUMBER
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

    def _send(self, thread: int) -> None:
        end = time.perf_counter() + self._delay_s
        while time.perf_counter() < end:
            time.sleep(0)
        signal.pthread_kill(thread, NUMBER)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._live:
            return
        self._live = False
        self.hit = Place.of(_ours(frame))
        raise self.kind(f"came at {Place.of(frame)}")


def _ours(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the package, where there is one: faults are counted by it."""
    found = frame
    while found is not None and not found.f_code.co_filename.startswith(OWN):
        found = found.f_back
    return found or frame
