"""Makes the saves of a run, one at a time: now, or in the background; tells of each failure once.

Does not know when one is due.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.basis import forget_basis
from ..engine.ledger import Ledger
from ..errors import AlreadyCommittedError, NoSpaceError, OptionError, StoreError
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..saving.handle import SaveHandle
from ..saving.request import NoRoomError, SaveRequest
from ..saving.save import Records, save_now, start_save
from .commit_hook import CommitHook
from .directory import Run
from .failures import note_failure
from .observers import Observers, SaveEvents
from .progress_file import ProgressFile
from .schedule import Schedule

if TYPE_CHECKING:
    from ..group.base import Group
    from .places import TierHook
    from .tiers import TieredRun

logger = logging.getLogger("holdfast")

State = Mapping[Any, Any]
Metrics = Mapping[str, float] | None
Made = TypeVar("Made")


@dataclass(slots=True)
class _Flight:
    """A save in the background; ``took_s`` gets its duration, on the coordinator, at its commit."""

    step: int
    handle: SaveHandle
    call_stall_s: float
    took_s: list[float]
    is_settled: bool = False


class Saver:
    """See `holdfast.Checkpointer`. All ranks call the same methods in the same order.

    Attributes:
        saved_step: the step that was saved or restored last, or is being saved, while it is there.
    """

    def __init__(
        self,
        run: Run,
        ranks: "Group",
        schedule: Schedule,
        request: SaveRequest,
        hook: "CommitHook | TierHook",
        observers: Observers,
        progress: ProgressFile,
        tiers: "TieredRun | None" = None,
    ) -> None:
        """Prepare; ``request`` lacks the path, the step and the metrics of each save.

        Its ``stage`` may be "sync" too.
        """
        self._tiers = tiers
        self._hook, self._observers, self._progress = hook, observers, progress
        self.saved_step: int | None = None
        self._run, self._ranks, self._schedule = run, ranks, schedule
        self._request = request
        self._flight: _Flight | None = None
        self._skipped = 0  # saves, since one began
        self._epoch = object()  # another from each `rest`: what was left before is not listened to

    def end(self) -> None:
        """Give back what the next delta would be made from: nothing more is saved."""
        forget_basis(self._run.root, self._ranks.rank)

    def begin(self, step: int, state: State, metrics: Metrics) -> bool:
        """Start a save; raise what the one before failed with. False: this one was skipped."""
        if self._request.stage == "sync":
            called = time.perf_counter()
            self._save_here(step, state, metrics, Ledger(called, self.rest()))
            return True
        before = self._flight
        if not self._start(step, state, metrics, self._request):
            self._skipped += 1
            return False
        self._tell(before)
        return True

    def save(self, step: int, state: State, metrics: Metrics) -> None:
        """Save after the one in flight, unless it is saved; then raise what that one failed with.

        When that was a first try of this step, this is the second.
        """
        called = time.perf_counter()
        ledger = Ledger(called, self.rest())
        if self.saved_step == step:
            logger.info("step %d is saved already", step)
            self.wait()
        else:
            self._save_here(step, state, metrics, ledger)

    def save_last(self, step: int, state: State, metrics: Metrics) -> None:
        """Do as `save`, but in the background, with a deadline at the end of the job."""
        metrics = self.completed(metrics)
        if self._request.stage == "sync":
            self.save(step, state, metrics)
            return
        self.rest()  # the time that is left is counted from here
        before = self._flight
        if self.saved_step != step:
            left_s = self._schedule.left_s
            deadline_s = min(self._request.deadline_s, left_s if left_s > 0 else math.inf)
            request = replace(self._request, stage="eager", busy="wait", deadline_s=deadline_s)
            self._start(step, state, metrics, request)
        self.wait()
        self._tell(before)

    def _save_here(self, step: int, state: State, metrics: Metrics, ledger: Ledger) -> None:
        """Save in this thread; when it is durable, raise what the save before failed with."""
        self.save_with(self._ranks, step, state, metrics, ledger)
        self.wait()

    def save_with(
        self,
        ranks: "Group",
        step: int,
        state: State,
        metrics: Metrics,
        ledger: Ledger | None = None,
    ) -> None:
        """Save in this thread, with these ranks."""
        counts = ledger or Ledger(time.perf_counter())
        epoch, skipped = self._epoch, self._skipped
        self._replace_damaged(step, ranks)
        self._schedule.try_save()
        started = time.perf_counter()
        counts.tell = events = self._events(step)
        self._progress.save = step, counts
        request = self._for(step, metrics, self._request)
        with self._noting(step, events):
            records = self._in_room(ranks, lambda: save_now(state, request, ranks, counts))
        counts.state = "committed"
        taken_s = time.perf_counter() - started
        self._schedule.measure(taken_s)
        if epoch is self._epoch:  # else its caller went on without it, and may have restored
            self.saved_step = step
        self._skipped = 0
        self._progress.committed(step, taken_s, taken_s)
        held_s = taken_s + self._conclude(step, records, metrics, skipped, events, holds=True)
        if self._request.stage == "sync":  # others say nothing about those that `begin` makes
            self._schedule.begin_flight()
            self._schedule.end_flight(taken_s, held_s)

    def wait(self) -> None:
        """Wait for the save in flight, and for what follows it; raise what it failed with."""
        if self._flight is not None:
            self._flight.handle.wait_done()
        self.settle()
        before, self._flight = self._flight, None
        self._tell(before)

    def rest(self) -> float:
        """Wait for the save in flight, on all ranks, before they go on together.

        Returns:
            How long this rank has waited for the others, in seconds.
        """
        self._epoch = object()
        with Phase(self._ranks) as rested:
            if self._flight is not None:
                self._flight.handle.wait_done()
            self.settle()
            rested.answer = str(self.saved_step).encode()
        if len(set(rested.answers)) > 1:
            self.saved_step = None  # on some rank, it seems to have failed
        return rested.waited_s

    def settle(self) -> None:
        """Take note of how the save in flight has ended, if it has."""
        flight = self._flight
        if flight is None or flight.is_settled or not flight.handle.done():
            return
        if flight.handle.failure is not None and self.saved_step == flight.step:
            self.saved_step = None
        stall_s = flight.handle.ledger.stall_s
        duration_s = flight.took_s[0] if flight.took_s else None
        self._schedule.end_flight(duration_s, stall_s, stall_s - flight.call_stall_s)
        flight.is_settled = True  # last: an interrupt may come anywhere

    def completed(self, metrics: Metrics) -> dict[str, float]:
        """Give metrics that the policy looks at and that are not known: a save may not wait."""
        return dict.fromkeys(self._run.keep.metrics, math.nan) | dict(metrics or {})

    def _start(self, step: int, state: State, metrics: Metrics, request: SaveRequest) -> bool:
        took_s: list[float] = []
        events, skipped = self._events(step), self._skipped

        def after(records: Records) -> None:
            took_s.extend(record["seconds"]["total"] for record in records[:1])
            self._conclude(step, records, metrics, skipped, events)

        def begun(handle: SaveHandle) -> None:
            # No later: a body that its caller has left could meet the next one here.
            self.settle()
            self._flight = _Flight(step, handle, handle.ledger.stall_s, took_s)
            self._progress.save = step, handle.ledger
            handle.when_ended(lambda: self._note_end(handle, step, events))
            self.saved_step, self._skipped = step, 0
            self._schedule.begin_flight()

        self._replace_damaged(step, self._ranks)
        self._schedule.try_save()
        request = replace(self._for(step, metrics, request), tell=events)
        start: Callable[[], SaveHandle] = lambda: start_save(  # noqa: E731
            state, request, self._ranks, after, begun
        )
        with self._noting(step, events):
            return not self._in_room(self._ranks, start).skipped

    def _events(self, step: int) -> SaveEvents | None:
        return SaveEvents(self._observers, step) if self._observers else None

    @contextlib.contextmanager
    def _noting(self, step: int, events: SaveEvents | None) -> Iterator[None]:
        """Tell of a failure before the save is in flight; a flight tells of its own."""
        try:
            yield
        except Exception as error:
            self._note_failure(step, error, events)
            raise

    def _note_end(self, handle: SaveHandle, step: int, events: SaveEvents | None) -> None:
        if handle.failure is not None:
            self._note_failure(step, handle.failure, events)
        else:
            took_s = time.perf_counter() - handle.ledger.started
            self._progress.committed(step, took_s, handle.ledger.stall_s)

    def _note_failure(self, step: int, error: BaseException, events: SaveEvents | None) -> None:
        self._progress.failed(step, error)
        note_failure(self._run, self._ranks, step, error)
        if self._progress.save is not None and self._progress.save[0] == step:
            self._progress.save[1].state = "failed"
        if events is not None:
            events.failed(error)

    def _in_room(self, ranks: "Group", save: Callable[[], Made]) -> Made:
        """Save; where there is no room, let go of what the policy does, and try once more."""
        with self._advising():
            try:
                return save()
            except NoRoomError:
                with Phase(ranks) as made:
                    if ranks.rank == COORDINATOR:
                        saved = () if self.saved_step is None else (self.saved_step,)
                        made.answer = str(self._run.make_room(saved)).encode()
                if made.answers[COORDINATOR] == b"0":
                    raise
                return save()

    def _for(self, step: int, metrics: Metrics, request: SaveRequest) -> SaveRequest:
        def find_room() -> int | None:
            # Where all ranks learn of an error: of their metrics, only the coordinator's count.
            if lacking := self._run.keep.metrics - set(metrics or ()):
                raise OptionError(
                    f"{self._run.keep} needs the metric {', '.join(sorted(lacking))}; found "
                    f"{', '.join(sorted(metrics or ())) or 'none'}. Give its value, or NaN"
                )
            spare = self._run.free_bytes()
            self._run.fence.hold()
            if self._tiers is not None:
                self._tiers.check(step)
                spare = spare if self._tiers.has_one_disk() else None
            return spare

        path, check = self._run.path(step), self._run.fence.hold
        request = replace(request, path=path, step=step, metrics=metrics, check_last=check)
        request = replace(request, free_bytes=find_room)
        return request if self._tiers is None else self._tiers.shared(request)

    def _conclude(
        self,
        step: int,
        records: Records,
        metrics: Metrics,
        skipped: int,
        events: SaveEvents | None,
        *,
        holds: bool = False,
    ) -> float:
        """Do what follows a commit; of all ranks the coordinator has the records.

        Args:
            skipped: how many saves were skipped since the one before this.
            holds: training is held up by it.

        Returns:
            How long it took, in seconds.
        """
        if events is not None:
            events.committed(metrics or {}, records)
        if not records:
            return 0.0
        started = time.perf_counter()
        if self._tiers is not None and self._tiers.uploader is not None:
            self._tiers.uploader.saved()
        self._run.tidy(step)
        taken_s = time.perf_counter() - started
        record = records[COORDINATOR]
        record["seconds"]["retire"] = round(taken_s, 6)
        record["stall_s"] = round(record["stall_s"] + taken_s * holds, 6)
        committed = max((span[2] for span in record["spans"]), default=0.0)
        record["spans"].append(["retire", committed, round(committed + taken_s, 6), 0])
        rows = [record | {"skipped": skipped} for record in records]
        self._run.metrics.add("save", step, rows)
        self._hook.tell(self._run.path(step), step, metrics)
        return time.perf_counter() - started

    def _replace_damaged(self, step: int, ranks: "Group") -> None:
        """Retire a step that could not be restored, so that it can be saved again."""
        if step not in self._run.damaged:
            return
        with Phase(ranks):
            if ranks.rank == COORDINATOR:
                logger.warning("replacing step %d, which could not be restored", step)
                retire = self._run.retire if self._tiers is None else self._tiers.retire_damaged
                with self._advising():
                    retire(step)
        if self._tiers is not None:
            self._tiers.retire_elsewhere([step], ranks)
        self._run.damaged.discard(step)

    @contextlib.contextmanager
    def _advising(self) -> Iterator[None]:
        """Say in an error what a run can do about it."""
        try:
            yield
        except AlreadyCommittedError as error:
            self._run.fence.hold()  # when it was another job's save, that says more
            if self._tiers is not None:
                self._tiers.check_ours()
            raise AlreadyCommittedError(
                f"{error}. To train on from an earlier step, call retire_after(step) first. If "
                "another job has saved it since this one restored, end one of them"
            ) from error
        except NoSpaceError as error:
            told = NoSpaceError(f"{error.args[0]}. {self._advice()}")
            told.errno = error.errno
            raise told from error

    def _advice(self) -> str:
        try:
            return self._run.advice()
        except StoreError as error:
            return f"The size of the steps there cannot be read: {error}"

    def _tell(self, flight: _Flight | None) -> None:
        failure = flight.handle.failure if flight is not None else None
        if flight is not None and failure is not None:
            failure.add_note(f"This is the error of the background save of step {flight.step}.")
            if isinstance(failure, NoSpaceError):
                failure.add_note(self._run.room_advice())
            raise failure
