"""Ranks that meet by way of the coordinator: what each gets, and what all hear of a lost one."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from holdfast.errors import PeerError
from holdfast.group.star import HEAD_BYTES, Star

LONG = bytes(range(256)) * 300  # many times a head
WAIT_S = 20.0


class Wires:
    """Messages between any two ranks, in order; a rank that is lost neither gives nor takes.

    As gloo's: a send ends when it is received.
    """

    def __init__(self, ranks: int, lost: int = -1) -> None:
        self.ranks, self.lost, self.sent = ranks, lost, 0
        self.rings: list[int] = []
        pairs = [(a, b) for a in range(ranks) for b in range(ranks)]
        self._wires = {pair: SimpleQueue[tuple[bytes, threading.Event]]() for pair in pairs}
        self._ringed: dict[int, bytes] = {}
        self._all_here = threading.Barrier(ranks)

    def star(self, rank: int) -> Star:
        """Make one rank's end."""

        def send(data: memoryview, other: int) -> Callable[[], None]:
            if self.lost in (rank, other):
                raise PeerError("connection closed", rank=-1, cause="closed")
            self.sent += 1
            taken = threading.Event()
            self._wires[rank, other].put((bytes(data), taken))

            def wait() -> None:
                if not taken.wait(WAIT_S):
                    raise PeerError("never received", rank=-1, cause="timeout")

            return wait

        def receive(data: memoryview, other: int) -> Callable[[], None]:
            def wait() -> None:
                if self.lost in (rank, other):
                    raise PeerError("connection closed", rank=-1, cause="closed")
                try:
                    data[:], taken = self._wires[other, rank].get(timeout=WAIT_S)
                    taken.set()
                except Empty as error:
                    raise PeerError("timed out", rank=-1, cause="timeout") from error

            return wait

        def ring(data: bytes, size_max: int) -> list[bytes]:
            assert len(data) <= size_max
            self.rings.append(size_max)
            self._ringed[rank] = data
            self._all_here.wait(WAIT_S)
            return [self._ringed[other] for other in range(self.ranks)]

        return Star(rank, self.ranks, send, receive, ring)


def on_all(wires: Wires, work: Callable[[Star, int], Any]) -> list[Any]:
    """Run ``work`` on every rank that is not lost; return what each gave or raised."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(wires.star(rank), rank)
        except PeerError as error:
            results[rank] = error

    here = [rank for rank in range(wires.ranks) if rank != wires.lost]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in here]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in here]


def test_every_rank_gets_the_bytes_of_all_by_two_messages_a_rank() -> None:
    wires = Wires(5)
    expected = [b"", b"1", b"22", b"333", b"4444"]
    assert on_all(wires, lambda star, rank: star.all_gather(expected[rank])) == [expected] * 5
    assert wires.sent == 2 * 4
    assert wires.rings == []


@pytest.mark.parametrize(
    "size", [HEAD_BYTES - 10, HEAD_BYTES - 9, HEAD_BYTES - 8, HEAD_BYTES, 9000]
)
@pytest.mark.parametrize("longest", [0, 2])
def test_what_is_too_long_for_a_message_goes_around_the_ring(size: int, longest: int) -> None:
    wires = Wires(3)
    expected = [bytes([rank]) * (size if rank == longest else 3) for rank in range(3)]
    assert on_all(wires, lambda star, rank: star.all_gather(expected[rank])) == [expected] * 3
    assert wires.rings == ([size] * 3 if size > HEAD_BYTES - 9 else [])


@pytest.mark.parametrize("size", [0, 1, HEAD_BYTES - 9, HEAD_BYTES - 8, len(LONG)])
def test_the_coordinator_alone_gets_what_is_gathered(size: int) -> None:
    expected = [LONG[: size * (rank != 1)] for rank in range(4)]
    found = on_all(Wires(4), lambda star, rank: star.gather(expected[rank]))
    assert found == [expected, None, None, None]


@pytest.mark.parametrize("size", [0, HEAD_BYTES - 9, HEAD_BYTES - 8, len(LONG)])
def test_what_the_coordinator_announces_comes_to_all(size: int) -> None:
    wires = Wires(4)
    found = on_all(wires, lambda star, rank: star.announce(LONG[:size] if rank == 0 else b"other"))
    assert found == [LONG[:size]] * 4
    assert wires.sent <= 2 * 3


@pytest.mark.parametrize("count", [1, 69, 2000])
def test_numbers_are_added_up_over_all_ranks(count: int) -> None:
    found = on_all(Wires(4), lambda star, rank: star.all_sum([rank << 40] * (count - 1) + [7]))
    assert found == [[6 << 40] * (count - 1) + [28]] * 4


def test_one_call_follows_another() -> None:
    def work(star: Star, rank: int) -> Any:
        return star.all_sum([rank]), star.gather(LONG), star.announce(LONG), star.all_gather(b"x")

    found = on_all(Wires(3), work)
    assert [(sums, told, all_) for sums, _, told, all_ in found] == [([3], LONG, [b"x"] * 3)] * 3


@pytest.mark.parametrize(
    "call",
    [
        lambda star, rank: star.all_gather(b"x"),
        lambda star, rank: (star.gather(LONG), star.all_gather(b"x")),
        lambda star, rank: (star.gather(LONG), star.announce(b"x")),
        lambda star, rank: star.all_sum([1]),
        lambda star, rank: star.all_sum([1] * 2000),
        lambda star, rank: (star.all_gather(b"x"), star.gather(LONG)),
    ],
)
def test_all_hear_from_the_coordinator_which_rank_is_lost(call: Any) -> None:
    found = on_all(Wires(4, lost=2), call)
    assert [(type(error), error.rank) for error in found] == [(PeerError, 2)] * 3
    assert {str(error) for error in found} == {"connection closed"}


def test_a_rank_that_is_lost_behind_the_gathering_holds_up_no_announcement() -> None:
    assert on_all(Wires(4, lost=2), lambda star, rank: star.announce(b"done")) == [b"done"] * 3


def test_ranks_in_different_calls_are_told_so() -> None:
    def work(star: Star, rank: int) -> Any:
        return star.all_sum([1]) if rank == 2 else star.all_gather(b"x")

    found = on_all(Wires(4), work)
    assert {str(error)[:49] for error in found} == {
        "rank 2 is in another call of holdfast than rank 0"
    }
