"""What there is in a run: its steps, where they are, and their metrics.

Changes nothing; knows no other rank.
"""

import logging
from typing import TYPE_CHECKING

from ..engine.check import read_manifest
from ..engine.trust import check_of
from ..errors import CorruptError, NotCommittedError, OptionError, VersionError
from ..format.fields import comparable_metrics
from ..options import Options
from ..stores.url import open_store
from .directory import Run
from .retention import Keep

if TYPE_CHECKING:
    from .tiers import TieredRun

logger = logging.getLogger("holdfast")


class RunView:
    """The directory of a run, as one process sees it."""

    _run: "Run | TieredRun"
    _disk: "Run"  # what is saved to: of a run in two places, the local one
    _options: Options

    @property
    def root(self) -> str:
        """Directory of the run."""
        return self._run.root

    def steps(self) -> list[int]:
        """Return the committed steps, ascending, as this rank sees them.

        With ``local``, after `restore` or the first save: without what was left out, and with what
        the disks of other hosts had at the last `restore` or save.

        Raises:
            StoreError: the disk or the network failed.
        """
        return self._run.steps()

    def path(self, step: int) -> str:
        """Return the directory of ``step``, which need not exist.

        With ``local``, that on the local disk, if all files are there; else that in the store,
        which may not have it yet.

        Raises:
            OptionError: ``step`` is not an integer from 0.
        """
        return self._run.path(step)

    def latest(self) -> int | None:
        """Return the newest committed step, as `steps` lists them; None if there is none.

        Raises:
            StoreError: the disk or the network failed.
        """
        steps = self._run.steps()
        return steps[-1] if steps else None

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics that were given to the save of ``step``.

        Raises:
            OptionError: ``step`` is not an integer from 0.
            NotCommittedError: the run has no such step.
            CorruptError: its MANIFEST fails a check.
            VersionError: a newer holdfast wrote it.
        """
        store = open_store(self._run.manifest_path(step))
        manifest = read_manifest(store, check_of(self._options.trust))
        return comparable_metrics(manifest.table.header.metrics)

    def best(self, metric: str | None = None, *, mode: str | None = None) -> int | None:
        """Return the step with the best metric; None if no step has it.

        Of equal values the newer step is better. A step whose MANIFEST cannot be read is logged and
        left out.

        Args:
            metric: name of a metric that was given to `step` or `save`; default: that of the
                `Keep.best` of this Checkpointer.
            mode: "min" if smaller is better, "max" if larger is; default: that of `Keep.best`, else
                "min".

        Raises:
            OptionError: an invalid metric or mode, or none where no `Keep.best` names one.
            StoreError: the disk or the network failed.
        """
        bests = dict(self._run.keep.bests)
        if metric is None:
            if len(bests) != 1:
                found = f"{len(bests)} of them" if bests else "none"
                raise OptionError(
                    f'best() needs the name of a metric, such as best("loss"): the policy of this '
                    f"Checkpointer has {found}"
                )
            (metric,) = bests
        policy = Keep.best(metric, 1, mode=mode or bests.get(metric, "min"))
        values: dict[int, dict[str, float]] = {}
        for step in self._run.steps():
            try:
                values[step] = self.metrics(step)
            except NotCommittedError:  # it was deleted meanwhile
                continue
            except (CorruptError, VersionError) as error:
                logger.warning("best() leaves step %d out: %s", step, error)
        return max(policy.ruled([*values], values), default=None)
