"""A thread that begins soon, or never does; one that tools may observe. Knows nothing else.

`threading.Thread.start` waits for the new thread's first line without an end. Where memory is too
short for that line, it never comes.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")
MayBegin = Callable[[], bool]

BEGIN_S = 2.0  # a thread that is to begin later does nothing


class _Begun(threading.Event):
    """What `Thread.start` waits for; here for no longer than `BEGIN_S`."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread runs; return False when it does not in that time."""
        return super().wait(BEGIN_S if timeout is None else timeout)


def start(target: Callable[[MayBegin], object], name: str) -> threading.Thread | None:
    """Start a daemon thread; return None where none can be had.

    Args:
        target: what the thread calls, with a function: unless that returns True, it has to return
            at once, since `start` has returned None.

    Example:
        ``if start(lambda may_begin: may_begin() and work(), "holdfast-work") is None: work()``
    """
    may_begin = partial(threading.Lock().acquire, False)  # to the first who asks
    thread = threading.Thread(target=target, args=(may_begin,), name=name, daemon=True)
    thread._started = begun = _Begun()  # type: ignore[attr-defined]
    try:
        thread.start()
    except RuntimeError:
        return None
    if begun.is_set() or not may_begin():
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
