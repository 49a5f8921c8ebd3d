"""Back to a step of a run: restore it, or delete what came after. All ranks call it together."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .. import worker
from ..arguments import checked_step, plain_number
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..loading.report import LoadReport
from ..loading.request import LoadRequest
from ..loading.selection import selection_of
from ..options import Options
from ..plan.choice import Patterns
from ..plan.rename import Rename
from .emergency import LastState
from .observers import Observers
from .restore import check_into, restore_newest, restore_step
from .saver import Saver
from .settings import Alike
from .view import RunView

if TYPE_CHECKING:
    from ..group.base import Group
    from .tiers import TieredRun


class Rewind(RunView, ABC):
    """See `holdfast.Checkpointer`."""

    _ranks: "Group"
    _options: Options
    _saver: Saver
    _observers: Observers
    _alike: Alike
    _last: LastState | None
    _report: LoadReport | None
    _tiers: "TieredRun | None"

    @abstractmethod
    def _check_open(self) -> None:
        """Raise when this object can no longer be used."""

    @property
    def report(self) -> LoadReport | None:
        """What the last `restore` on this rank has loaded and left out; None: there was none."""
        return self._report

    def restore(
        self,
        into: Mapping[Any, Any] | None = None,
        *,
        step: int | None = None,
        partial: bool = False,
        strict: bool = True,
        cast: bool = False,
        types: Iterable[type] = (),
        include: Patterns = (),
        exclude: Patterns = (),
        rename: Rename | None = None,
    ) -> int | None:
        """Fill a state from the newest good step, or a given one; return that step.

        A damaged step is logged as an error and skipped; it is replaced when the run reaches it
        again. All ranks restore the same step. Stray files in a step are ignored, unlike by
        `holdfast.load`. If another process deletes the newest step meanwhile, the step that is then
        the newest is restored.

        Args:
            into, strict, cast, types, include, exclude, rename: as for `holdfast.load`; `report`
                then has its report. With ``strict=False``, a step that a repair left incomplete
                counts as good.
            step: restore this step. Later steps stay; to train on from it, call `retire_after`.
            partial: as for `holdfast.load`: the weights alone, for an evaluator beside training.
                Nothing is written to the run then.

        Returns:
            The step, or None if the run has no checkpoint yet.

        Raises:
            CorruptError: all checkpoints are damaged.
            NotCommittedError: the given step is missing, or was deleted while it was read; or
                the newest step was, ten times.
            MismatchError: the state does not fit, or the ranks found different checkpoints.
        """
        self._check_open()
        if self._last is not None:
            self._last.forget()  # from here on the state is of no step, until it is of another
        types = tuple(types) if isinstance(types, Iterable) else types  # for each step anew
        selection = selection_of(include, exclude, rename)
        request = LoadRequest(strict, partial, cast, types, selection)
        return worker.run(lambda: self._restore(into, plain_number(step), request))

    def _restore(
        self, into: Mapping[Any, Any] | None, step: int | None, request: LoadRequest
    ) -> int | None:
        partial, self._report = request.partial, None
        self._alike.check("restore", step=step, **request.arguments())
        self._saver.rest()
        self._saver.saved_step = None
        if self._tiers is not None and not partial:
            self._tiers.leave()
        with Phase(self._ranks):
            check_into(into)
            if not partial and self._ranks.rank == COORDINATOR:
                self._run.look()
        if self._tiers is not None and not partial:
            self._tiers.look_beside()
        assert into is not None, "check_into has refused it"
        given = (into, self._ranks, request, self._options)
        if step is not None:
            self._report = restore_step(self._run, step, *given)
        elif (found := restore_newest(self._run, *given)) is not None:
            step, self._report = found
        self._saver.saved_step = None if partial else step
        if self._observers and step is not None and self._report is not None:
            seconds = MappingProxyType({"total": self._report.seconds})
            self._observers.tell("restored", step, bytes=self._report.bytes_read, seconds=seconds)
        return step

    def retire_after(self, step: int) -> list[int]:
        """Delete all steps after ``step``, to train on from there; return them.

        Raises:
            OptionError: ``step`` is not an integer from 0 (-1: delete all).
            FencedError: another job writes to this run.
        """
        self._check_open()
        step = checked_step(step, least=-1)
        return worker.run(lambda: self._retire_after(step))

    def _retire_after(self, step: int) -> list[int]:
        self._alike.check("retire_after", step=step)
        self._saver.rest()
        if self._tiers is not None and not self._tiers.is_ready:
            self._tiers.begin()
        if self._tiers is not None:
            self._tiers.check_seen()
        with Phase(self._ranks):
            if self._ranks.rank == COORDINATOR:
                self._disk.fence.hold()  # from here on an older job adds no step
        later = [s for s in self._run.found(self._ranks) if s > step]
        if self._tiers is not None:
            self._tiers.check_seen()  # it may have gone away since
        if self._saver.saved_step in later:
            self._saver.saved_step = None
        with Phase(self._ranks):
            for s in reversed(later if self._ranks.rank == COORDINATOR else []):
                self._run.retire(s)
        if self._tiers is not None:
            self._tiers.retire_elsewhere(later, self._ranks)
        return later
