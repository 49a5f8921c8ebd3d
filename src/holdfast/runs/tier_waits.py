"""Waits for the uploads of a run that is on a local disk and in the store behind it.

On all ranks, as each host uploads its own files; after an error in training, on one alone.
"""

import contextlib
import itertools
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .. import worker
from ..engine import epochs
from ..errors import FencedError, HoldfastError, StoreError
from ..format.names import named
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..stores.objects_errors import oldest_request
from .host_uploads import HostUploads
from .tier_steps import TierSteps
from .uploader import Uploader

logger = logging.getLogger("holdfast")

TURN_S = 1.0  # between two meetings of ranks that wait for an upload
LATE_S = 10.0  # later than the time it has, a wait ends without the others
FIRST_WORD_S = 10.0  # from here on, a job that ends says what it waits for
WORD_S = 60.0  # between two such words
_NEXT_JOB = (
    "The next job with these two directories uploads the newest first, from its first step, save "
    "or wait on"
)


@dataclass
class _Drain:
    """A wait at the end of a job: until when, what was left at the last look, the next word."""

    until: float
    left: Sequence[int] = ()
    word_at: float = 0.0


class TierWaits(TierSteps):
    """See `TieredRun`."""

    beside: HostUploads
    _was_ready: bool
    _word: str
    _waits: int

    @abstractmethod
    def begin(self) -> None:
        """Check both places, and go on with uploads; on all ranks."""

    @abstractmethod
    def has_one_disk(self) -> bool:
        """Return whether all ranks share the local directory."""

    @abstractmethod
    def _enter(self, uploader: Uploader) -> None:
        """Take the store for this job."""

    def name_wait(self) -> str:
        """Name the next `wait`; on all ranks, before what it follows."""
        self._waits += 1
        return f"up/{self._word}/{self._waits}"

    def _meet(self, name: str, limit_s: float) -> Phase:
        """Return a meeting of the ranks that wait: one whose own save has failed does not come.

        So it is none by collectives, where that may be: such a rank goes on with those of training.
        """
        ranks = self._ranks
        if hasattr(ranks, "background"):
            ranks = ranks.background(name, time.monotonic() + limit_s)
        return Phase(ranks)

    @contextlib.contextmanager
    def awaiting(self, step: int | None) -> Iterator[None]:
        """Keep a step on the local disk meanwhile, however many newer ones come."""
        with contextlib.nullcontext() if self.uploader is None else self.uploader.awaited(step):
            yield

    def wait(
        self, step: int | None, newest: Callable[[], int | None], limit_s: float, name: str
    ) -> None:
        """Wait until a step is in the store; on all ranks.

        Args:
            step: None: the newest.
            newest: returns the step that this job has saved last. If the policy lets go of the
                other one for it, it is waited for in its place.
            name: see `name_wait`.

        Raises:
            StoreError: it is not there in time, or never will be.
            FencedError: a newer job has the store.
        """
        step = newest() if step is None else step
        if step is None:
            return
        until = time.monotonic() + limit_s
        for turn in itertools.count():
            with self._meet(f"{name}/{turn}" if turn else name, limit_s + LATE_S) as asked:
                if self.uploader is not None:
                    asked.answer = b"1" if self._is_up(step, newest, until) else b""
            if asked.answers[COORDINATOR]:
                return

    def drain(self, limit_s: float) -> None:
        """Wait until nothing is left to upload; on all ranks, as each host uploads its own files.

        Raises:
            StoreError: there is something left.
        """
        if self._was_ready and not self.is_ready:
            self.begin()  # there was a restore, and no save after it
        if not self.is_ready or self.has_one_disk():
            self.drain_alone(limit_s)
            return
        drain, is_over = _drain_for(limit_s), False
        while not is_over:
            with Phase(self._ranks) as asked:
                if self.uploader is not None:
                    asked.answer = b"1" if self._drain_a_turn(self.uploader, drain) else b""
            is_over = bool(asked.answers[COORDINATOR])
        with Phase(self._ranks):
            self._check_left(drain.left, limit_s)

    def drain_alone(self, limit_s: float) -> None:
        """Do as `drain` where other ranks may not come any more.

        Raises:
            StoreError: there is something left.
        """
        if self._was_ready and not self.is_ready:
            self._begin_alone()
        if not self._was_ready:
            if self._is_restored and self._only_here:
                where = f"{self.store.root} lacks {named(self._only_here)} of {self.local.root}"
                logger.warning("%s, and this job has saved nothing. %s", where, _NEXT_JOB)
            return
        drain = _drain_for(limit_s)
        if self.uploader is not None:
            while not self._drain_a_turn(self.uploader, drain):
                pass
            self._check_left(drain.left, limit_s)
        elif not self.has_one_disk():
            self.beside.wait_idle(drain.until)

    def _drain_a_turn(self, uploader: Uploader, drain: _Drain) -> bool:
        """Wait for a turn; return whether there is nothing more to wait for, or no time."""
        drain.left = uploader.wait_all(min(drain.until, time.monotonic() + TURN_S))
        now = time.monotonic()
        if uploader.is_done(drain.left) or now >= drain.until:
            return True
        if now >= drain.word_at:
            drain.word_at = now + WORD_S
            logger.warning(
                "this job waits for the upload of %s to %s, at most %.0f s more (drain_s). %s",
                named(drain.left),
                self.store.root,
                drain.until - now,
                uploader.why() or "The upload has not started",
            )
        return False

    def _begin_alone(self) -> None:
        """Do as `begin` after a restore, where other ranks may not come any more.

        Then this rank cannot learn what they have. But if no other job has taken the store since
        this one did, both places are as this one has left them.

        Raises:
            HoldfastError: it cannot be done; what is left is logged.
        """
        try:
            if self._ranks.world_size == 1:
                self.begin()
            elif self.uploader is not None:
                newest = epochs.newest_epoch(self._there)
                mine = epochs.held.get(self._there.location, epochs.NO_EPOCH)
                if not epochs.is_same(newest, mine):
                    raise StoreError(f"{self.store.root} is not this job's any more")
                self._enter(self.uploader)
        except HoldfastError:
            self.say_left()
            raise

    def say_left(self) -> None:
        """Log what is not uploaded, where nobody waits for it."""
        if self._was_ready and self.uploader is not None:
            self.uploader.say_left()

    def _check_left(self, left: Sequence[int], limit_s: float) -> None:
        if self.uploader is None or not left:
            return
        why, it = self.uploader.why(), "it" if len(left) == 1 else "them"
        text = f"{self.store.root} lacks {named(left)} of {self.local.root}"
        if isinstance(self.uploader.failure, FencedError):
            raise StoreError(f"{text}, and the next job leaves {it} out: {why}")
        if self.uploader.failure is None and self.uploader.is_done(left):
            raise StoreError(f"{text}: {why}")
        text += f" after drain_s={limit_s:g} s{f' ({why})' if why else ''}. The local disk has {it}"
        next_job = _NEXT_JOB
        if self.uploader.unseen is not None:
            next_job += f", unless {self.store.root} has steps of another job"
        if not self.has_one_disk():
            raise StoreError(f"{text}, with the disks of the other hosts. {next_job}")
        raise StoreError(
            f"{text}. {next_job}; or call, for each step, "
            f"holdfast copy {self.local.path(left[-1])} {self.store.path(left[-1])}"
        )

    def _is_up(self, step: int, newest: Callable[[], int | None], until: float) -> bool:
        """Wait for a turn; return whether a step is in the store."""
        assert self.uploader is not None
        is_let_go = not self.uploader.is_up(step) and self.uploader.lets_go(step)
        # A newer one may be on the disk before its own thread has been told.
        if is_let_go and (newer := max(newest() or step, self.uploader.last_awaited())) > step:
            step = newer
        elif is_let_go:
            raise StoreError(
                f"step {step} is durable in {self.local.root}, but does not go to "
                f"{self.store.root}: with the later steps there, the policy does not keep it. To "
                "train on from an earlier step, call retire_after(step) first"
            )
        turn = time.monotonic() + TURN_S
        with self.uploader.hurried():
            while not self.uploader.is_up(step):
                now = time.monotonic()
                if now >= until:
                    said = f". The last error: {self.uploader.said}" if self.uploader.said else ""
                    if not said and (request := oldest_request()) is not None:
                        said = f". It waits for: {request[1]} {request[2]}"
                    raise StoreError(
                        f"step {step} is durable in {self.local.root}, but not yet in "
                        f"{self.store.root}, in the time that the save has (deadline_s). Its "
                        f"upload goes on while this job does{said}"
                    )
                if now >= turn:
                    return False
                worker.check()
                time.sleep(0.02)
        return True


def _drain_for(limit_s: float) -> _Drain:
    now = time.monotonic()
    return _Drain(now + limit_s, word_at=now + FIRST_WORD_S)
