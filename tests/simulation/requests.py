"""How many requests a job sends to a simulated store of objects, in which nothing goes wrong."""

import random
from collections import Counter
from collections.abc import Sequence

from .bucket import Bucket
from .bucket_worlds import BucketWorld
from .ranks import COLLECTIVE_S, RankGroup
from .seams import installed
from .training import Job

KINDS = {
    "PUT": ("put", "put small", "publish", "swap", "bar", "lock"),
    "GET": ("get",),
    "HEAD": ("head",),
    "LIST": ("list",),
    "DELETE": ("delete",),
}
KIND_OF = {operation: kind for kind, some in KINDS.items() for operation in some}


class CalmGroup(RankGroup):
    """Ranks of which none is ever lost: nobody looks for that, so a thousand of them can meet."""

    def _meet(self, data: bytes, wanted: Sequence[int]) -> list[bytes]:
        self._round += 1
        self._scheduler.step("meet", str(self._round))
        told = self._meeting.rounds.setdefault(self._round, {})
        told[self.rank] = data
        if len(told) == self.world_size or self.rank in wanted[:1]:
            self._scheduler.wake(self._meeting)
        needed = self.world_size if len(wanted) > 1 else 1
        found = lambda: len(told) >= needed and wanted[0] in told  # noqa: E731
        assert self._scheduler.wait(self._meeting, COLLECTIVE_S, found)
        return [told[rank] for rank in wanted]


class Counting(BucketWorld):
    """A world in which nothing goes wrong, and requests are counted between two marks."""

    group_kind = CalmGroup

    def __init__(self, jobs: list[Job]) -> None:
        super().__init__(1, Counter())
        self.rng = self.scheduler.rng = random.Random(5)
        self.scheduler.density = 0.0
        self.jobs, self._stops, self._late, self._is_about_a_request = jobs, [], "", False
        self.requests: Counter[str] = Counter()
        self.disk.trouble = self._count

    def _plan_upset(self, job: Job) -> None:
        pass

    def _count(self, operation: str, path: str) -> None:
        self.requests[KIND_OF[operation]] += 1


def counted(ranks: int, acts: list[str], keep: int, restores: bool = False) -> Counter[str]:
    """Return the requests of a job, or of a second one that finds what it has left."""
    job = Job(0, ranks, "run", "sync", keep, "raw", 1e7, acts)
    again = [Job(1, ranks, "run", "sync", keep, "raw", 1e7, [])] if restores else []
    with installed():
        world = Counting([job, *again])
        assert not world.play()
        assert isinstance(world.disk, Bucket)
    return world.requests
