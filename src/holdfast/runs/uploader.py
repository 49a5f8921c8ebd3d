"""Brings the steps of a local disk to the store behind it, in a thread of the coordinator.

Invariants:
  1. A step appears in the store whole, as it is on the local disk, or not at all
     (`engine/transfer.py`); what was begun of another step is removed first.
  2. Which step goes up next is asked anew for each: nothing but the two places is remembered, so
     that a job that starts again goes on.
  3. It writes to the store only while this job holds the epoch there.
  4. What fails is tried again, with pauses; nobody waits for it but who asks for the store.
Knows no ranks and no tensors.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from .. import worker
from ..brief import show_bytes
from ..engine.check import read_manifest
from ..engine.retire import sweep
from ..engine.transfer import is_same, transfer
from ..errors import (
    AlreadyCommittedError,
    CorruptError,
    FencedError,
    HoldfastError,
    NotCommittedError,
    OptionError,
    StoreError,
)
from ..format.fields import comparable_metrics
from ..format.names import step_name
from ..options import Options
from ..stores.url import open_store
from .directory import Run
from .host_uploads import OtherHosts, forget_asked
from .retention import Keep, Metrics
from .throttle import upload_options
from .upload_policy import Tiers, lasting, next_up, spared, stays, wait_s, wanted
from .upload_thread import LOOK_S, Stopped, Told
from .upload_waits import UploadWaits

logger = logging.getLogger("holdfast")

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # after so many failures in a row; then always the last
WORD_S = 600.0  # between two warnings of failures in a row


class Uploader(UploadWaits):
    """See the module. All methods are of bodies of verbs, or of its own thread.

    Attributes:
        failure: what ended it for good; None: it goes on.
        has_entered: whether this job has the store.
        may_enter: whether its thread may take the store, if this job has not.
        unseen: if the store could not be read when this job looked: the jobs whose past it shares.
        said: the last error that is tried again, for people; empty: there is none.
    """

    def __init__(
        self, local: Run, store: Run, keep: Keep, options: Options, rate: float | None, told: Told
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            local: the run on the local disk, as it is saved to.
            store: the run in the store; only this object uses it from now on, but for `paused`.
            rate: bytes a second; None: as fast as it goes.
        """
        self._local = Run(local.root, keep)  # one of this thread, but for what is measured
        self._local.metrics = local.metrics
        self._saved = local  # knows which steps could not be restored
        self._store, self._keep, self._told = store, keep, told
        super().__init__(rate)
        self._root = open_store(store.root)
        self._options = upload_options(options, self._root)
        self._looking = threading.Lock()  # guards `described` of both
        self._lock = threading.Lock()  # guards what follows
        self._known: list[int] = []  # steps of the store, but for others of a local one's number
        self._same: set[int] = set()  # steps that are the same checkpoint in both
        self._bad: dict[int, str] = {}  # steps that cannot go up, and why
        self._cleared: set[str] = set()  # steps of which nothing is left, though still listed
        self._at: int | None = None
        self._done_bytes = 0
        self._metrics: dict[int, Mapping[str, float] | None] = {}  # of steps that were saved here
        self._seen_metrics: Metrics = {}  # of both places, when they were last looked at
        self._holds = self._hurries = 0  # callers of `paused`, of `hurried`
        self._awaited = Counter()
        self._saved_at = self._interval_s = 0.0  # the newest step that was saved here
        self._took_s = 0.0  # the last upload
        self._fresher_in_s = 0.0  # what goes up next is to be saved within this time
        self._is_idle = True
        self.ignored: frozenset[int] = frozenset()  # local steps of another past
        self.leads: frozenset[int] = frozenset()  # of other hosts: they bring their files
        self.unseen: set[str] | None = None
        self.failure: HoldfastError | None = None
        self.has_entered = self.may_enter = self._has_forgotten = False
        self.said, self._failures, self._word_at = "", 0, 0.0
        self._asks: SimpleQueue[bool] = SimpleQueue()  # whether somebody waits

    def begin(self) -> None:
        """Start the thread, if it does not run."""
        if not self._start():
            self.failure = StoreError("no thread can be started, so nothing is uploaded")

    def renew(self) -> None:
        """Begin anew: this job looks again which job has the store, and takes it when it may."""
        self.has_entered = self.may_enter = False
        if isinstance(self.failure, FencedError):
            self.failure = None

    def enter(self) -> None:
        """Take the store for this job, before anything is saved or uploaded; once.

        Raises:
            FencedError: another job has it.
            StoreError: that cannot be found out.
        """
        if self.unseen is not None:
            self._store.fence.check_past(self.unseen)
        self._store.fence.hold()
        self.has_entered, self.unseen = True, None
        self.forget(self._store.steps())

    def saved(self) -> None:
        """Take note of when a step was saved, before older ones go: that may take seconds."""
        now = time.monotonic()
        with self._lock:
            self._interval_s = now - self._saved_at if self._saved_at else 0.0
            self._saved_at = now

    def committed(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Take note of a step that is durable on the local disk."""
        with self._lock:
            self._metrics[step] = metrics
            self._same.discard(step)
            self._known = [s for s in self._known if s != step]
            self._bad.pop(step, None)
            self.ignored -= {step}
        self.begin()
        self._asks.put(False)

    def check(self, step: int) -> None:
        """Check that a step may be saved.

        Raises:
            FencedError: a newer job has the store.
            AlreadyCommittedError: the store has this step already.
        """
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        with self._lock:
            is_there = step in self._known and step not in self._store.damaged
        if is_there:
            raise AlreadyCommittedError(f"{self._store.path(step)} holds a committed checkpoint")

    def kept_here(self, steps: list[int], metrics: Metrics, *, is_full: bool) -> set[int]:
        """Return which steps stay here, with those waited for; tell of the others."""
        with self._lock:
            usable = [s for s in steps if s not in self.ignored]
            known = [s for s in self._known if s not in self._store.damaged]
            tiers = Tiers(usable, known, {**self._seen_metrics, **metrics}, {})
            kept = stays(tiers, self._keep, self._at, is_full=is_full)
            kept |= self._awaited.keys() & set(usable)
            waiting = [s for s in wanted(tiers, self._keep) if s not in kept | set(self._bad)]
            lasts = lasting(tiers, self._keep)
        for step in waiting:
            though = ", though the policy keeps it" if step in lasts else ""
            text = f"step {step} is not uploaded{though}: newer ones have taken its place"
            self._behind(step, text, logging.INFO)
        return kept

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the thread from both places meanwhile; what it is at is begun again."""
        with self._lock:
            self._holds += 1
        try:
            while not self._is_idle and not self._ended.is_set():
                worker.check()
                time.sleep(LOOK_S)
            yield
        finally:
            with self._lock:
                self._holds -= 1
            self._asks.put(False)

    def forget(self, known: list[int]) -> None:
        """Take note of the steps of the store, which were asked for from outside, in `paused`."""
        self._note_known(known)
        with self._lock:
            self._bad.clear()

    def end(self) -> None:
        """Let the thread end soon; what it is at goes on with the next job."""
        super().end()
        self._asks.put(True)

    def _serve(self) -> None:
        try:
            while not self._is_over():
                self._turn()
        except BaseException as error:  # a fault of holdfast: tell it, and do not hang who waits
            logger.exception("uploads to %s have ended", self._store.root)
            self.failure = StoreError(f"uploads have ended: {type(error).__name__}: {error}")
        finally:
            self._is_idle = True

    def _is_over(self) -> bool:
        """Return whether the thread is to end; what was asked until now is looked at from here."""
        with suppress(Empty):
            while True:
                self._asks.get_nowait()
        return self.is_stopped or self.failure is not None

    def _turn(self) -> None:
        """Bring up one step, or wait for one."""
        with self._lock:
            may = self._holds == 0
            self._is_idle = not may
            self._fresher_in_s = 0.0
        step = None
        try:
            if may:
                step = self._next()
                if step is not None:
                    metrics = self._told.measure(self._upload, step)
                    self._told.committed(self._store.path(step), step, metrics)
                self._failures, self.said = 0, ""
        except Stopped:
            pass
        except FencedError as error:
            self.failure = error
            logger.error("%s", error)
        except (CorruptError, AlreadyCommittedError, OptionError) as error:
            self._refuse(step, error)
        except NotCommittedError as error:  # the local disk has let go of it
            logger.info("%s", error)
        except HoldfastError as error:
            self._fail(step, error)
        finally:
            with self._lock:
                self._at = None
                self._is_idle = True
        if step is None or self._holds or self.said:
            self._wait()

    def _wait(self) -> None:
        """Wait until there may be something to do; after failures for a while, or for who waits."""
        with suppress(Empty):
            if not self._failures:
                self._asks.get(timeout=self._fresher_in_s or None)
                return
            until = time.monotonic() + self._pause_s()
            while not self._asks.get(timeout=max(0.0, until - time.monotonic())):
                pass  # a step that nobody waits for: it cannot go up before the others

    def _pause_s(self) -> float:
        return PAUSES_S[min(self._failures, len(PAUSES_S)) - 1]

    def _look_around(self, hidden: Collection[int], up: Collection[int] = ()) -> Tiers:
        with self._lock:
            known = sorted({*self._known, *up} - self._store.damaged)
            hidden = self.ignored | self._saved.damaged | set(hidden)
        here = [s for s in self._local.steps() if s not in hidden]
        with self._looking:
            bases = self._local.described.bases(here)
            metrics = self._local.described.metrics()
            if self._keep.metrics:
                for step in known:
                    self._store.described.read(step)
                metrics |= self._store.described.metrics()
        with self._lock:
            self._seen_metrics = metrics
        return Tiers(here, known, metrics, bases)

    def _note_known(self, there: list[int]) -> None:
        """Take note of the steps of the store: one that is another checkpoint here is not known."""
        both, same = set(self._local.steps()) & set(there), set[int]()
        for step in (both := both - self.ignored - self._saved.damaged) - self._same:
            if is_same(open_store(self._local.path(step)), self._root.below(step_name(step))):
                self._root.sync_directory(step_name(step))  # its publish may have been said to fail
                same.add(step)
        with self._lock:
            self._same = (self._same | same) & set(there)
            self._known = [s for s in there if s not in both or s in self._same]

    def _next(self) -> int | None:
        asked_at = time.monotonic()  # what follows may take longer than the time between saves
        if not self.has_entered:
            if not self.may_enter:
                return None
            self.enter()
        if not self._has_forgotten:
            forget_asked(self._root)
            self._has_forgotten = True
        self._note_known([s for s in self._store.steps() if s not in self._store.damaged])
        step = next_up(tiers := self._look_around(frozenset(self._bad)), self._keep)
        with self._lock:
            # A newer one takes its place, no other host waits to be asked, nothing has failed.
            is_lone = not (tiers.bases or self.leads or self._failures or self._hurries)
            may_wait = step is not None and step == tiers.local[-1] and self._keep.is_latest
            given = (asked_at - self._saved_at, self._interval_s, self._took_s)
            self._fresher_in_s = wait_s(*given) if may_wait and is_lone else 0.0
            self._at, self._done_bytes = None if self._fresher_in_s else step, 0
            return self._at

    def _upload(self, step: int) -> Mapping[str, float] | None:
        """Bring up a step; return its metrics."""
        started = time.perf_counter()
        self._store.check_there()
        self._store.fence.hold()
        if step in self._store.damaged:
            self._store.retire(step)
            self._store.damaged.discard(step)
        self._clear_others(step)
        here, there = open_store(self._local.path(step)), open_store(self._store.path(step))
        others = OtherHosts(self._root, step, self.leads, self._look_up)
        given = (self._options, self._report, self._store.fence.hold, "upload", others)
        # Should it be up before it is told of.
        found = comparable_metrics(read_manifest(here).table.header.metrics)
        try:
            transfer(here, there, *given)
        finally:
            others.take_back()
        taken_s = time.perf_counter() - started
        with self._lock:
            is_newest = step >= max(self._known, default=step)
            size, metrics = self._done_bytes, self._metrics.get(step, found)
            self._metrics = {s: m for s, m in self._metrics.items() if s > step}
        took = f"{show_bytes(size)} in {taken_s:.2f} s"
        logger.info("uploaded step %d to %s: %s", step, self._store.root, took)
        spare = spared(self._look_around({*self._bad}, {step}), self._keep)
        with self._looking:
            if is_newest:
                self._store.tidy(step, spare)
            else:
                self._store.thin(f"step {step} is uploaded, but", spare)
        row = {"bytes": size, "seconds": {"total": round(taken_s, 6)}}
        self._local.metrics.add("upload", step, [row])
        self._store.metrics.take_save(step, self._local.metrics)
        self._told.event("uploaded", step, bytes=size, seconds={"total": taken_s})
        with self._lock:  # from here on nobody waits for it
            self._known, self._at = sorted({*self._known, step}), None
            self._took_s = taken_s
            self._same.add(step)
        return metrics

    def _clear_others(self, step: int) -> None:
        """Remove what was begun of other steps; one that a newer job has finished by now stays.

        A step of which nothing was left is not asked for again. What an older job may yet leave
        there goes with a sweep.
        """
        self._cleared.discard(step_name(step))
        for name in self._store.uncommitted():
            if name != step_name(step) and name not in self._cleared:
                self._look_up()
                with suppress(HoldfastError):
                    if sweep(self._root.below(name), math.inf) is not None:
                        self._cleared.add(name)

    def _look_up(self) -> None:
        if self.is_stopped or self._holds:
            raise Stopped

    def _report(self, size: int) -> None:
        with self._lock:
            self._done_bytes += size
        self._pace(size)

    def _refuse(self, step: int | None, error: HoldfastError) -> None:
        """Give a step up: trying again would not help."""
        if step is None:
            return self._fail(step, error)
        text = f"step {step} of {self._local.root} is not uploaded: {error}"
        with self._lock:
            self._bad[step] = text
        return self._behind(step, text, logging.ERROR)

    def _fail(self, step: int | None, error: HoldfastError) -> None:
        self._failures += 1
        text, now = str(error), time.monotonic()
        if self._failures == 1 or now >= self._word_at:
            self._word_at = now + WORD_S
            what = "the store cannot be read" if step is None else f"step {step} is not uploaded"
            given = (what, self._pause_s(), text)
            logger.warning("%s yet, and is tried again in at most %g s: %s", *given)
            self._told.event("behind", step, text=text)
        self.said = text

    def _behind(self, step: int | None, text: str, level: int) -> None:
        logger.log(level, "%s", text)
        self._told.event("behind", step, text=text)
