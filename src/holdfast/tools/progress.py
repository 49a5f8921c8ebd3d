"""A progress bar for what takes longer than two seconds. Knows bytes; not what is done to them.

For a training loop: ``with watch(handle): …`` shows a save in flight.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from .. import SaveHandle

PATIENCE_S = 2.0  # what ends before needs no bar
REDRAW_S = 0.1


class Progress:
    """Counts bytes, and after two seconds shows them on the standard error, if that is a terminal.

    Use it as a context manager; `advance` fits `Checkpoint.verify`. At the end the bar is erased.
    """

    def __init__(
        self,
        verb: str,
        total_bytes: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verb, self._total_bytes, self._clock = verb, total_bytes, clock
        self._stream = stream or sys.stderr
        self._visible = self._stream.isatty()
        self._started_s = clock()
        self._next_draw_s = self._started_s + PATIENCE_S
        self._done_bytes = 0
        self._bar: Bar | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.erase()

    def advance(self, count_bytes: int) -> None:
        """Count bytes that were done since the last call."""
        self._done_bytes += count_bytes
        if not self._visible or (now_s := self._clock()) < self._next_draw_s:
            return
        self._next_draw_s = now_s + REDRAW_S
        if self._bar is None:
            self._bar = Bar(self._verb, self._total_bytes, self._stream)
        # Reads are rounded to pages and gaps: a little more may be read than there is.
        self._bar.draw(min(self._done_bytes, self._total_bytes))


@contextmanager
def watch(handle: "SaveHandle", *, stream: TextIO | None = None) -> Iterator[None]:
    """Show how far a save in the background is, while the block runs; on a terminal only.

    Example:
        ``with watch(holdfast.save_async(state, path)): train()``
    """
    left = threading.Event()
    total_bytes = handle.progress().total_bytes

    def draw() -> None:
        shown_bytes = 0
        with Progress("save", total_bytes, stream=stream) as progress:
            while not left.wait(REDRAW_S) and not handle.done():
                written_bytes = handle.progress().written_bytes
                progress.advance(written_bytes - shown_bytes)
                shown_bytes = written_bytes

    thread = threading.Thread(target=draw, name="holdfast-watch")
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


class Bar:
    """A bar with speed and remaining time."""

    def __init__(self, verb: str, total_bytes: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress: Any = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._progress.add_task(verb, total=total_bytes)
        self._progress.start()

    def draw(self, done_bytes: int) -> None:
        """Show the state."""
        self._progress.update(self._task, completed=done_bytes)

    def erase(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()
