"""A save in the background, seen from the thread that asked for it: one for each process."""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .engine.pipeline import Ledger, Progress
from .errors import BusyError, CancelledError, HoldfastError, PeerError, StoreError

logger = logging.getLogger("holdfast")

# Every rank knows the outcome so long after the deadline: the coordinator's word has arrived.
OUTCOME_GRACE_S = 4.0
NICENESS = 5  # of the thread that writes: training comes first where cores are short

Made = TypeVar("Made")


class SaveHandle:
    """A save in flight, as `holdfast.save_async` returns it. Thread-safe.

    A failure is logged at once, raised by `result`, and by the next `save_async` when nobody asked.

    Attributes:
        path: the checkpoint's directory.
        step: as given.
        skipped: whether nothing is saved, because another save was in flight (``busy="skip"``).
    """

    def __init__(self, path: str, step: int | None, ledger: Ledger, deadline_s: float) -> None:
        self.path = path
        self.step = step
        self.skipped = False
        self.ledger = ledger
        self.deadline = time.monotonic() + deadline_s
        ledger.end_at(self.deadline)
        self._staged, self._done = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._told = False
        self._before_step: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<SaveHandle of {self.path}: {self.ledger.state}>"

    def wait_staged(self) -> None:
        """Wait until the sources may change: nothing done to them later reaches the checkpoint.

        Raises:
            HoldfastError: staging failed.
        """
        self._wait(self._staged)
        self._let_change()
        if self.ledger.staged_bytes < self.ledger.total_bytes and self._failure is not None:
            self._raise()

    def result(self) -> str:
        """Wait until the checkpoint is committed and durable on every rank; return its path.

        Raises:
            HoldfastError: it failed, here or on another rank, or did not end by its deadline.
            BusyError: it was skipped.
            CancelledError: it was cancelled.
        """
        self.wait_done()
        self._raise()
        return self.path

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._done.is_set()

    def progress(self) -> Progress:
        """Return how far it is, on this rank."""
        return self.ledger.progress()

    def cancel(self) -> bool:
        """Give the save up, on all ranks; return False when it is too late for that.

        Every rank's `result` then raises: here a CancelledError, on the others a PeerError.
        """
        return not self._done.is_set() and self.ledger.cancel()

    # What follows is for the corridor.

    @property
    def failure(self) -> BaseException | None:
        """Why it failed, once it has ended."""
        return self._failure

    def skip(self, busy_ranks: list[int], busy: str) -> "SaveHandle":
        """End before the beginning, as ``busy`` says."""
        ranks = ", ".join(map(str, busy_ranks[:8])) + " …" * (len(busy_ranks) > 8)
        text = f"{self.path} was not saved: the save before is still in flight on rank {ranks}"
        if busy == "fail":
            raise BusyError(f'{text}, and busy="fail"')
        logger.info("%s", text)
        self.skipped, self._told, self._failure = True, True, BusyError(text)
        self.ledger.state = "skipped"
        self._staged.set()
        self._done.set()
        return self

    def start(
        self, work: Callable[[], Made], after: Callable[[Made], None] = lambda _: None
    ) -> None:
        """Run the rest of the save in a thread; the end of Python waits for it till the deadline.

        Where no thread can be had it is run here: the other ranks wait for it.

        Args:
            after: called there with what ``work`` has made, when the checkpoint is committed. It is
                a part of the save for those who wait, but has no deadline.
        """

        def run() -> None:
            nice()
            self._run(work, after)

        thread = threading.Thread(target=run, name="holdfast-save", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:
            logger.warning("%s is saved before training goes on: %s", self.path, error)
            self._run(work, after)

    def hold_with(self, before_step: Callable[[], None]) -> None:
        """Call this before what is staged changes, by a step or after `wait_staged`."""
        self._before_step = before_step

    def staged(self) -> None:
        """Tell that the sources may change."""
        if self.ledger.state == "staging":
            self.ledger.state = "writing"
        self._staged.set()

    def forget_failure(self) -> None:
        """Take it that the caller knows of the failure to come."""
        self._told = True

    def wait_done(self) -> None:
        """Wait until it has ended, well or not."""
        self._wait(self._done)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()  # it has nothing left to do

    def hold_step(self) -> None:
        """Wait until a step may change what this save has to stage."""
        started = time.perf_counter()
        if self._before_step is None:
            self._staged.wait()
        self._let_change()
        self.ledger.stall_s += time.perf_counter() - started

    def untold(self) -> BaseException | None:
        """Return its failure when nobody has been told, and take it that the caller tells."""
        if self._told or self._failure is None:
            return None
        self._told = True
        return self._failure

    def _let_change(self) -> None:
        before_step = self._before_step
        if before_step is not None:
            before_step()

    def _wait(self, event: threading.Event) -> None:
        seconds = max(0.0, self.deadline + OUTCOME_GRACE_S - time.monotonic())
        if os.getpid() != self._process:
            raise HoldfastError(f"the save of {self.path} belongs to the process it was asked in")
        if event.wait(min(seconds, threading.TIMEOUT_MAX)):
            return
        if self.ledger.state == "committed":
            event.wait()
            return
        self._told = True
        text = f"the save of {self.path} did not end by its deadline"
        if self.ledger.state == "committing":
            cause = "the ranks' store does not answer"
            raise PeerError(f"{text}: {cause}", rank=-1, cause=cause)
        raise StoreError(f"{text}: the disk does not answer, or is much too slow")

    def _raise(self) -> None:
        self._told = True
        if self._failure is not None:
            raise self._failure

    def _run(self, work: Callable[[], Made], after: Callable[[Made], None]) -> None:
        try:
            made = work()
            self.ledger.state = "committed"
            after(made)
        except BaseException as error:
            self._failure = error
            self.ledger.state = "failed"
            if isinstance(error, CancelledError):
                self._told = True  # to whom cancelled it
                logger.info("the save of %s was cancelled", self.path)
            else:
                logger.error("saving %s failed: %s: %s", self.path, type(error).__name__, error)
        finally:
            self._before_step = None
            self._staged.set()
            self._done.set()


def nice() -> None:
    """Let this thread stand back behind the threads that train."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except OSError:  # it is niced already, or may not be: a matter of speed alone
        logger.debug("the saving thread keeps its priority")


_last: SaveHandle | None = None


def in_flight() -> SaveHandle | None:
    """Return the save of this process that has not ended."""
    busy = _last is not None and _last._process == os.getpid() and not _last.done()
    return _last if busy else None


def take_flight(handle: SaveHandle) -> None:
    """Make this the process's save in flight; the one before has ended."""
    global _last
    _last = handle


def raise_untold() -> None:
    """Raise the failure of the save before, when nobody has been told of it yet.

    Raises:
        HoldfastError: of the kind it failed with.
    """
    failure = _last.untold() if _last is not None else None
    if failure is not None and _last is not None:
        failure.add_note(f"The save of {_last.path} failed in the background, and is told of late.")
        raise failure


def hold_step() -> None:
    """Wait, before an optimizer's step, until what it changes is staged."""
    handle = in_flight()
    if handle is not None:
        handle.hold_step()


def _await_end() -> None:
    """Wait for the save in flight before Python ends: no longer than for any other reason.

    Python itself would wait for ever for a thread that a dead disk or a frozen rank holds.
    """
    handle = in_flight()
    try:
        if handle is not None:
            handle.wait_done()
    except HoldfastError as error:
        logger.error("%s", error)


# Not atexit: processes that multiprocessing starts end without.
threading._register_atexit(_await_end)  # type: ignore[attr-defined]
