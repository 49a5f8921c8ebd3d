"""What is asked of an uploader by who waits for it: whether a step is up, and what is left."""

import logging
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from .. import worker
from ..brief import show_bytes
from ..errors import HoldfastError, StoreError
from ..format.names import some
from .directory import Run
from .retention import Keep
from .upload_policy import Tiers, wanted
from .upload_thread import LOOK_S, UploadThread

logger = logging.getLogger("holdfast")


class UploadWaits(UploadThread):
    """See `Uploader`."""

    failure: HoldfastError | None
    said: str
    _local: Run
    _saved: Run
    _store: Run
    ignored: frozenset[int]
    _keep: Keep
    _failures: int
    _asks: "SimpleQueue[bool]"  # whether somebody waits
    _lock: threading.Lock
    _known: list[int]
    _bad: dict[int, str]
    _at: int | None
    has_entered: bool
    _done_bytes: int
    _metrics: dict[int, Mapping[str, float] | None]
    _hurries: int  # callers of `hurried`
    _awaited: Counter[int]  # steps, and how many callers of `awaited` each has
    _fresher_in_s: float

    @abstractmethod
    def begin(self) -> None:
        """Start the thread, if it does not run."""

    @abstractmethod
    def _look_around(self, hidden: Collection[int]) -> Tiers:
        """Return what is where."""

    def is_up(self, step: int) -> bool:
        """Return whether a step is in the store.

        Raises:
            HoldfastError: it never will be.
        """
        with self._lock:
            if step in self._known and step not in self._store.damaged:
                return True
            bad = self._bad.get(step)
        if bad is not None:
            raise StoreError(bad)
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        return False

    def lets_go(self, step: int) -> bool:
        """Return whether the policy does not want a local step in the store.

        It wants the newest: a store that does not answer is asked nothing for that one.

        Raises:
            FencedError: the later steps may be those of a newer job.
        """
        with self._lock:
            known = list(self._known)
        try:
            if step >= max([*known, *self._local.steps()], default=step) or not self.has_entered:
                return False
            tiers = self._look_around(frozenset())
            kept = self._keep.kept(sorted({*tiers.local, *tiers.store}), tiers.metrics)
            if step in kept or step in tiers.store or step not in tiers.local:
                return False
            self._store.fence.hold()  # after the look at the steps
        except StoreError:
            return False  # who waits learns of it in time
        return True

    def backlog(self) -> list[int]:
        """Return the steps that the store is to have and lacks, ascending.

        Of those that cannot go up, the ones that this job saved, if no newer one is there.
        """
        with self._lock:
            bad, own = frozenset(self._bad), {*self._metrics}
        left = {*wanted(self._look_around(bad), self._keep)}
        if lost := bad & own:
            left |= lost.intersection(wanted(self._look_around(frozenset()), self._keep))
        return sorted(left)

    def why(self) -> str:
        """Say why something is not uploaded; empty: there has been no time."""
        with self._lock:
            bad, size = next(reversed(self._bad.values()), ""), self._done_bytes
            going = "" if self._at is None else f"step {self._at}: {show_bytes(size)} are up"
        return bad or (self.said or going if self.failure is None else str(self.failure))

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Have no upload wait for a fresher step, or after a failure: somebody waits for it."""
        with self._lock:
            self._hurries += 1
            if self._fresher_in_s or self._failures:
                self._asks.put(True)
        try:
            yield
        finally:
            with self._lock:
                self._hurries -= 1

    @contextmanager
    def awaited(self, step: int | None) -> Iterator[None]:
        """Keep a step on the local disk meanwhile: somebody waits for its upload."""
        if step is None:
            yield
            return
        with self._lock:
            self._awaited[step] += 1
        try:
            yield
        finally:
            with self._lock:
                self._awaited -= Counter((step,))

    def last_awaited(self) -> int:
        """Return the newest step that somebody waits for; -1: none."""
        with self._lock:
            return max(self._awaited, default=-1)

    def until_unawaited(self) -> None:
        """Wait until nobody waits for an upload: each does so for a bounded time."""
        while self._awaited:
            worker.check()
            time.sleep(LOOK_S)

    def wait_all(self, until: float) -> list[int]:
        """Wait until nothing is left to go up; return what is left at a time of `monotonic`."""
        self.begin()
        self._asks.put(True)
        with self.hurried():
            while True:
                left = self.backlog()
                if self.is_done(left) or time.monotonic() >= until:
                    return left
                worker.check()
                time.sleep(min(LOOK_S * 4, max(0.0, until - time.monotonic())))

    def is_done(self, left: Collection[int]) -> bool:
        """Return whether waiting does not help: nothing is left, or what is left cannot go up."""
        return self.failure is not None or not set(left) - set(self._bad)

    def say_left(self) -> None:
        """See `UploadThread`."""
        with suppress(HoldfastError), self._lock:  # without a request: the store may be away
            hidden = {*self._known, *self.ignored, *self._saved.damaged}
            if left := [str(step) for step in self._local.steps() if step not in hidden]:
                text = f"{self._store.root} lacks step {some(left)} of {self._local.root}. The next"
                logger.warning("this job ends, and %s job uploads those that it keeps", text)
