"""Runs that several ranks need → each read by one of them, sent to the others, placed by all.

Every rank goes through what it shares in the same order, so the first run that has not come
everywhere can always be read, sent and received: nobody waits in a circle. Whatever happens to a
rank, it sends and receives to the end, if only bytes that nobody will believe: so nobody waits for
ever. Bytes that come from another rank are checked as those of the disk are.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ..errors import CorruptError
from ..group.base import SendingGroup
from ..plan.reads import ReadRun
from ..plan.share_plan import SharedRun, read_here
from .pool import Lease
from .read import DataFileReader

Place = Callable[[ReadRun, int], None]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Exchange:
    """What this rank shares with others.

    Attributes:
        runs: in an order that is the same for any two ranks that have some in common.
    """

    ranks: SendingGroup
    runs: tuple[SharedRun, ...]

    @property
    def read_here(self) -> tuple[ReadRun, ...]:
        """Those of the runs that this rank reads."""
        return read_here(self.runs, self.ranks.rank)

    def run(
        self, reader: DataFileReader, lease: Lease, place: Place
    ) -> tuple[int, CorruptError | None]:
        """Read this rank's part and send it, receive the others', place all.

        Args:
            place: checks a run in its slot, and places it.

        Returns:
            (bytes sent, what is wrong with bytes that came). The latter is for this rank to raise
            when no other has failed: one that could not read has sent what it had.
        """
        walk = _Walk(self, reader, lease, place)
        try:
            for shared in self.runs:
                walk.step(shared)
        finally:
            walk.drop()
        return walk.close()


class _Walk:
    """Half of the pool's slots are read into, half received into."""

    def __init__(
        self, exchange: Exchange, reader: DataFileReader, lease: Lease, place: Place
    ) -> None:
        ranks, runs = exchange.ranks, exchange.runs
        half = lease.pool.slots // 2
        mine = read_here(runs, ranks.rank)
        self._lease, self._ranks, self._place = lease, ranks, place
        self._stream = reader.stream(mine, range(half), in_order=True)
        self._free = deque(range(half, lease.pool.slots))
        self._coming = iter([shared for shared in runs if shared.reader != ranks.rank])
        self._posted: deque[tuple[int, Callable[[], None] | None]] = deque()
        self._sent_bytes = 0
        self._failure: BaseException | None = None
        self._damage: CorruptError | None = None

    def step(self, shared: SharedRun) -> None:
        """Do this rank's part in one run."""
        while self._free and (following := next(self._coming, None)) is not None:
            slot = self._free.popleft()
            data = self._bytes(following.run, slot)
            receive = partial(self._ranks.start_receive, data, following.reader)
            self._posted.append((slot, self._always(receive)))
        if shared.reader == self._ranks.rank:
            self._give(shared)
        else:
            self._take(shared)

    def drop(self) -> None:
        """Receive nothing more, if that was interrupted: the slots will be another's."""
        self._posted.clear()

    def close(self) -> tuple[int, CorruptError | None]:
        """Return what `Exchange.run` does, or raise what this rank met first."""
        if self._failure is not None:
            raise self._failure
        return self._sent_bytes, self._damage

    def _give(self, shared: SharedRun) -> None:
        found = self._unless_failed(lambda: next(self._stream))
        slot = 0 if found is None else found[1]
        data = self._bytes(shared.run, slot)
        others = [rank for rank in shared.audience if rank != self._ranks.rank]
        waits = [self._always(partial(self._ranks.start_send, data, rank)) for rank in others]
        self._unless_failed(lambda: self._place(shared.run, slot))
        for wait in waits:
            self._always(wait)
        self._sent_bytes += len(data) * len(others)

    def _take(self, shared: SharedRun) -> None:
        slot, wait = self._posted.popleft()
        self._always(wait)
        if self._damage is None:
            self._unless_failed(lambda: self._place_received(shared, slot))
        self._free.append(slot)

    def _place_received(self, shared: SharedRun, slot: int) -> None:
        try:
            self._place(shared.run, slot)
        except CorruptError as error:
            self._damage = type(error)(
                f"what rank {shared.reader} read and sent came here damaged, though it was whole "
                f"there: {error}"
            )

    def _bytes(self, run: ReadRun, slot: int) -> memoryview:
        return memoryview(self._lease.pool.view(slot))[: run.extent.size_bytes]

    def _unless_failed(self, call: Callable[[], Made]) -> Made | None:
        return self._always(call) if self._failure is None else None

    def _always(self, call: Callable[[], Made] | None) -> Made | None:
        """Call, if there is anything to; keep the first failure for the end."""
        if call is None:
            return None
        try:
            return call()
        except BaseException as error:
            self._failure = self._failure or error
            return None
