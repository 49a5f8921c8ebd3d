"""A thread that begins soon, or never does. Knows nothing else.

`threading.Thread.start` waits for the new thread's first line without an end. Where memory is too
short for that line, it never comes.
"""

import threading
from collections.abc import Callable

BEGIN_S = 2.0  # a thread that is to begin later does nothing


class _Begun(threading.Event):
    """What `Thread.start` waits for; here for no longer than `BEGIN_S`."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread runs; return False when it does not in that time."""
        return super().wait(BEGIN_S if timeout is None else timeout)


def start(target: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a daemon thread; return None where none can be had: then it never calls ``target``.

    Example:
        ``if start(work, "holdfast-work") is None: work()``
    """
    turn: dict[str, int] = {}

    def is_first() -> bool:
        thread = threading.get_ident()
        return turn.setdefault("thread", thread) == thread

    def run() -> None:
        if is_first():
            target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread._started = begun = _Begun()  # type: ignore[attr-defined]
    try:
        thread.start()
    except RuntimeError:
        return None
    if begun.is_set() or not is_first():
        return thread
    threading._limbo.pop(thread, None)  # type: ignore[attr-defined]
    return None
