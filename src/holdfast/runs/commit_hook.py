"""``on_commit`` of a Checkpointer: called when a step is durable, and waited for a bounded time.

Knows paths and metrics; no state. Nothing that it does fails a save.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .. import threads, worker
from ..arguments import plain_number
from ..errors import OptionError, shown

if TYPE_CHECKING:
    from ..group.base import Group

logger = logging.getLogger("holdfast")

WAIT_S = 60.0  # then the save goes on without it
OnCommit = Callable[[str, int, dict[str, float]], object]


class _Here(threading.local):
    """What this thread is: a hook's, and whether the call that saves waits for it."""

    is_hooks = holds_caller = False


class CommitHook:
    """Calls what the user gave in a thread of its own: no thread can be stopped from outside."""

    def __init__(self, call: OnCommit | None) -> None:
        """Check it.

        Raises:
            OptionError: it cannot be called.
        """
        if call is not None and not callable(call):
            raise OptionError(
                f"on_commit is {shown(call)}; expected a function of path, step and metrics"
            )
        self._call = call
        self._running: tuple[int, worker.Latch] | None = None
        self._here = _Here()

    def tell(self, path: str, step: int, metrics: Mapping[str, float] | None) -> None:
        """Call it, and wait until it has returned, but no longer than `WAIT_S`."""
        call, before = self._call, self._running
        if call is None:
            return
        if before is not None and not before[1].is_set():
            logger.error("on_commit of step %d still runs: not called for step %d", before[0], step)
            return
        numbers = {name: plain_number(value) for name, value in (metrics or {}).items()}
        returned = worker.Latch()
        holds_caller = worker.here.job is not None  # else a thread in the background

        def run(may_begin: threads.MayBegin) -> None:
            self._here.is_hooks, self._here.holds_caller = True, holds_caller
            try:
                if may_begin():
                    call(path, step, numbers)
            except Exception:
                logger.exception("on_commit of step %d failed; the step is saved", step)
            finally:
                returned.set()

        self._running = step, returned
        if worker.start(run, "holdfast-on-commit", at_once=True) is None:
            self._running = None
            logger.error("on_commit of step %d is not called: no thread can be started", step)
            return
        until = time.monotonic() + WAIT_S
        while not returned.wait(min(worker.SLICE_S, until - time.monotonic())):
            worker.check()
            if time.monotonic() >= until:
                text = "on_commit of step %d has not returned within %g s; going on without it"
                logger.error(text, step, WAIT_S)
                return

    def check_call(self, root: str, ranks: "Group") -> None:
        """Check that a call of its own Checkpointer does not come from it, and wait for ever.

        Raises:
            OptionError: it comes from it, and would wait for the save that waits, or other ranks.
        """
        here = self._here
        if not here.is_hooks or (here.holds_caller and ranks.world_size == 1):
            return
        why = "which other ranks do not call" if here.holds_caller else "and its save waits for it"
        raise OptionError(
            f"the Checkpointer of {root} was called from its on_commit, {why}. Restore with "
            'holdfast.load(path, into=..., group="alone"), or with another Checkpointer'
        )
