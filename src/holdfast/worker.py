"""Worker threads: the body of a verb runs in one, where Python handles no signal.

CPython runs signal handlers in the main thread, between any two instructions. An exception that a
handler raises (Ctrl-C, an alarm) could leave a lock locked, a descriptor open, or other ranks
without an answer. So the calling thread only waits, and calls what belongs to the user: the hooks
of a state, through `call_in_caller`.

Invariants:
  1. An exception in the waiting thread reaches the body as an Interrupted, at its next `check`.
     The caller goes on with its exception when the body has ended. A body that a dead disk or a
     lost rank holds is waited for no longer than `STOP_S`, or until a second exception; it ends by
     itself, and fills no target any more. What it makes is dropped; a `check` after what it reads
     says whether that was of the call.
  2. What the two threads share is safe at every point where a handler may raise. No Condition, no
     Event: their own frames may be interrupted, and keep their lock.
  3. A worker has none of the caller's modes of torch, but its CUDA streams.
  4. A worker begins on its caller's CPU, and the caller goes on there: the caches hold its data,
     and another CPU would have to wake. Then each runs where it may, before any other code does.
  5. A thread that a body starts lets the caller go on first: it might keep the GIL for a while.
  6. When Python ends, it waits for what is in the background, until its deadline. What another
     daemon thread is at is cancelled. After that a verb runs in the thread that calls it.
Knows threads; no state, no files, no ranks.
"""

import _thread
import concurrent.futures.thread  # noqa: F401  what is registered first is called last, below
import contextlib
import contextvars
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from . import threads
from ._core import Waiter, run_on, wait_for, wake_here
from .errors import CancelledError, HoldfastError, without_frames
from .streams import held_streams

SLICE_S = 0.1  # a wait looks up so often: an interrupt may have taken the word of another's end
STOP_S = 10.0  # for the end of a body whose caller was interrupted
LAST_WORD_S = 10.0  # for what a daemon thread is at when Python ends
HELD_UP = (
    "The interrupted call of holdfast has not ended yet: a disk or another rank does not answer, "
    "or a second interrupt came. A save is committed whole or not at all. The target of a load may "
    "be partly filled: load again before you use it"
)
_DAEMON_ADVICE = "Save and load before the main thread ends, or in a thread that is no daemon"

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Interrupted(BaseException):
    """The caller of this body goes on with an exception of its own; never seen outside of a body.

    No HoldfastError: who goes on behind one of those ends with this.
    """


class Latch:
    """Something that happens once, and that any thread may wait for."""

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let everyone go on."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # it was set before
            self._lock.release()

    def is_set(self) -> bool:
        """Return whether it has happened."""
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has happened; return False when it has not in that time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set:
            left_s = SLICE_S if until is None else min(SLICE_S, until - time.monotonic())
            if left_s <= 0:
                break
            if self._lock.acquire(timeout=left_s):
                with contextlib.suppress(RuntimeError):
                    self._lock.release()
        return self._is_set


class _Call(Generic[Result]):
    """A function that the caller's thread is asked to call."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self.function, self.answered = function, Latch()
        self.result: Result
        self.failure: BaseException | None = None

    def make(self) -> None:
        """Call it, here."""
        try:
            self.result = self.function()
        except BaseException as error:
            self.failure = error
        self.answered.set()


class _Job:
    """One call of a verb: its body, in a worker, and the thread that waits for it."""

    def __init__(self, body: Callable[[], Any], dropped: Callable[[Any], object]) -> None:
        self.place = (threading.get_ident(), len(here.serving))
        self.is_daemon = threading.current_thread().daemon
        self.interrupt: BaseException | None = None
        self._is_left = False  # nobody serves any more
        self.result: Any = None
        self.failure: BaseException | None = None
        self._body, self._dropped, self._process = body, dropped, os.getpid()
        self._context = contextvars.copy_context()
        torch = sys.modules.get("torch")
        on_cuda = torch is not None and torch.cuda.is_initialized()
        self._streams = held_streams(torch.cuda) if torch and on_cuda else contextlib.nullcontext
        self._calls: deque[_Call[Any] | None] = deque()
        self._called = Waiter()  # the caller waits for it
        self._asked: _Call[Any] | None = None
        self._begun, self.ended = Latch(), Latch()
        self.resumed = threading.Lock()  # free when the caller goes on: for threads of the body
        self.resumed.acquire()
        self.cpus = b""  # where the caller may run
        self._turn: dict[str, int] = {}  # whose the body is; who lost that word asks again

    def begin(self) -> bool:
        """Have a worker begin; return False when none can be had.

        Raises:
            HoldfastError: Python is ending, and would end this daemon thread anywhere in the call.
        """
        _jobs.add(self)  # first: from here on the end of Python waits for it
        if not _ending.is_set():
            self.cpus = wake_here(_idle)  # no other thread runs between the look and the call
            _inbox.put(self)
            has_begun = _idle or (_start_worker() and self._begun.wait(threads.BEGIN_S))
            if has_begun or not self._take():
                return True
        self._end()
        if self.is_daemon and _ending.is_set():
            raise HoldfastError(
                "this call cannot start in a daemon thread while Python exits, which would kill "
                f"the thread midway. {_DAEMON_ADVICE}"
            )
        return False

    def serve(self) -> Any:
        """Call what the body asks for, until it ends; return its result or raise its failure."""
        while wait_for(self._called) and (call := self._calls.popleft()) is not None:
            call.make()
            if os.getpid() != self._process:
                raise HoldfastError(
                    "a hook of the state forked this process during a call of holdfast, which "
                    "continues in the parent alone; call exec or os._exit in the child"
                )
        if isinstance(self.failure, Interrupted):  # by the end of Python
            raise CancelledError(
                f"this call was stopped: Python exits and kills daemon threads. {_DAEMON_ADVICE}"
            )
        if self.failure is not None:
            raise self.failure
        return self.result

    def stop(self, error: BaseException) -> None:
        """Let the body end, after an exception in the caller's thread; wait until it has."""
        if error is self.failure or os.getpid() != self._process:
            return
        self.leave(error)
        if not self.ended.wait(STOP_S):
            error.add_note(HELD_UP)
        if self.failure is not error:  # which a hook was to answer, and has the notes
            for note in getattr(self.failure, "__notes__", ()):
                error.add_note(note)

    def leave(self, error: BaseException) -> None:
        """Let the body end by itself: nobody answers it any more."""
        self.interrupt, self._is_left = error, True
        if self._take():
            self._end()
        if (asked := self._asked) is not None:
            asked.failure = error
            asked.answered.set()
        self._drop()

    def ask(self, function: Callable[[], Result]) -> Result:
        """Have the caller's thread call a function; in the worker."""
        self._asked = call = _Call(function)
        self._calls.append(call)
        self._called.wake()
        if not self._is_left:  # else whoever stopped it has not seen this call
            call.answered.wait()
        self.check()
        self._asked = None
        if call.failure is not None:
            raise call.failure
        return call.result

    def check(self) -> None:
        """Raise an Interrupted when the caller was interrupted."""
        if self.interrupt is not None:
            raise Interrupted(f"{type(self.interrupt).__name__} came where the call was made")

    def run(self) -> None:
        """Run the body, in the worker."""
        if not self._take():
            return
        self._begun.set()
        here.job, here.place = self, self.place
        try:
            with self._streams():
                self.result = self._context.run(threads.observed, self._body)
            self._drop()
        except BaseException as error:
            # What its frames hold is freed here, while Python still waits: torch frees without the
            # GIL, and a thread that Python has ended would abort as it takes that again.
            self.failure = without_frames(error) if self.interrupt is not None else error
        here.job = here.place = None
        self._end()

    def _take(self) -> bool:
        """Return whether the first thread to ask is this one; it runs the body, or drops it."""
        thread = threading.get_ident()
        return self._turn.setdefault("thread", thread) == thread

    def _drop(self) -> None:
        """Drop what nobody gets: called when it is there, and when the caller has left."""
        if self._is_left and self.result is not None:
            self._dropped(self.result)

    def _end(self) -> None:
        _jobs.discard(self)
        self.ended.set()
        self._calls.append(None)
        self._called.wake()


class _Here(threading.local):
    """What this thread is at."""

    job: _Job | None = None  # whose body it runs
    place: tuple[int, int] | None = None  # of that job
    serving: tuple[_Job, ...] = ()  # those that it waits for, the innermost last


here = _Here()
_jobs: set[_Job] = set()  # whose body has not ended
_inbox: SimpleQueue[_Job] = SimpleQueue()
_idle = 0  # the native id of the worker that waits for a job; 0: none does
_one = threading.Lock()  # that one worker waits, not two
_ending = Latch()  # Python is about to end
threads_ended = Latch()  # Python is ending, and has waited for all threads
_waits: list[Callable[[], object]] = []


def in_worker(verb: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let the whole of a function be the body of a verb."""

    @functools.wraps(verb)
    def called(*values: Arguments.args, **options: Arguments.kwargs) -> Result:
        return run(lambda: verb(*values, **options))

    return called


def run(
    body: Callable[[], Result], *, dropped: Callable[[Result], object] = lambda _: None
) -> Result:
    """Run the body of a verb in a worker thread; return what it returns, raise what it raises.

    Args:
        dropped: called, once or twice, with a result that an exception keeps from the caller.

    Raises:
        HoldfastError: a daemon thread calls while Python ends, which would cut it off anywhere.
    """
    if here.job is not None:  # within a body
        return body()
    job, before = _Job(body, dropped), here.serving
    try:
        here.serving = (*before, job)
        if not job.begin():
            return body()
        result: Result = job.serve()
        return result
    except BaseException as error:
        job.interrupt = error  # by no call, before which another may come
        try:
            job.stop(error)
        except BaseException as second:
            job.leave(second)  # the first may not have come so far
            second.add_note(HELD_UP)
            raise
        raise
    finally:
        here.serving = before
        job.failure = None  # it holds this frame
        job.resumed.release()


def call_in_caller(function: Callable[[], Result]) -> Result:
    """Call a function in the thread that called the verb: what is the user's belongs there."""
    return function() if here.job is None else here.job.ask(function)


def check() -> None:
    """Check that the caller still waits for this body.

    Raises:
        Interrupted: an exception, such as a KeyboardInterrupt, has come there.
    """
    if here.job is not None and here.job.interrupt is not None:
        here.job.check()


def place() -> tuple[int, int]:
    """Return the thread that called the verb, and in how many other calls of verbs it is."""
    return here.place or (threading.get_ident(), len(here.serving))


def start(
    target: Callable[[threads.MayBegin], object], name: str, *, at_once: bool = False
) -> threading.Thread | None:
    """`threads.start`; return None too where Python is about to end the thread anywhere.

    The caller of a body goes on first, unless the body waits for the thread: then ``at_once``.
    """
    first = None if at_once or here.job is None else here.job.resumed
    return None if _ending.is_set() else threads.start(target, name, first)


def _start_worker() -> bool:
    """Start a worker; return False where none can be had."""
    try:
        _thread.start_new_thread(_work, ())  # frames of `threading` may be interrupted
    except RuntimeError:
        return False
    return True


def _work() -> None:
    """Run one job after the other, while no other worker waits."""
    global _idle
    while True:
        with _one:
            if _idle:
                return
            _idle = threading.get_native_id()
        job = _inbox.get()
        _idle = 0
        run_on(job.cpus)
        if not _inbox.empty():  # no other worker waits
            _start_worker()
        job.run()
        del job
        # Whoever asked for the current thread, such as logging, has entered one that never ends.
        threading._active.pop(threading.get_ident(), None)  # type: ignore[attr-defined]


def before_python_ends(wait: Callable[[], object]) -> None:
    """Call this once when Python is about to end, before it ends daemon threads."""
    _waits.append(wait)


def _end() -> None:
    """Let what is in the background end, and stop what other daemon threads are at."""
    _ending.set()
    for wait in _waits:
        wait()
    until = time.monotonic() + LAST_WORD_S
    for job in [job for job in list(_jobs) if job.is_daemon or job.interrupt is not None]:
        job.interrupt = job.interrupt or SystemExit()
        job.ended.wait(max(0.0, until - time.monotonic()))
    threads_ended.set()


def _forget() -> None:
    """In a forked child, where no other thread is, and nobody waits for what this one was at."""
    global here, _inbox, _idle, _one
    here, _inbox, _idle, _one = _Here(), SimpleQueue(), 0, threading.Lock()
    _jobs.clear()


os.register_at_fork(after_in_child=_forget)
try:
    # Not atexit: processes that multiprocessing starts end without.
    threading._register_atexit(_end)  # type: ignore[attr-defined]
except RuntimeError:  # this is the first use of holdfast, and Python is ending
    _ending.set()
    threads_ended.set()
