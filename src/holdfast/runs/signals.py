"""Signals that ask training to end: noted when they come, passed on when nobody serves them.

A handler only makes a note, so a signal can come at any moment of a save. Knows no saves, no ranks.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from ..errors import OptionError, shown

logger = logging.getLogger("holdfast")

# A launcher and a scheduler may both send the one signal that they mean.
DOUBLE_S = 2.0
_UNCATCHABLE = {signal.SIGKILL, signal.SIGSTOP}


class SignalWatch:
    """Watches for signals from the first `watch` to `close`."""

    def __init__(self, signals: Iterable[int]) -> None:
        """Prepare; nothing is watched yet.

        Raises:
            OptionError: the values are no signals, or no process can catch them.
        """
        try:
            self._wanted = tuple(signal.Signals(number) for number in signals)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"signals is {shown(signals)}; expected signals, such as (signal.SIGTERM,), or ()"
            ) from error
        if uncatchable := _UNCATCHABLE.intersection(self._wanted):
            name = min(uncatchable).name
            raise OptionError(f"signals has {name}, which no process can catch; leave it out")
        self._before: dict[int, Any] = {}
        self._came: dict[int, float] = {}
        self._process = 0
        self._serving = self._served = self._closed = False
        self._watches = self._has_warned = False

    @property
    def wanted(self) -> bool:
        """Whether there is any signal to watch for."""
        return bool(self._wanted)

    @property
    def asked(self) -> bool:
        """Whether a signal has come that is not served yet."""
        return bool(self._came) and not self._served

    def watch(self) -> None:
        """Install the handlers, once, if this is the main thread; else warn, once."""
        if self._watches or not self._wanted:
            return
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s will not save: step() was called outside the main thread. Call it in the "
                    "main thread, or give signals=()",
                    " and ".join(number.name for number in self._wanted),
                )
            return
        for number in self._wanted:
            before = signal.getsignal(number)
            if before is None:
                logger.info("%s is not watched: code outside of Python handles it", number.name)
            elif before != self._note:
                self._before[number] = before  # first: an interrupt may come between the two
                signal.signal(number, self._note)
        self._watches = True

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Do what the signals ask for; whatever comes meanwhile asks for the same."""
        self._serving = True
        try:
            yield
        finally:
            self._serving, self._served = False, True

    def pass_on_served(self) -> None:
        """Give signals that were served to whoever had them before: the script has not ended."""
        if self._served:
            self._served = False
            for number in list(self._came):
                self._pass_on(number)

    def close(self) -> None:
        """Put the handlers of before back; pass on what nobody has served.

        An interrupt may come anywhere in it: call it again then.
        """
        if self._closed:
            return
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, before)
        self._closed = True
        for number in list(self._came) if self.asked else ():
            logger.warning("%s came too late for a last save", signal.Signals(number).name)
            signal.raise_signal(number)

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        is_again = now - self._came.setdefault(number, now) > DOUBLE_S
        # A child that was forked (a data loader's) has the handler too, and nobody there looks.
        is_here = os.getpid() == self._process and not self._closed
        if not is_here or (is_again and not self._serving):
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        del self._came[number]
        signal.signal(number, self._before[number])
        signal.raise_signal(number)
