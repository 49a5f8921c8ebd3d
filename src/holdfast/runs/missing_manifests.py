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


class MissingManifests:
    """Says which of these steps may be whole; once, as long as they are the same."""

    def __init__(self) -> None:
        self._said: list[int] = []

    @staticmethod
    def reply(local: Run, mark: LocalMark) -> dict[str, Any]:
        """Return what the lead of a host tells the others of its disk.

        ``without_manifest`` has the steps that lack MANIFEST where another host had rank 0 of the
        last job. ``leads``: this disk was that of rank 0.
        """
        names = local.uncommitted() if mark.lacks_manifests else []
        steps = [step for name in names if (step := step_of(name)) is not None]
        return {"without_manifest": steps, "leads": bool(mark.store) and not mark.lacks_manifests}

    def say(
        self,
        where: str,
        replies: Sequence[Mapping[str, Any]],
        found: Collection[int],
        job: str | None,
    ) -> None:
        """Log the steps that are newer than all that were found, if the host of rank 0 is away.

        Args:
            where: the local directory.
            replies: of each rank; that of a lead has what `reply` returns, and the jobs that its
                disk names. A disk that was rank 0's in the same job names all jobs that a disk
                beside it names.
            job: that has the store; what a disk has that does not name it is of another past.
        """
        newest, steps = max(found, default=-1), set[int]()
        of_rank_0 = [{*reply["jobs"]} for reply in replies if reply.get("leads")]
        for reply in replies:
            jobs = {*reply.get("jobs", ())}
            is_past = job is not None and job not in jobs
            if not (is_past or any(jobs <= others for others in of_rank_0)):
                steps.update(step for step in reply.get("without_manifest", ()) if step > newest)
        if steps and sorted(steps) != self._said:
            logger.error(
                "%s in %s: not restored. The hosts of this job have data files of these steps, but "
                "no MANIFEST. If the saves were complete, the host of rank 0 of the last job has "
                "it. To keep these steps, start the job with that host. The next save without it "
                "deletes their files",
                *(named(steps), where),
            )
        self._said = sorted(steps)
