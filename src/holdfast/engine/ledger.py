"""How far a save has come, and whether it is to go on. Knows no tensors and no files."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import worker
from ..brief import show_bytes
from ..errors import CancelledError, StoreError

if TYPE_CHECKING:
    from .stream import Writes

PARTS = ("wait", "plan", "stage", "encode", "write", "sync", "commit", "retire")
WITHIN = ("wait", "plan", "stage", "write", "sync", "commit")  # "encode" is of other threads
LOAD_PARTS = ("wait", "plan", "read", "place")
MARKS_MAX = 6  # of the time while it writes: each gives two spans, and others give 11 at most
SPANS_MAX = 24
HOST = os.uname().nodename[:64]  # as long as Linux allows


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
        seconds: for each of `PARTS` that is counted as it goes, besides what ``spans`` hold; "wait"
            is time spent waiting for other ranks, "write" for the disk.
        waits: how often the thread had to wait for the disk.
        stall_s: how long the caller's thread was held up.
        tell: called with each stage that the save has come to; None: nobody wants to know.
        spans: (phase, start, end, bytes) of what was timed, by `time.perf_counter`.
        write_began: when writing began; None: it has not.
        met: when this rank last agreed with the others before it wrote. All leave that meeting at
            nearly the same moment, so spans of several ranks are counted from it.
        clock: this machine's time then, in seconds since 1970. The difference of two ranks' is the
            offset of their clocks.
    """

    def __init__(
        self,
        called: float | None = None,
        waited_s: float = 0.0,
        tell: "Callable[[str, Ledger], object] | None" = None,
    ) -> None:
        """Begin to count.

        Args:
            called: a time of `time.perf_counter`, since which the caller has been held up, as it is
                until the end; None: it is not held up that long.
            waited_s: how long it has waited for other ranks.
            tell: see above.
        """
        self.called, self.tell = called, tell
        self.started = time.perf_counter() - waited_s
        self.state = "staging"
        self.total_bytes = self.staged_bytes = self.written_bytes = self.waits = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.spans = [("wait", self.started, self.started + waited_s, 0)]
        self.write_began: float | None = None
        self._is_staged = False  # before it is written
        self._writes: Writes | None = None
        self._marks: list[tuple[float, int, float]] = []  # (time, bytes written, seconds synced)
        self.met, self.clock = self.started + waited_s, time.time()
        self.stall_s = 0.0
        self._deadline = float("inf")
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the block's time for a part."""
        started, before = time.perf_counter(), self.staged_bytes
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.spans.append((part, started, ended, self.staged_bytes - before))
            self._is_staged |= part == "stage"

    def planned(self, total_bytes: int, waited_s: float, met: float) -> None:
        """Count what came before as planning, without the time spent waiting for other ranks.

        Args:
            met: when they had all met, by `time.perf_counter`; 0: there was nobody to meet.
        """
        now, began = time.perf_counter(), self.met
        self.total_bytes = total_bytes
        self.met = met or now
        self.clock = time.time() - (now - self.met)
        waited_since = self.met - waited_s
        self.spans.append(("plan", began, waited_since, 0))
        self.spans.append(("wait", waited_since, self.met, 0))
        self.spans.append(("plan", self.met, now, 0))
        if self.tell is not None:
            self.tell("planned", self)

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

    def check_last(self, check: Callable[[], object]) -> None:
        """Check what the caller asks for, which may take long on a slow disk; then the deadline."""
        check()
        self.check_deadline()

    def check_deadline(self) -> None:
        """Check that the save's deadline has not passed.

        Raises:
            StoreError: it has.
        """
        if time.monotonic() > self._deadline:
            done, total = show_bytes(self.written_bytes), show_bytes(self.total_bytes)
            raise StoreError(
                f"the save's deadline passed after {done} of {total}; raise "
                "deadline_s, or save to a faster disk"
            )

    def took(self, size_bytes: int) -> str:
        """Say how long this save of so many bytes has taken."""
        stalled = f", training held up for {self.stall_s:.3f} s" if self.stall_s else ""
        return f"{show_bytes(size_bytes)} in {time.perf_counter() - self.started:.2f} s{stalled}"

    def note_writes(self, writes: "Writes") -> None:
        """Take over what a writer has counted; `close` does so for the last time."""
        self._writes = writes
        self.written_bytes, self.waits = writes.done_bytes, writes.waits
        self.seconds["write"], self.seconds["sync"] = writes.wait_s, writes.sync_s
        self._marks.append((time.perf_counter(), self.written_bytes, writes.sync_s))
        if len(self._marks) > MARKS_MAX:
            del self._marks[:-1:2]  # two neighbours become one; the newest stays

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
        if self._writes is not None:
            self.note_writes(self._writes)
        with self._lock:
            self.check()
            self._closed = True
            self.state = "committing"
        if self.tell is not None:
            self.tell("written", self)

    def progress(self) -> Progress:
        """Return how far it is."""
        state, written_bytes = self.state, self.written_bytes
        is_written = state in ("committing", "committed")
        total_bytes = written_bytes if is_written else max(self.total_bytes, written_bytes)
        return Progress(state, self.staged_bytes, written_bytes, total_bytes)

    def record(self) -> dict[str, Any]:
        """Return everything as values of JSON; seconds to the microsecond, spans from ``met``."""
        now = time.perf_counter()
        stall_s = self.stall_s if self.called is None else now - self.called
        spans: list[tuple[str, float, float, int]] = []
        since = sync_began = began = self.write_began or self.started
        before, synced_s = 0, 0.0
        for when, written, sync_s in self._marks:
            sync_began = when - max(sync_s - synced_s, 0.0)  # both begin anew after a failed sync
            spans.append(("write", since, sync_began, max(written - before, 0)))
            spans.append(("sync", sync_began, when, 0))
            since, before, synced_s = when, written, sync_s
        seconds = self.seconds.copy()
        for phase in ("stage", "encode"):  # while it writes: `seconds` says how long in all
            if seconds[phase] and not (phase == "stage" and self._is_staged):
                spans.append((phase, began, sync_began, self.staged_bytes))
        for phase, start, end, _ in self.spans:
            seconds[phase] = seconds.get(phase, 0.0) + end - start
        for phase in seconds:
            seconds[phase] = round(seconds[phase], 6)
        told = []
        for phase, start, end, size in self.spans[: SPANS_MAX - 1 - len(spans)] + spans:
            if size or end - start >= 1e-6:
                told.append([phase, round(start - self.met, 6), round(end - self.met, 6), size])
        total = round(now - self.started, 6)
        rest = total - sum(map(seconds.__getitem__, WITHIN))
        return {
            "bytes": self.total_bytes,
            "stored_bytes": self.written_bytes,
            "seconds": seconds | {"other": max(0.0, round(rest, 6)), "total": total},
            "waits": self.waits,
            "stall_s": round(stall_s, 6),
            "host": HOST,
            "clock": round(self.clock, 6),
            "spans": told,
        }
