"""A line in metrics.jsonl for a save that failed: it is there when the job has gone."""

from typing import TYPE_CHECKING

from ..brief import shortened
from ..engine.ledger import HOST
from ..errors import FencedError
from ..format.measured import ERROR_MAX, FAILURE
from ..group.base import COORDINATOR
from .directory import Run

if TYPE_CHECKING:
    from ..group.base import Group


def note_failure(run: Run, ranks: "Group", step: int, error: BaseException) -> None:
    """Add the line, on the coordinator.

    Not to an object store: it may be what failed, and an append to it may take minutes. And not to
    the run of another job, which has fenced this one off.
    """
    if ranks.rank != COORDINATOR or "://" in run.root or isinstance(error, FencedError):
        return
    text = shortened(f"{type(error).__name__}: {error}", ERROR_MAX)
    run.metrics.add(FAILURE, step, [{"rank": ranks.rank, "host": HOST, "error": text}])
