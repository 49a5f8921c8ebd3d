"""What a save in the background has of a future: its exception, callbacks, and `await`.

Knows how a save ends, not how it is made.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

logger = logging.getLogger("holdfast")

LOOK_S = 0.25  # how often who awaits a save that is late looks whether it has ended


class Future(ABC):
    """A save that ends once, as `concurrent.futures.Future` has it."""

    path: str
    deadline: float  # of the monotonic clock
    _callbacks: list[Callable[[Any], object]]

    @abstractmethod
    def done(self) -> bool:
        """Return whether the save has ended."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> str:
        """Wait for the end; return the path, or raise what the save failed with."""

    @abstractmethod
    def _end(self, timeout: float | None) -> BaseException | None:
        """Wait for the end; return what the save failed with, which counts as told."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended; return its error, or None if it is committed.

        Who calls this has been told of the error: no later save raises it.

        Args:
            timeout: seconds to wait; None: until the save ends, or its deadline is over.

        Raises:
            TimeoutError: it has not ended by then. It goes on.
            HoldfastError: it did not end by its deadline, or this is a forked child of the process
                that saves.
        """
        return self._end(timeout)

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """Call ``call(handle)`` when the save has ended, well or not; at once if it has.

        It is called in the thread of the save, after `result` has returned or raised elsewhere. So
        it may be late: do not count on it before Python ends. Its own errors are logged.

        Args:
            call: takes this handle.
        """
        self._callbacks.append(call)
        if self.done():
            self._call_back()

    def __await__(self) -> Generator[Any, None, str]:
        """Wait for the end in a coroutine: ``path = await handle``. Cancelling it ends no save."""
        return self._outcome().__await__()

    async def _outcome(self) -> str:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        self.add_done_callback(tell)
        left_s = self.deadline - time.monotonic()
        while not self.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), max(left_s, LOOK_S))
            with suppress(TimeoutError):
                return self.result(0)  # which says so when it is too late
            left_s = LOOK_S
        return self.result()

    def _call_back(self) -> None:
        """Call what is still to be called, each once, whichever thread comes first."""
        while self._callbacks:
            try:
                call = self._callbacks.pop(0)
            except IndexError:
                return
            try:
                call(self)
            except Exception:
                logger.exception("a callback of the save of %s failed", self.path)
