"""How a Checkpointer ends: it waits, saves in an emergency, and lets go of what runs beside."""

import contextlib
import logging
import os
import time
import weakref
from abc import ABC
from typing import TYPE_CHECKING, Any

from .. import worker
from ..errors import PeerError, writable
from ..group.phase import Poll
from .emergency import Beside, LastState, meet, release
from .rewind import Rewind
from .schedule import Schedule
from .signals import SignalWatch
from .upload_thread import UploadThread

if TYPE_CHECKING:
    from .tiers import TieredRun

logger = logging.getLogger("holdfast")


def drop(watch: SignalWatch, last: LastState | None, *ended: Beside) -> None:
    """Do as `release` for a Checkpointer that was never closed.

    The garbage collector may call it anywhere, so it takes no lock.
    """
    for one in ended:
        if isinstance(one, UploadThread):
            one.is_dropped = True
    release(watch, last, *ended)


class Leaving(Rewind, ABC):
    """See `holdfast.Checkpointer`."""

    _schedule: Schedule
    _signals: SignalWatch
    _poll: Poll | None
    _beside: tuple[Beside, ...]
    _deadline_s: float
    _drain_s: float
    _meeting: int
    _closed: bool
    _process: int
    _release: "weakref.finalize[..., Any]"

    def _leave(self, error: BaseException) -> None:
        """Wait, and save in an emergency, while an exception is under way."""
        reason = writable(f"{type(error).__name__}: {error}")
        logger.info("training ends with %s", reason)  # it is raised when the waiting is over
        try:
            self._saver.wait()
        except Exception as failure:  # whatever it is: the user's own comes first
            logger.error("the save in flight failed: %s", failure)
        self._save_in_emergency(error, reason)
        try:
            tiers = self._uploading
            if tiers is not None and isinstance(error, KeyboardInterrupt):
                tiers.say_left()
            elif tiers is not None:
                tiers.drain_alone(self._left_to_drain_s())
        except Exception as failure:
            logger.error("%s", failure)

    def _save_in_emergency(self, error: BaseException, reason: str) -> None:
        if self._last is None or isinstance(error, GeneratorExit) or self._is_forked:
            return
        if self._last.step is not None and self._last.step == self._saver.saved_step:
            return
        try:
            step, state = meet(self._ranks, self._meeting, self._last)
            deadline = time.monotonic() + self._deadline_s
            ranks = self._ranks.background(f"emergency/{self._meeting}/save", deadline)
            self._saver.save_with(ranks, step, state, self._saver.completed(None))
            logger.warning("saved step %d in an emergency, after %s", step, reason)
        except Exception as failure:
            logger.error("no emergency save: %s: %s", type(failure).__name__, failure)

    def _finish(self) -> None:
        if self._poll is not None:
            with contextlib.suppress(PeerError):  # training's own collectives say it better
                self._poll.close()
        self._saver.wait()
        if self._uploading is not None:
            self._uploading.drain(self._left_to_drain_s())

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    @property
    def _uploading(self) -> "TieredRun | None":
        """What uploads; None in a forked child, which has no such thread, and not its locks."""
        return None if self._is_forked else self._tiers

    def _left_to_drain_s(self) -> float:
        return max(0.0, min(self._drain_s, self._schedule.left_s))

    def _end(self) -> None:
        self._closed = True
        self._poll = None
        self._saver.end()
        self._release.detach()
        try:
            release(self._signals, self._last, *self._beside)
        finally:
            # If an interrupt came before the end of it.
            release(self._signals, self._last, *self._beside)

    def _deliver(self) -> None:
        """Let observers see what they were told, and the rest end, for a bounded time."""
        for one in reversed(self._beside):  # an upload may still tell of its end
            worker.run(one.close)
