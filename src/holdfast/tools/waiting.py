"""A line on the standard error while an object store takes long. Knows no verbs.

obstore sends a request again for as long as its settings allow, and says nothing meanwhile.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import StoreError
from ..stores.objects_errors import oldest_request
from .text import printable, write

PATIENCE_S = 5.0  # what is done before needs no line
LOOK_S = 1.0


@contextmanager
def told() -> Iterator[None]:
    """Say once, while the block runs, which request is not done after five seconds.

    Where no thread can be had, or nobody reads the standard error, nothing is said.

    Example:
        ``with told(): tools.ls.ls("s3://bucket/run")``
    """
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            found = oldest_request()
            if found is not None and found[0] >= PATIENCE_S:
                taken_s, what, where = found
                line = f"holdfast: {what} {where}: not done after {taken_s:.0f} s, still waiting"
                with suppress(BrokenPipeError, StoreError):
                    write(sys.stderr, f"{printable(line)}\n")
                return

    thread = threading.Thread(target=look, name="holdfast-waiting", daemon=True)
    with suppress(RuntimeError):
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
