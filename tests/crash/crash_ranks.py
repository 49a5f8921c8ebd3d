"""Several ranks in one process: threads that take turns, so that every run makes the same log.

One rank runs at a time, until it waits for the others or is done. Knows the `Group` protocol only.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.errors import PeerError

TURN_TIMEOUT_S = 60.0  # longer than any save of a test; a rank that waits longer is stuck


@dataclass(slots=True)
class _Table:
    """Where the ranks meet: whose turn it is, and what each has laid down at each meeting."""

    order: list[int]  # ranks still running; the first has the turn
    changed: threading.Condition = field(default_factory=threading.Condition)
    meetings: list[dict[int, bytes]] = field(default_factory=list)

    def await_turn(self, rank: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.order[0] == rank, TURN_TIMEOUT_S):
                raise AssertionError(f"rank {rank} never got its turn")

    def pass_turn(self, rank: int, *, leaves: bool) -> None:
        with self.changed:
            assert self.order.pop(0) == rank, "only the rank whose turn it is passes it on"
            if not leaves:
                self.order.append(rank)
            self.changed.notify_all()


class ThreadGroup:
    """See `holdfast.group.base.Group`."""

    def __init__(self, table: _Table, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._table, self._meeting = table, 0

    def all_gather(self, data: bytes) -> list[bytes]:
        """Lay the bytes down, let all others do so, then take all of them."""
        meetings, number = self._table.meetings, self._meeting
        self._meeting += 1
        if number == len(meetings):
            meetings.append({})
        meetings[number][self.rank] = data
        self._table.pass_turn(self.rank, leaves=False)
        self._table.await_turn(self.rank)
        if len(meetings[number]) < self.world_size:
            raise PeerError("another rank is gone", rank=-1, cause="it returned")
        return [meetings[number][rank] for rank in range(self.world_size)]

    def gather(self, data: bytes) -> list[bytes] | None:
        """Do as `all_gather`; only the coordinator takes."""
        found = self.all_gather(data)
        return found if self.rank == 0 else None

    def announce(self, data: bytes) -> bytes:
        """Do as `all_gather`; take only what the coordinator put down."""
        return self.all_gather(data)[0]


def run_ranks(
    function: Callable[[ThreadGroup], None], order: Sequence[int]
) -> list[BaseException | None]:
    """Run ``function`` on each rank, in turns that begin in ``order``; return their errors."""
    table, world_size = _Table(list(order)), len(order)
    errors: list[BaseException | None] = [AssertionError("the rank never ran")] * world_size

    def run(rank: int) -> None:
        table.await_turn(rank)
        errors[rank] = None
        try:
            function(ThreadGroup(table, rank, world_size))
        except BaseException as error:  # handed to the caller, who knows what to expect
            errors[rank] = error
        finally:
            table.pass_turn(rank, leaves=True)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
