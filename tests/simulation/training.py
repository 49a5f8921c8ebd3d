"""What a rank of a job does: restore, save step by step, wait, close; as users' programs do.

Promises to tell the oracle of what was acknowledged, and of waits that took too long. Goes on after
a save that failed, and ends where training would: out of contact, fenced, nothing to restore.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.chains.recompress import rebase
from holdfast.codecs import Delta
from holdfast.errors import (
    AlreadyCommittedError,
    FencedError,
    HoldfastError,
    PeerError,
    ReplacedError,
)
from holdfast.format.names import step_name
from holdfast.group.base import Group
from holdfast.runs.directory import Run
from holdfast.saving.handle import OUTCOME_GRACE_S, SaveHandle

from .actors import Process
from .oracle import Oracle

LATE_S = OUTCOME_GRACE_S + 1.0  # past the deadline, by when every rank has been told


@dataclass(slots=True)
class Job:
    """What one job does, drawn in advance: all its ranks do the same."""

    number: int
    size: int
    kind: str  # "run", "plain" or "plain async"
    stage: str
    keep: int  # 0: all
    codec: str | Delta
    deadline_s: float
    acts: list[str]
    stride: int = 1  # of the steps that it saves plainly; more: no other job comes to these
    processes: list[Process] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether all its ranks have ended."""
        return all(process.dead for process in self.processes)


class Rank:
    """One rank, in its process."""

    close_s = 0.0  # how long the end of a run may take, after that of its save

    def __init__(self, oracle: Oracle, root: str, job: Job, process: Process, group: Group) -> None:
        self._oracle, self._root, self._job = oracle, root, job
        self._process, self._group = process, group
        self._into = {"value": 0}
        self._replaced = 0  # how often

    def run(self) -> None:
        """Be that rank, until it ends."""
        if self._job.kind == "run":
            self._train()
        else:
            self._save_plainly()

    def _train(self) -> None:
        job = self._job
        checkpointer = self._opened(Keep.latest(job.keep) if job.keep else Keep.all())
        step = self._restored(checkpointer)
        for act in job.acts:
            if act == "rebase":
                self._try(functools.partial(self._rebase, checkpointer, step))
            elif act == "skip":
                step += 1
            elif act == "go back":
                step = self._go_back(checkpointer, step)
            elif act == "replace":
                self._replace(step)
            else:
                step += 1
                self._save(checkpointer, act, step)
        if self._wait(checkpointer, checkpointer.close, self.close_s):
            self._closed()

    def _closed(self) -> None:
        """Take note that it has ended well."""

    def _opened(self, keep: Keep, **more: Any) -> Checkpointer:
        job = self._job
        return Checkpointer(
            self._root,
            every=1,
            keep=keep,
            codec=job.codec,
            stage=job.stage,  # type: ignore[arg-type]
            deadline_s=job.deadline_s,
            signals=(),
            group=self._group,
            **more,
        )

    def _restored(self, checkpointer: Checkpointer) -> int:
        step = checkpointer.restore(self._into) or 0
        self._process.forced |= checkpointer._run.damaged
        return step

    def _save(self, checkpointer: Checkpointer, act: str, step: int) -> None:
        state = {"value": self._job.number * 1000 + step}
        self._process.saving = step, state["value"]
        before = checkpointer._saver._flight
        save = checkpointer.save if act == "save" else checkpointer.step
        is_good = self._try(lambda: save(step, state), lambda: checkpointer._saver._flight, before)
        is_begun = checkpointer._saver._flight not in (None, before)
        if act == "step+wait":
            is_good = self._wait(checkpointer, checkpointer.wait) and (is_good or is_begun)
        if is_good and (self._job.stage == "sync" or act != "step"):
            self._acknowledge(act, step, state["value"])

    def _acknowledge(self, act: str, step: int, value: int) -> None:
        self._oracle.acknowledge(step, value)

    def _wait(
        self, checkpointer: Checkpointer, wait: Callable[[], None], more_s: float = 0.0
    ) -> bool:
        flight = checkpointer._saver._flight
        return self._try(wait) if flight is None else self._bounded(flight.handle, wait, more_s)

    def _bounded(self, handle: SaveHandle, wait: Callable[[], object], more_s: float = 0.0) -> bool:
        """Wait for a save; it may not take longer than its deadline, but for what follows it."""
        scheduler, frozen_s = self._oracle.scheduler, self._process.frozen_s
        began = scheduler.now
        is_good = self._try(wait, lambda: handle, None)
        until = max(began, handle.deadline) + LATE_S + more_s
        is_held = self._process.frozen_s == frozen_s and handle.ledger.state != "committed"
        if is_held and scheduler.now > until:
            late_s = scheduler.now - until
            self._oracle.fault(f"P4: {self._process.name} waited {late_s:.1f} s too long")
        return is_good

    def _try(
        self,
        call: Callable[[], object],
        flight: Callable[[], object] = lambda: None,
        before: object = None,
    ) -> bool:
        """Make a call; return whether it was good. Where training could not go on, neither does it.

        Args:
            flight, before: it is going on in the background when these differ.
        """
        try:
            call()
        except (AlreadyCommittedError, ReplacedError) as error:
            self._oracle.counts[f"refused by {type(error).__name__}"] += 1
            return False
        except HoldfastError as error:
            self._oracle.counts[f"failed by {type(error).__name__}"] += 1
            self._oracle.scheduler.note(f"{self._process.name}: {type(error).__name__}: {error}")
            is_lost = isinstance(error, PeerError) and error.rank < 0 and flight() is before
            if is_lost or isinstance(error, FencedError):
                raise
            return False
        return True

    def _rebase(self, checkpointer: Checkpointer, step: int) -> None:
        if self._job.size > 1:
            return
        checkpointer.wait()
        value = self._oracle.value_at(step)
        if value is not None:
            self._process.saving, self._process.is_plain = (step, value), True
            try:
                rebase(checkpointer.path(step))
                self._oracle.counts["rebased"] += 1
            finally:
                self._process.is_plain = False

    def _go_back(self, checkpointer: Checkpointer, step: int) -> int:
        found = checkpointer.steps() if self._job.size == 1 else []
        target = max((s for s in found if s < step), default=None)
        if target is None:
            return step
        checkpointer.restore(self._into, step=target)
        # Also those that others save meanwhile, without epochs.
        self._process.forced |= set(range(target + 1, found[-1] + 60))
        checkpointer.retire_after(target)
        self._oracle.counts["went back"] += 1
        return target

    def _save_plainly(self) -> None:
        job, process = self._job, self._process
        process.is_plain = True
        step, below = max(Run(self._root, Keep.all()).found(self._group), default=0), 0
        for act in job.acts:
            if act == "replace":
                self._replace(step)
                continue
            if act == "below":  # no other job comes there
                below, saved = below + 1, step - 1 - below
                self._oracle.counts["saved below"] += 1
            else:
                step, saved, below = step + job.stride, step + job.stride, 0
            process.saving = saved, job.number * 1000 + saved
            if self._try(lambda saved=saved: self._save_at(saved)):  # type: ignore[misc]
                self._oracle.acknowledge(*process.saving)

    def _replace(self, step: int) -> None:
        """Save a step again, in the place of what is there."""
        if not step:
            return
        job, process = self._job, self._process
        self._replaced += 1
        process.saving = step, 100_000 * self._replaced + job.number * 1000 + step
        if self._try(lambda: self._save_at(step, replace=True)):
            self._oracle.acknowledge(*process.saving)
            self._oracle.counts["replaced"] += 1

    def _save_at(self, step: int, *, replace: bool = False) -> None:
        job, path = self._job, f"{self._root}/{step_name(step)}"
        state = {"value": self._process.saving[1]}
        given: dict[str, Any] = {"step": step, "codec": job.codec, "group": self._group}
        given["replace"] = replace
        if job.kind != "plain async":
            self._process.in_call = replace
            try:
                holdfast.save(state, path, **given)
            finally:
                self._process.in_call = False
            return
        given["options"] = holdfast.Options(deadline_s=job.deadline_s)
        handle = holdfast.save_async(state, path, **given)
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                handle.result()
            except HoldfastError as error:
                failures.append(error)

        self._bounded(handle, wait)
        if failures:
            raise failures[0]
