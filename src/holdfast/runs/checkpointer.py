"""A run of checkpoints: save when due, keep what the policy keeps, restore the newest good one."""

import logging
import os
import secrets
import signal
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .. import worker
from ..arguments import checked_step
from ..errors import OptionError
from ..group.base import COORDINATOR
from ..group.phase import Poll, find_group
from ..loading.report import LoadReport
from ..options import Options, options_of
from ..saving.request import SaveRequest
from .commit_hook import CommitHook, OnCommit
from .directory import Run
from .emergency import LastState
from .events import Observer
from .leaving import Leaving, drop
from .observers import Observers
from .places import DRAIN_S, LocalDisk, places_of
from .progress_file import ProgressFile
from .retention import Keep
from .saver import Saver
from .schedule import Every, Schedule
from .settings import (
    Alike,
    check_found,
    check_process,
    check_run,
    check_tier,
    warn_of_intervals,
)
from .signals import SignalWatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..codecs.base import Codec
    from ..group.base import Group

logger = logging.getLogger("holdfast")


class Checkpointer(Leaving):
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

    With ``local``, a save is durable on a local disk first, and is uploaded in the background
    (docs/howto/tiers.md). `step` never waits for an upload. `save`, `wait` and the last save do,
    with ``durable="store"``.

    Args:
        root: directory of the run, or a URL.
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
            while the save's thread waits up to 60 s. Its errors are logged, and fail no save. While
            a background save waits for it, it may not call this Checkpointer.
        observe: functions that are called with each `holdfast.Event` of this rank, each in a thread
            of its own. They never fail or delay a save; one that is too slow loses events.
        local: directory on a disk of this host, or on one that hosts share; ``root`` is the store
            behind it.
        durable: "store", or "local": `save`, `wait` and ``on_commit`` then count a step as durable
            when the local disk has it. That disk dies with its host.
        drain_s: seconds that `close` waits for uploads; it raises if any is left then.
        upload_bytes_s: bytes a second that uploads take at most; None: as many as they can.
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
        observe: Iterable[Observer] = (),
        local: "str | os.PathLike[str] | None" = None,
        durable: Literal["store", "local"] = "store",
        drain_s: float = DRAIN_S,
        upload_bytes_s: float | None = None,
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
        disk = LocalDisk(local, durable, drain_s, upload_bytes_s)
        store = Run(root, keep or Keep.all(), disk.limit_s(deadline_s))
        disk.check(store, codec)
        self._drain_s = drain_s
        self._schedule = Schedule(every, overhead=overhead, mtbf_s=mtbf_s, ends_in_s=ends_in_s)
        warn_of_intervals(store.keep, every, self._ranks)
        self._connect(store, disk, request, CommitHook(on_commit), observe)
        self._signals = SignalWatch(signals)
        self._last = LastState() if emergency else None
        asks = self._signals.wanted or self._schedule.by_clock or emergency
        self._poll = Poll(self._ranks) if asks else None
        alike: dict[str, object] = {
            "signals": self._signals.wanted,
            "ends_in_s": ends_in_s,
            "emergency": emergency,
        }
        alike |= {"local": local and self._disk.root, "durable": durable == "store"}
        self._alike = Alike(self._ranks, self._run, request, every=every, given=alike)
        self._token = secrets.randbits(62) + 1  # the coordinator's names where the ranks meet
        self._meeting = 0
        self._report: LoadReport | None = None
        self._stopping = self._closed = False
        self._process = os.getpid()
        # One that is dropped without `close` must not go on catching signals and holding a state.
        self._release = weakref.finalize(self, drop, self._signals, self._last, *self._beside)
        self._release.atexit = False

    def _connect(
        self,
        store: Run,
        disk: LocalDisk,
        request: SaveRequest,
        hook: CommitHook,
        observe: Iterable[Observer],
    ) -> None:
        """Make what the saves of this run go through."""
        self._hook, self._observers = hook, Observers(observe, store.root, self._ranks)
        if self._observers:
            store.on_retired = partial(self._observers.tell, "retired")
        uploads = self._schedule.uploads
        uploads.limit_s = disk.upload_limit_s(request.deadline_s)
        given = (disk, self._ranks, self._options, request.codec, hook, self._observers.tell)
        places = places_of(store, *given, uploads)
        self._run, self._disk, self._tiers = places.run, places.disk, places.tiers
        self._progress = ProgressFile(self._disk.root, self._ranks, self._schedule)
        self._beside = (self._observers, self._progress, *places.beside)
        self._saver = Saver(
            *(self._disk, self._ranks, self._schedule, request, places.hook),
            *(self._observers, self._progress, places.tiers),
        )

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
            self._deliver()

    def close(self) -> None:
        """Wait for the save in flight, and release the signals. A second call does nothing.

        Raises:
            HoldfastError: the save failed.
        """
        if not self._closed:
            self._hook.check_call(self.root, self._ranks)
        try:
            if not self._closed:
                worker.run(self._finish)
        except KeyboardInterrupt:
            if self._uploading is not None:
                self._uploading.say_left()
            raise
        except Exception as error:
            if self._signals.asked:  # which may end the process before anyone sees the error
                logger.error("%s", error)
            self._end()
            self._deliver()
            raise
        finally:
            self._end()  # again, if two interrupts came in it before
        self._deliver()

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
        step = self._progress.step = self._usable(step)
        self._meet("step", step)
        if not self._progress.has_begun:
            worker.run(self._progress.begin)
        self._signals.pass_on_served()
        self._signals.watch()
        if self._ranks.rank == COORDINATOR and not self._disk.fence.has_entered:
            worker.run(self._disk.fence.enter)
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
        if not self._progress.has_begun:
            worker.run(self._progress.begin)
        self._then_up(lambda: self._saver.save(step, state, metrics), step=step)

    def wait(self, tier: Literal["store", "local"] | None = None) -> None:
        """Wait until the last save is durable, and the retention policy has been applied.

        Args:
            tier: "local": on the local disk; "store": in the store; default: as ``durable`` says.
                Without a local disk, they are the same.

        Raises:
            OptionError: an invalid tier.
            HoldfastError: the save failed; or it is not in the store within ``deadline_s``.
        """
        check_process(self.root, self._process)
        self._hook.check_call(self.root, self._ranks)
        check_tier(tier)
        self._then_up(self._saver.wait, tier)

    def _then_up(
        self, verb: Callable[[], object], tier: str | None = None, step: int | None = None
    ) -> None:
        """Call a verb; wait until a step is in the store, where that is asked for.

        Args:
            step: which another thread may save after; None: the one that was saved last.
        """
        tiers = self._tiers
        if tiers is None or (tier or tiers.durable) != "store":
            worker.run(verb)
            return

        def both() -> None:
            if not tiers.is_ready and self._saver.saved_step is not None:
                tiers.begin()  # a step that was restored may be on the local disk alone
            name = tiers.name_wait()
            with tiers.awaiting(step):
                verb()
                limit_s = min(self._deadline_s, self._schedule.left_s)
                tiers.wait(step, lambda: self._saver.saved_step, limit_s, name)

        worker.run(both)

    def _meet(self, verb: str, step: int) -> None:
        if not self._alike.has_met:
            worker.run(lambda: self._alike.check(verb, step=step))
        if self._tiers is not None and not self._tiers.is_ready:
            worker.run(self._tiers.begin)

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
                self._then_up(lambda: self._saver.save_last(step, state, metrics))
        finally:
            self._stopping = True

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
        self._hook.check_call(self.root, self._ranks)
