"""A save in the background, seen from the thread that asked for it: one for each process."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

from .. import worker
from ..engine.ledger import Ledger, Progress
from ..errors import BusyError, CancelledError, HoldfastError, PeerError, StoreError
from ..threads import MayBegin, begin_behind
from .future import Future

if TYPE_CHECKING:
    from ..engine.staging import LazyCopies

logger = logging.getLogger("holdfast")

# Every rank knows the outcome so long after the deadline: the coordinator's word has arrived.
OUTCOME_GRACE_S = 4.0

Made = TypeVar("Made")


class SaveHandle(Future):
    """A save in flight, returned by `holdfast.save_async`. Thread-safe.

    A failure is logged at once. `result` raises it; if no call has raised it, the next
    `save_async` does. In a coroutine, ``await handle`` gives what `result` does.

    Attributes:
        path: the checkpoint's directory.
        step: the step that was given, or None.
        skipped: True if nothing is saved because another save was in flight (``busy="skip"``).

    Example::

        handle = holdfast.save_async(state, "runs/a/step-00000007")
        handle.wait_staged()  # from here on the state may change
        train()
        if not handle.done():
            print(handle.progress().written_bytes)
        handle.add_done_callback(lambda handle: print(handle.path, handle.exception()))
        print(handle.result(timeout=60))
        assert not handle.cancel()  # too late: it is committed
    """

    def __init__(self, path: str, step: int | None, ledger: Ledger, deadline_s: float) -> None:
        self.path, self.step = path, step
        self.skipped = False
        self.is_given = False  # to anybody: who got an exception in its place has been told
        self.ledger = ledger
        self.deadline = time.monotonic() + deadline_s
        ledger.end_at(self.deadline)
        self._staged, self._done = worker.Latch(), worker.Latch()
        self._failure: BaseException | None = None
        self._told = self._has_ended = False
        self._copies: LazyCopies | None = None
        self._thread: threading.Thread | None = None
        self._after_end: dict[Callable[[], object], None] = {}  # who takes a call out makes it
        self._callbacks = []
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<SaveHandle of {self.path}: {self.ledger.state}>"

    def wait_staged(self) -> None:
        """Wait until the state is copied: later changes do not reach the checkpoint.

        Raises:
            HoldfastError: the copy failed.
        """
        copies = self._copies
        if copies is not None:
            copies.hurry()
        self._wait(self._staged)
        self._let_change()
        if self.ledger.staged_bytes < self.ledger.total_bytes and self._failure is not None:
            self._raise()

    def result(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed and durable on every rank; return its path.

        Args:
            timeout: seconds to wait; None: until the save ends, or its deadline is over.

        Raises:
            TimeoutError: it has not ended by then. It goes on.
            HoldfastError: the save failed on any rank, or did not end by its deadline.
            BusyError: the save was skipped.
            CancelledError: the save was cancelled.
        """
        self.wait_done(timeout)
        self._raise()
        return self.path

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not.

        Raises:
            HoldfastError: this is a forked child of the process that saves.
        """
        self._check_process()
        return self._done.is_set()

    def progress(self) -> Progress:
        """Return how far the save is, on this rank.

        Raises:
            HoldfastError: this is a forked child of the process that saves.
        """
        self._check_process()
        return self.ledger.progress()

    def cancel(self) -> bool:
        """Cancel the save on all ranks; return False if it is too late.

        `result` then raises a CancelledError here, and a PeerError on the other ranks.

        Raises:
            HoldfastError: this is a forked child of the process that saves.
        """
        self._check_process()
        return not self._done.is_set() and self.ledger.cancel()

    # What follows is for other modules of holdfast.

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the save, or None."""
        return self._failure

    def skip(self, busy_ranks: list[int], busy: str) -> "SaveHandle":
        """End before the beginning, as ``busy`` says."""
        ranks = ", ".join(map(str, busy_ranks[:8])) + " …" * (len(busy_ranks) > 8)
        text = f"{self.path} was not saved: the previous save is still in flight on rank {ranks}"
        if busy == "fail":
            raise BusyError(f'{text}, and busy="fail" was given; save less often, or busy="wait"')
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

        def run(may_begin: MayBegin) -> None:
            if begin_behind(may_begin):
                self._run(work, after)

        if (thread := worker.start(run, "holdfast-save")) is not None:
            self._thread = thread
            return
        logger.warning("saving %s in this thread, as no other can be started", self.path)
        self._run(work, after)

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call this when it has ended, well or not, before anyone is told; at once if it has."""
        self._after_end[call] = None
        if self._has_ended and self._after_end.pop(call, call) is None:
            call()

    def hold_with(self, copies: "LazyCopies") -> None:
        """Let these end before what they copy changes, by a step or after `wait_staged`."""
        self._copies = copies

    def staged(self) -> None:
        """Tell that the sources may change."""
        if self.ledger.state == "staging":
            self.ledger.state = "writing"
            if self.ledger.tell is not None:
                self.ledger.tell("staged", self.ledger)
        self._staged.set()

    def wait_done(self, timeout: float | None = None) -> None:
        """Wait until it has ended, well or not."""
        self._wait(self._done, timeout)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()  # it has nothing left to do

    def hold_step(self) -> None:
        """Wait until a step may change what this save has to stage."""
        started = time.perf_counter()
        if self._copies is None:
            self._staged.wait()
        self._let_change()
        self.ledger.stall_s += time.perf_counter() - started

    def untold(self) -> BaseException | None:
        """Return its failure when nobody has been told, and take it that the caller tells."""
        if self._told or not self.is_given or self._failure is None:
            return None
        self._told = True
        return self._failure

    def _end(self, timeout: float | None) -> BaseException | None:
        self.wait_done(timeout)
        self._told = True
        return self._failure

    def _let_change(self) -> None:
        copies = self._copies
        if copies is not None:
            copies.before_step()

    def _wait(self, event: worker.Latch, timeout: float | None = None) -> None:
        self._check_process()
        until = self.deadline + OUTCOME_GRACE_S
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        while not event.is_set():
            now = time.monotonic()
            left_s = until - now
            if left_s <= 0 and self.ledger.state != "committed":
                break
            if now >= give_up:
                raise TimeoutError(f"the save of {self.path} has not ended within {timeout:g} s")
            left_s = left_s if left_s > 0 else worker.SLICE_S
            event.wait(min(left_s, worker.SLICE_S, give_up - now))
            worker.check()
        else:
            return
        self._told = True
        text = f"the save of {self.path} did not end by its deadline"
        if self.ledger.state == "committing":
            cause = "rank 0 or the store does not answer"
            raise PeerError(f"{text}: {cause}; check both, and the network", rank=-1, cause=cause)
        raise StoreError(
            f"{text}: the disk does not answer or is too slow; check it, or raise deadline_s"
        )

    def _check_process(self) -> None:
        """Check that this is no forked child: the save goes on in the parent alone."""
        if os.getpid() != self._process:
            raise HoldfastError(
                f"the save of {self.path} runs in process {self._process}, and this is its forked "
                f"child {os.getpid()}; use the handle in the process that made it"
            )

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
            self._copies = None
            self._has_ended = True
            for call in list(self._after_end):
                if self._after_end.pop(call, call) is None:  # else `when_ended` has taken it back
                    call()
            self._staged.set()
            self._done.set()
            if self._callbacks:
                self._thread = None  # a callback may wait for those who wait for the save
                self._call_back()


_last: SaveHandle | None = None
_owner: tuple[int, int] | None = None  # who prepares a save: a place of `worker`
_turn = threading.Condition()  # guards both; of workers alone, so that nothing interrupts it


def in_flight() -> SaveHandle | None:
    """Return the save of this process that has not ended."""
    return _last if _last is not None and not _last.done() else None


@contextmanager
def reserve(busy: str, deadline_s: float) -> Iterator[bool]:
    """Reserve the process's one save in flight; False: another one has it, and is not waited for.

    `take_flight` makes it a handle's. Without that it is free again when the block ends.

    Args:
        busy: "wait" for the save in flight, and for another thread that prepares one.

    Raises:
        HoldfastError: this very thread prepares one, and is within that call; or the save before
            failed, and nobody has been told of it yet.
    """
    global _owner
    place, until = worker.place(), time.monotonic() + deadline_s
    while not (is_mine := _claim(place)) and busy == "wait":
        worker.check()
        before = in_flight()
        if before is not None:
            before.wait_done()
            continue
        with _turn:
            _turn.wait(worker.SLICE_S)
        if time.monotonic() > until:
            raise StoreError(
                f"no save began within {deadline_s:g} s (deadline_s): another thread of this "
                "process is still preparing one. Raise deadline_s, or save in one thread"
            )
    try:
        _raise_untold()
        yield is_mine
    finally:
        if is_mine:
            with _turn:
                _owner = None
                _turn.notify_all()


def _claim(place: tuple[int, int]) -> bool:
    """Reserve, where nobody has."""
    global _owner
    with _turn:
        if _owner is not None and _owner[0] == place[0] and _owner[1] < place[1]:
            raise HoldfastError(
                "this save interrupts another one that this thread is preparing (from a signal "
                "handler, or a hook of the state). Let that one end first, or set a flag and save "
                "in the training loop"
            )
        if _owner is not None or in_flight() is not None:
            return False
        _owner = place
        return True


def take_flight(handle: SaveHandle) -> None:
    """Make this the process's save in flight: who has reserved it calls this, once."""
    global _last
    _last = handle


def _raise_untold() -> None:
    """Raise the failure of the save before, when nobody has been told of it yet."""
    failure = _last.untold() if _last is not None else None
    if failure is not None and _last is not None:
        failure.add_note(f"This is the error of the save of {_last.path}, in the background.")
        if isinstance(failure, StopIteration):  # no generator can raise it, and `reserve` is one
            raise HoldfastError(f"the save of {_last.path} failed: {failure!r}") from failure
        raise failure


def raise_now(failure: BaseException) -> NoReturn:
    """Stand for writing where this rank cannot do its part: the others are told."""
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


def _forget() -> None:
    """In a forked child, which has no save in flight, nor anyone who would unlock anything."""
    global _last, _owner, _turn
    _last, _owner, _turn = None, None, threading.Condition()


os.register_at_fork(after_in_child=_forget)
worker.before_python_ends(_await_end)
