"""While an object store takes long: a line on the standard error, and an end by Ctrl-C.

obstore sends a request again for as long as its settings allow. Meanwhile it says nothing, and it
holds the thread that has called it, which alone handles signals. Knows no verbs.
"""

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..errors import StoreError
from ..stores.objects_errors import oldest_request
from .text import printable, write

PATIENCE_S = 5.0  # what is done before needs no line, and may end well after a signal
LOOK_S = 1.0
_ENDED = b"\0"  # no signal has this number
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_leaving: list[Callable[[], object]] = []


@contextmanager
def told() -> Iterator[None]:
    """Say once, while the block runs, which request is not done after five seconds.

    A signal that a handler of Python answers, such as Ctrl-C, ends the process where the request
    under way is not done five seconds later, or when the signal comes again. What is in the store
    is then as after a kill: a step is there whole or not at all.

    Where no thread can be had, or nobody reads the standard error, nothing is said. Outside the
    main thread no signal is seen.

    Example:
        ``with told(): tools.ls.ls("s3://bucket/run")``
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_look, args=(reader,), name="holdfast-waiting", daemon=True)
    with contextlib.ExitStack() as undone:
        undone.callback(os.close, reader)
        undone.callback(os.close, writer)
        try:
            thread.start()
            undone.callback(thread.join)
            undone.callback(os.write, writer, _ENDED)
            before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            undone.callback(signal.set_wakeup_fd, before)
        except (RuntimeError, ValueError):  # no thread; not the main one
            pass
        yield


@contextmanager
def leaving(undo: Callable[[], object]) -> Iterator[None]:
    """Call a function if a signal ends the process within the block; it gives a terminal back."""
    _leaving.append(undo)
    try:
        yield
    finally:
        _leaving.remove(undo)


def _look(reader: int) -> None:
    is_said, signalled_s, number = False, -math.inf, 0
    while True:
        came = os.read(reader, 64) if select.select([reader], [], [], LOOK_S)[0] else b""
        if _ENDED in came:
            return
        stops = [byte for byte in came if byte in _STOPPING]
        taken_s, what, where = oldest_request() or (0.0, "", "")
        after_s = time.monotonic() - signalled_s  # the last signal
        if taken_s > after_s and (stops or after_s >= PATIENCE_S):
            for undo in _leaving:
                undo()
            os._exit(128 + number)  # as shells report it
        if stops and taken_s <= after_s:
            signalled_s, number = time.monotonic(), stops[0]
        if taken_s >= PATIENCE_S and not is_said:
            is_said = True
            line = f"holdfast: {what} {where}: not done after {taken_s:.0f} s, still waiting"
            with suppress(BrokenPipeError, StoreError):
                write(sys.stderr, f"{printable(line)}\n")
