"""A run of checkpoints: save when due, keep what the policy keeps, restore the newest good one."""

import contextlib
import logging
import os
import secrets
import signal
import time
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .. import worker
from ..errors import OptionError, PeerError, writable
from ..group.base import COORDINATOR
from ..group.phase import Poll, find_group
from ..loading.report import LoadReport
from ..options import Options, options_of
from ..saving.request import SaveRequest
from .commit_hook import CommitHook, OnCommit
from .directory import Run, checked_step
from .emergency import LastState, meet, release
from .retention import Keep
from .rewind import Rewind
from .saver import Saver
from .schedule import Every, Schedule
from .settings import Alike, check_found, check_process, check_run
from .signals import SignalWatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..codecs.base import Codec
    from ..group.base import Group

logger = logging.getLogger("holdfast")


class Checkpointer(Rewind):
    """Saves, keeps and restores the checkpoints of one run under ``root``.

    All ranks of the group create one with the same arguments, and call its methods together. Their
    first call compares the arguments.

    `step` returns once the state is copied to host memory; the copy is written while training goes
    on. With ``stage="lazy"`` it returns at once, and the next ``optimizer.step()`` waits for the
    copy. If a background save fails, the error is logged at once. The next saving `step`, `save`,
    `wait` or `close` raises it, once; that call's own save has already started. Older checkpoints
    stay whole, so you may catch the error and continue.

    On a signal, or shortly before ``ends_in_s``, `step` saves a last time on all ranks, waits until
    that save is durable, and sets ``stopping``.

    Args:
        root: directory of the run.
        every: `step` saves at multiples of this number of steps; or when a `datetime.timedelta` has
            passed since the last save began; or with "auto", as often as ``overhead`` allows,
            beginning with the first step. None: only `save` saves.
        keep: which checkpoints are kept after each save; default: all.
        stage, busy: as for `holdfast.save_async`. ``stage="sync"`` waits as `holdfast.save` does,
            and needs no memory for a copy.
        overhead: with "auto", the share of training time that saves may cost.
        mtbf_s: with "auto", the mean time between failures; "auto" then saves no more often than
            pays off.
        ends_in_s: seconds that the job has left; the last save starts early enough to finish.
        signals: signals that ask for a last save, watched from the first `step` on, in the main
            thread. A second one, more than two seconds later, is handled as before; so is the
            first, if `step` is called again after the last save.
        emergency: when an exception leaves the ``with`` block (a KeyboardInterrupt too), save the
            state of the last `step`. This needs that no torch optimizer has begun another step,
            that `restore` was not called since, and that all ranks fail alike. Other changes of the
            state after `step` (by `holdfast.load`, for example) are not noticed.
        deadline_s: seconds until a background save that is not durable fails; default: that of
            ``options``.
        on_commit: called on rank 0 as ``on_commit(path, step, metrics)`` when a step is durable,
            while the save's thread waits up to 60 s. Its errors are logged, and fail no save.
        codec, group, options: as for `holdfast.save`.

    Raises:
        OptionError: an invalid argument, or the ranks gave different ones.

    Example::

        with holdfast.Checkpointer("runs/a", every=500, keep=Keep.latest(3)) as checkpointer:
            start = checkpointer.restore(state) or 0
            for step in range(start + 1, steps + 1):
                train()
                checkpointer.step(step, state)
                if checkpointer.stopping:
                    break
            checkpointer.save(steps, state)  # the last step, if it was not due
            checkpointer.wait()
            print(checkpointer.steps(), checkpointer.path(checkpointer.latest()))
            print(checkpointer.metrics(checkpointer.latest()), checkpointer.best("loss"))
            checkpointer.retire_after(start)  # delete what came after it, to train again from there
        checkpointer.close()  # the end of the block has done it: does nothing
    """

    def __init__(
        self,
        root: "str | os.PathLike[str]",
        *,
        every: Every = None,
        keep: Keep | None = None,
        codec: "str | Codec" = "raw",
        stage: Literal["eager", "lazy", "sync"] = "eager",
        busy: Literal["wait", "skip"] = "wait",
        overhead: float = 0.03,
        mtbf_s: float | None = None,
        ends_in_s: float | None = None,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
        emergency: bool = False,
        deadline_s: float | None = None,
        on_commit: OnCommit | None = None,
        group: "ProcessGroup | Group | Literal['alone'] | None" = None,
        options: Options | None = None,
    ) -> None:
        """Prepare; nothing is written before the first step or save."""
        self._group, self._ranks = group, find_group(group)
        self._options = options_of(options)
        deadline_s = self._options.deadline_s if deadline_s is None else deadline_s
        self._deadline_s = deadline_s
        request = SaveRequest("", None, None, codec, self._options, stage, busy, deadline_s)
        check_run(request, keep, self._ranks, emergency=emergency)
        self._run = Run(root, keep or Keep.all())
        self._schedule = Schedule(every, overhead=overhead, mtbf_s=mtbf_s, ends_in_s=ends_in_s)
        hook = CommitHook(on_commit)
        self._saver = Saver(self._run, self._ranks, self._schedule, request, hook)
        self._signals = SignalWatch(signals)
        self._last = LastState() if emergency else None
        asks = self._signals.wanted or self._schedule.by_clock or emergency
        self._poll = Poll(self._ranks) if asks else None
        given = {"signals": self._signals.wanted, "ends_in_s": ends_in_s, "emergency": emergency}
        self._alike = Alike(self._ranks, self._run, request, every=every, given=given)
        self._token = secrets.randbits(62) + 1  # the coordinator's names where the ranks meet
        self._meeting = 0
        self._report: LoadReport | None = None
        self._stopping = self._closed = False
        self._process = os.getpid()
        # One that is dropped without `close` must not go on catching signals and holding a state.
        self._release = weakref.finalize(self, release, self._signals, self._last)
        self._release.atexit = False

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; if an exception leaves the block, further errors are only logged."""
        if error is None:
            self.close()
        elif not self._closed:
            try:
                worker.run(lambda: self._leave(error))
            finally:
                if self._signals.asked:  # it is passed on now, and may end the process
                    logger.error("a signal ends training, after this error", exc_info=error)
                self._end()

    def close(self) -> None:
        """Wait for the save in flight, and release the signals. A second call does nothing.

        Raises:
            HoldfastError: the save failed.
        """
        try:
            if not self._closed:
                worker.run(self._finish)
        finally:
            self._end()  # again, if two interrupts came in it before

    @property
    def stopping(self) -> bool:
        """True once the last save is durable on all ranks: training has to end."""
        return self._stopping

    def step(
        self, step: int, state: Mapping[Any, Any], *, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Start a save if one is due; return whether it was. Call it after each training step.

        It returns before the checkpoint is durable, except for the last save and with
        ``stage="sync"``. With ``busy="skip"``, no save starts while another is in flight.

        Args:
            step: number of the step.
            state: as for `holdfast.save`.
            metrics: numbers recorded in the checkpoint, for `Keep.best`; those of rank 0 count.

        Raises:
            HoldfastError: as `holdfast.save_async`; or the previous save failed. In the second case
                this call's save has already started. Older checkpoints are untouched.
        """
        step = self._usable(step)
        self._meet("step", step)
        self._signals.pass_on_served()
        self._signals.watch()
        if self._ranks.rank == COORDINATOR and not self._run.fence.has_entered:
            worker.run(self._run.fence.enter)
        if self._last is not None:
            self._last.take(step, state)
        self._schedule.begin_step()
        try:
            self._saver.settle()
            ends, due = self._agree(step)
            if ends:
                worker.run(lambda: self._save_last(step, state, metrics))
                return True
            return due and worker.run(lambda: self._saver.begin(step, state, metrics))
        finally:
            self._schedule.end_step()

    def save(
        self, step: int, state: Mapping[Any, Any], *, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Save this step now, after the save in flight; return when it is durable.

        The step that was saved or restored last is not saved again.

        Args:
            step, state, metrics: as for `step`.

        Raises:
            AlreadyCommittedError: the run holds this step already, from an earlier job.
            HoldfastError: as `holdfast.save`; or the previous save failed, and this one did not.
        """
        step = self._usable(step)
        self._meet("save", step)
        worker.run(lambda: self._saver.save(step, state, metrics))

    def wait(self) -> None:
        """Wait until the save in flight is durable, and the retention policy has been applied.

        Raises:
            HoldfastError: the save failed.
        """
        check_process(self.root, self._process)
        worker.run(self._saver.wait)

    def _meet(self, verb: str, step: int) -> None:
        if not self._alike.has_met:
            worker.run(lambda: self._alike.check(verb, step=step))

    def _agree(self, step: int) -> tuple[bool, bool]:
        """Return whether this is the last save, and whether one is due: the same on every rank."""
        due, here = self._schedule.due_at(step), self._ranks.rank == COORDINATOR
        if self._poll is None:
            return False, due
        signalled, ending, due_now, meeting = self._poll.turn(
            [
                int(self._signals.asked),
                int(here and not self._stopping and self._schedule.ending()),
                int(here and not due and self._schedule.due_now()),
                self._token if here else 0,
            ]
        )
        self._meeting = max(self._meeting, meeting)
        # What the clock asked for may have been saved meanwhile.
        due_now = due_now and self._saver.saved_step != step
        return bool(signalled or ending), bool(due or due_now)

    def _save_last(
        self, step: int, state: Mapping[Any, Any], metrics: Mapping[str, float] | None
    ) -> None:
        logger.info("saving step %d as the last: training has to end", step)
        try:
            with self._signals.serving():
                self._saver.save_last(step, state, metrics)
        finally:
            self._stopping = True

    def _leave(self, error: BaseException) -> None:
        """Wait, and save in an emergency, while an exception is under way."""
        reason = writable(f"{type(error).__name__}: {error}")
        logger.info("training ends with %s", reason)  # it is raised when the waiting is over
        try:
            self._saver.wait()
        except Exception as failure:  # whatever it is: the user's own comes first
            logger.error("the save in flight failed: %s", failure)
        if self._last is None or isinstance(error, GeneratorExit):
            return
        if self._last.step is not None and self._last.step == self._saver.saved_step:
            return
        try:
            step, state = meet(self._ranks, self._meeting, self._last)
            deadline = time.monotonic() + self._deadline_s
            ranks = self._ranks.background(f"emergency/{self._meeting}/save", deadline)
            self._saver.save_with(ranks, step, state, self._saver.completed(None))
            logger.warning("saved step %d in an emergency, after %s", step, reason)
        except Exception as failure:
            logger.error("no emergency save: %s: %s", type(failure).__name__, failure)

    def _finish(self) -> None:
        if self._poll is not None:
            with contextlib.suppress(PeerError):  # training's own collectives say it better
                self._poll.close()
        self._saver.wait()

    def _end(self) -> None:
        self._closed = True
        self._poll = None
        try:
            self._release()
        finally:
            release(self._signals, self._last)  # if an interrupt came before the end of it

    def _usable(self, step: int) -> int:
        """Check that this object can save this step; return its number."""
        self._check_open()
        if self._group is None:
            check_found(self.root, self._ranks)
        return checked_step(step)

    def _check_open(self) -> None:
        check_process(self.root, self._process)
        if self._closed:
            raise OptionError(f"the Checkpointer of {self.root} is closed; create a new one")
