"""Ranks that meet through a store: here threads, each with its own connection to torch's."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from holdfast.errors import PeerError, StoreError
from holdfast.group.barrier import FAN, PART_BYTES, StoreGroup
from holdfast.group.base import COORDINATOR
from holdfast.group.phase import Outcome

DEADLINE_S = 30.0


@pytest.fixture
def store() -> Iterator[Any]:
    """Serve a store on loopback."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(
    store: Any, world_size: int, work: Callable[[StoreGroup], Any], deadline_s: float = DEADLINE_S
) -> list[Any]:
    """Run ``work`` on every rank at once; return what each returned or raised."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + deadline_s

    def run(rank: int) -> None:
        try:
            own = store if isinstance(store, HashStore) else store.clone()
            connection = PrefixStore("save", own)
            results[rank] = work(StoreGroup(connection, rank, world_size, deadline))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(world_size)]


@pytest.mark.parametrize("size", [0, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES - 9])
def test_messages_of_any_size_arrive_and_nothing_of_them_stays(store: Any, size: int) -> None:
    keys = store.num_keys()
    sent = [random.Random(rank).randbytes(size) for rank in range(3)]

    def exchange(group: StoreGroup) -> Any:
        gathered = group.gather(sent[group.rank])
        return gathered, group.all_gather(sent[group.rank]), group.announce(sent[group.rank])

    found = meet(store, 3, exchange)
    assert found == [(sent, sent, sent[0]), (None, sent, sent[0]), (None, sent, sent[0])]
    assert store.num_keys() == keys


def test_ranks_without_a_deadline_meet(store: Any) -> None:
    found = meet(store, 2, lambda group: group.all_gather(b"here"), deadline_s=float("inf"))
    assert found == [[b"here"] * 2] * 2


def test_a_rank_that_dies_before_the_outcome_is_told_keeps_it_from_nobody(store: Any) -> None:
    def save(group: StoreGroup) -> bytes:
        group.gather(b"written")
        group.all_gather(b"all have written")
        if group.rank == 1:
            return b"died"
        with Outcome(group) as outcome:
            outcome.answer = b"committed" if group.rank == COORDINATOR else b""
        return outcome.answers[COORDINATOR]

    started = time.monotonic()
    assert meet(store, 3, save) == [b"committed", b"died", b"committed"]
    assert time.monotonic() - started < DEADLINE_S / 2


def test_the_coordinator_may_end_the_store_when_it_has_told_the_outcome(store: Any) -> None:
    told = threading.Event()

    class Slow(StoreGroup):
        """Picks the answer up a while after it was put down."""

        def _depart(self, over: str | None = None) -> list[bytes]:
            assert not told.wait(1), "the coordinator went on"
            return super()._depart(over)

    def save(group: StoreGroup) -> bytes:
        group.__class__ = Slow if group.rank == 2 else StoreGroup
        found = group.announce(b"committed")
        if group.rank == COORDINATOR:
            told.set()
        return found

    assert meet(store, 3, save) == [b"committed"] * 3


def test_the_outcome_is_that_of_the_coordinator(store: Any) -> None:
    def save(group: StoreGroup) -> None:
        with Outcome(group):
            if group.rank == COORDINATOR:
                raise StoreError("the disk is gone")

    here, *there = meet(store, 3, save)
    assert isinstance(here, StoreError)
    assert [(type(error), error.rank) for error in there] == [(PeerError, COORDINATOR)] * 2


@pytest.mark.parametrize("world_size", [FAN, FAN + 1, 2 * FAN, 300])
def test_hundreds_of_ranks_meet(world_size: int) -> None:
    store = HashStore()  # to connect to the other takes 0.2 s a rank
    keys = store.num_keys()
    sent = [f"{rank}".encode() * (rank % 5) for rank in range(world_size)]

    def exchange(group: StoreGroup) -> Any:
        gathered = group.gather(sent[group.rank])
        return gathered, group.all_gather(sent[group.rank]), group.announce(sent[group.rank])

    first, *rest = meet(store, world_size, exchange)
    assert first == (sent, sent, sent[0])
    assert rest == [(None, sent, sent[0])] * (world_size - 1)
    assert store.num_keys() == keys


@pytest.mark.parametrize("missing", [[7], [2 * FAN + 3], [FAN], [1, FAN + 1, 3 * FAN - 1]])
def test_of_hundreds_the_missing_are_named_to_all(missing: list[int]) -> None:
    def arrive(group: StoreGroup) -> list[bytes]:
        return [] if group.rank in missing else group.all_gather(b"here")

    found = meet(HashStore(), 3 * FAN, arrive, deadline_s=4)
    present = [error for rank, error in enumerate(found) if rank not in missing]
    named = f"rank {', '.join(map(str, missing))} did not answer"
    assert all(isinstance(error, PeerError) and named in str(error) for error in present)
    assert {error.rank for error in present} == {missing[0]}
