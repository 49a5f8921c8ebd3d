"""A thread that uploads: it begins once, goes no faster than it may, and ends soon when asked."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .. import threads, worker
from .throttle import Throttle

LOOK_S = 0.05  # between two looks whether it is to end
STOP_S = 5.0  # for the end of what a stopped upload is at


Upload = Callable[[int], Mapping[str, float] | None]


@dataclass(frozen=True, slots=True)
class Told:
    """What an uploader tells of; each is called in its thread.

    Attributes:
        event: with a kind of `holdfast.Event`, a step, and further fields of it.
        committed: when a step is durable in the store: its path there, its number, its metrics.
        measure: calls what uploads a step, notes how long it takes, and returns what it does.
    """

    event: Callable[..., object]
    committed: Callable[[str, int, Mapping[str, float] | None], object]
    measure: "Callable[[Upload, int], Mapping[str, float] | None]"


class Stopped(Exception):
    """The upload is to end, or to make room for something else."""


class UploadThread(ABC):
    """See `Uploader` and `HostUploads`.

    Attributes:
        is_stopped: whether it is to end.
        is_dropped: whether it is, and who has it has said nothing of what is left.
    """

    def __init__(self, rate: float | None) -> None:
        """Prepare; ``rate`` is in bytes a second, None: as fast as it goes."""
        self._throttle = Throttle(rate)
        self.is_stopped = self.is_dropped = self._has_begun = False
        self._ended, self._process = worker.Latch(), os.getpid()

    def end(self) -> None:
        """Let the thread end soon; what it is at goes on with the next job."""
        self.is_stopped = True

    def close(self) -> None:
        """Do as `end`, and wait for it, but no longer than `STOP_S`."""
        self.end()
        if self._has_begun and os.getpid() == self._process:  # a forked child has no such thread
            self._ended.wait(STOP_S)

    @abstractmethod
    def say_left(self) -> None:
        """Log what is left to upload, at the end of a job that closed nothing."""

    @abstractmethod
    def _serve(self) -> None:
        """Upload until it is to end; in the thread."""

    @abstractmethod
    def _look_up(self) -> None:
        """Raise when what is under way is to end."""

    def _start(self) -> bool:
        """Start the thread, if it does not run; return False where none can be had."""
        if self._has_begun and (self.is_stopped or not self._ended.is_set()):
            return True
        self._has_begun, self._ended = True, worker.Latch()
        if worker.start(self._work, "holdfast-upload") is None:
            self._ended.set()
            return False
        running.add(self)
        return True

    def _work(self, may_begin: threads.MayBegin) -> None:
        if not threads.begin_behind(may_begin):
            return
        try:
            self._serve()
        finally:
            if self.is_dropped:
                self.say_left()
            running.discard(self)
            self._ended.set()

    def _pace(self, size: int) -> None:
        """Wait as long as so many bytes may take."""
        until = time.monotonic() + self._throttle.wait_s(size)
        while True:
            self._look_up()
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, LOOK_S))


running: set[UploadThread] = set()  # whose threads have begun and not ended


def _end_all() -> None:
    """Stop what uploads, before Python ends daemon threads."""
    every = list(running)
    lost = [one for one in every if not one.is_stopped]  # else who ended it has said what is left
    for one in every:
        one.end()
    for one in every:
        one.close()
    for one in lost:
        one.say_left()


os.register_at_fork(after_in_child=running.clear)
worker.before_python_ends(_end_all)
