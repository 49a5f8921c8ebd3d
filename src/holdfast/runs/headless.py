"""Local steps of which the hosts that are here have data files, and none of them MANIFEST.

That is on the host of rank 0, which may be away. Or the step is of a save that died: nothing here
tells the two apart.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..format.local_mark import LocalMark
from ..format.names import named, step_of
from .directory import Run

logger = logging.getLogger("holdfast")


def headless(local: Run, mark: LocalMark) -> list[int]:
    """Return the steps of a local disk that have no MANIFEST, where another host has rank 0."""
    names = local.uncommitted() if mark.lacks_manifests else []
    return [step for name in names if (step := step_of(name)) is not None]


def leads(mark: LocalMark) -> bool:
    """Return whether a disk was that of rank 0 in the last job that it knows of."""
    return bool(mark.store) and not mark.lacks_manifests


class Headless:
    """Says which of these steps may be whole; once, as long as they are the same."""

    def __init__(self) -> None:
        self._said: Sequence[int] = ()

    def say(self, where: str, steps: Sequence[int]) -> None:
        """Log the steps of a local directory."""
        if steps and steps != self._said:
            logger.error(
                "%s in %s: left out, since no host that is here has MANIFEST. If these steps "
                "were saved whole, the host of rank 0 of the last job has it. To keep them, start "
                "with that host: the next save without it deletes their files",
                *(named(steps), where),
            )
        self._said = steps


def newest_headless(
    replies: Sequence[Mapping[str, Any]], found: Collection[int], job: str | None
) -> list[int]:
    """Return those steps that are newer than all that were found, if the host of rank 0 is away.

    Args:
        replies: of each rank; that of a lead says what the functions above return, and the jobs
            that its disk names. A disk that was rank 0's in the same job names all jobs that a
            disk beside it names.
        job: that has the store; what a disk has that does not name it is of another past.
    """
    heads = [{*reply["jobs"]} for reply in replies if reply.get("leads")]
    steps = set[int]()
    for reply in replies:
        jobs = {*reply.get("jobs", ())}
        is_past = job is not None and job not in jobs
        if not (is_past or any(jobs <= head for head in heads)):
            steps.update(reply.get("headless", ()))
    newest = max(found, default=-1)
    return sorted(step for step in steps if step > newest)
