"""Threads: one that begins soon or never does, one that tools may observe, one that stands back.

`threading.Thread.start` waits for the new thread's first line without an end. Where memory is too
short for that line, it never comes.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")
MayBegin = Callable[[], bool]

BEGIN_S = 2.0  # a thread that is to begin later does nothing
NICENESS = 5  # of threads that write, above training's: that comes first where cores are short
FIRST_S = 0.005  # for another thread to go on first: as long as CPython lets one wait for the GIL


def start(
    target: Callable[[MayBegin], object], name: str, first: "threading.Lock | None" = None
) -> threading.Thread | None:
    """Start a daemon thread; return None where none can be had.

    Args:
        target: what the thread calls, with a function: unless that returns True, it has to return
            at once, since `start` has returned None.
        first: a lock; the thread waits until it is free, or for `FIRST_S`, before it may begin.

    Example:
        ``if start(lambda may_begin: may_begin() and work(), "holdfast-work") is None: work()``
    """
    turn, begun = threading.Lock(), threading.Event()

    def may_begin() -> bool:
        if first is not None and first.acquire(timeout=FIRST_S):
            first.release()  # for the next thread
        return turn.acquire(blocking=False)  # the first who asks has it

    begun.wait = partial(begun.wait, BEGIN_S)  # type: ignore[method-assign]
    thread = threading.Thread(target=target, args=(may_begin,), name=name, daemon=True)
    thread._started = begun  # type: ignore[attr-defined]
    try:
        thread.start()
    except RuntimeError:
        return None
    finally:
        del begun.wait  # else each holds the other
    if begun.is_set() or not turn.acquire(blocking=False):
        return thread
    threading._limbo.pop(thread, None)  # type: ignore[attr-defined]
    return None


def observed(body: Callable[[], Result]) -> Result:
    """Call it, traced and profiled where a thread of `threading` would be; raise what those do."""
    profile, trace = threading.getprofile(), threading.gettrace()
    if profile is trace is None:
        return body()
    with contextlib.suppress(RuntimeError):  # CPython 3.11: another thread is just being profiled
        sys.setprofile(profile)
    sys.settrace(trace)
    try:
        return body()
    finally:
        sys.settrace(None)
        with contextlib.suppress(RuntimeError):
            sys.setprofile(None)


def begin_behind(may_begin: MayBegin) -> bool:
    """Return what ``may_begin`` does; let this thread stand back behind those that train."""
    if not may_begin():
        return False
    with contextlib.suppress(OSError):  # it may not: a matter of speed alone. Linux takes 20 for 19
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS  # of the first thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    return True
