"""How far a save has come, and whether it is to go on. Knows no tensors and no files."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from .. import worker
from ..errors import CancelledError, StoreError

if TYPE_CHECKING:
    from .write import DataFileWriter

PARTS = ("wait", "plan", "stage", "encode", "write", "sync", "commit", "retire")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a save in flight is; all counts are of this rank's share.

    Attributes:
        state: "staging", "writing", "committing", "committed", "failed" or "skipped".
        staged_bytes: bytes copied; after `SaveHandle.wait_staged` the state may change.
        written_bytes: bytes written; they are durable only once committed.
        total_bytes: bytes to write in all. With a codec, nobody knows before all are encoded: until
            the state is "committing", these are the bytes of the elements.

    Example::

        progress = holdfast.save_async(state, "runs/a/step-00000008").progress()
        print(progress.state, progress.written_bytes, "of", progress.total_bytes)
    """

    state: str
    staged_bytes: int
    written_bytes: int
    total_bytes: int


class Ledger:
    """Counts and seconds of one save, or load, on one rank.

    Attributes:
        seconds: for each of `PARTS`; "wait" is time spent waiting for other ranks, "write" for the
            disk.
        waits: how often the thread had to wait for the disk.
        stall_s: how long the caller's thread was held up.
    """

    def __init__(self, called: float | None = None, waited_s: float = 0.0) -> None:
        """Begin to count.

        Args:
            called: a time of `time.perf_counter`, since which the caller has been held up, as it is
                until the end; None: it is not held up that long.
            waited_s: how long it has waited for other ranks.
        """
        self.called = called
        self.started = time.perf_counter() - waited_s
        self.state = "staging"
        self.total_bytes = self.staged_bytes = self.written_bytes = self.waits = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.seconds["wait"] = waited_s
        self.stall_s = 0.0
        self._deadline = float("inf")
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the block's time for a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - started

    def planned(self, total_bytes: int, waited_s: float) -> None:
        """Count what came before as planning, without the time spent waiting for other ranks."""
        self.total_bytes = total_bytes
        self.seconds["wait"] += waited_s
        self.seconds["plan"] = time.perf_counter() - self.started - self.seconds["wait"]

    def end_at(self, deadline: float) -> None:
        """Set the time (of `time.monotonic`) after which `check` fails."""
        self._deadline = deadline

    def check(self) -> None:
        """Check that the save is to go on.

        Raises:
            CancelledError: it was cancelled.
            StoreError: its deadline has passed.
        """
        worker.check()
        if self._is_cancelled:
            raise CancelledError("the save was cancelled; nothing was committed")
        self.check_deadline()

    def check_deadline(self) -> None:
        """Check that the save's deadline has not passed.

        Raises:
            StoreError: it has.
        """
        if time.monotonic() > self._deadline:
            done, total = self.written_bytes / 1e9, self.total_bytes / 1e9
            raise StoreError(
                f"the save's deadline passed after {done:.3f} of {total:.3f} GB; raise "
                "deadline_s, or save to a faster disk"
            )

    def note_writes(self, writer: "DataFileWriter") -> None:
        """Take over what a writer has counted."""
        self.written_bytes, self.waits = writer.writes.done_bytes, writer.writes.waits
        self.seconds["write"], self.seconds["sync"] = writer.writes.wait_s, writer.sync_s

    def cancel(self) -> bool:
        """Ask for the end of the save; return False when it is too late for that."""
        with self._lock:
            if not self._closed:
                self._is_cancelled = True
            return not self._closed

    def close(self) -> None:
        """Rule out a cancellation from here on.

        Raises:
            CancelledError: it came before.
        """
        with self._lock:
            self.check()
            self._closed = True
            self.state = "committing"

    def progress(self) -> Progress:
        """Return how far it is."""
        state, written_bytes = self.state, self.written_bytes
        is_written = state in ("committing", "committed")
        total_bytes = written_bytes if is_written else max(self.total_bytes, written_bytes)
        return Progress(state, self.staged_bytes, written_bytes, total_bytes)

    def record(self) -> dict[str, object]:
        """Return everything as values of JSON; seconds to the microsecond."""
        now = time.perf_counter()
        stall_s = self.stall_s if self.called is None else now - self.called
        seconds = dict(zip(PARTS, map(round, self.seconds.values(), repeat(6)), strict=True))
        return {
            "bytes": self.total_bytes,
            "stored_bytes": self.written_bytes,
            "seconds": seconds | {"total": round(now - self.started, 6)},
            "waits": self.waits,
            "stall_s": round(stall_s, 6),
        }
