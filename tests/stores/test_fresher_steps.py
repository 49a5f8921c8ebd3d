"""An upload waits for a fresher step where the next save is nearer than the last one."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import Checkpointer, Event, Keep
from holdfast.errors import StoreError
from holdfast.runs import uploader
from holdfast.runs.uploader import Uploader
from stores.test_tiers import opened, state, steps_in, until

SOON_S = 4.0  # for what does not wait for the next save, which is far later


class Waiting:
    """A run that saves every 100 s, of which an upload takes 180 s.

    Step 2 was saved during the upload of step 1, 80 s before its end, and waits for step 3.
    """

    now_s = 1000.0  # of the clock of uploads, which goes when it is told to
    looks = 0  # for what goes up next, since step 2 was saved
    checkpointer: Checkpointer
    thread: Uploader

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.store = f"{path}/store"
        self.events: list[Event] = []
        self._go_on, self._transfer = threading.Event(), uploader.transfer
        clocks = {"monotonic": self.now, "perf_counter": self.now, "sleep": time.sleep}
        patch.setattr(uploader, "time", SimpleNamespace(**clocks))
        patch.setattr(uploader, "transfer", self._when_it_may)
        more = {"every": 1, "keep": Keep.latest(1), "durable": "local"}
        more["observe"] = [self.events.append]
        self.checkpointer = opened(self.store, f"{path}/local", **more)

    def now(self) -> float:
        return self.now_s

    def _when_it_may(self, *given: Any) -> Any:
        assert self._go_on.wait(60)
        return self._transfer(*given)

    def begin(self, patch: pytest.MonkeyPatch) -> None:
        self.checkpointer.save(1, state(1))
        tiers = self.checkpointer._tiers
        assert tiers is not None and tiers.uploader is not None
        self.thread = tiers.uploader
        until(lambda: self.thread._at == 1)
        self.now_s += 100
        self.checkpointer.step(2, state(2))
        self.checkpointer.wait()
        real = self.thread._next

        def counted() -> int | None:
            self.looks += 1
            return real()

        patch.setattr(self.thread, "_next", counted)
        self.now_s += 80
        self._go_on.set()
        until(lambda: self.thread._fresher_in_s)

    def end(self) -> None:
        self._go_on.set()
        with suppress(StoreError):
            self.checkpointer.close()


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    run = Waiting(tmp_path, monkeypatch)
    try:
        run.begin(monkeypatch)
        yield run
    finally:
        run.end()


def within(limit_s: float, call: Callable[[], object]) -> None:
    began = time.monotonic()
    call()
    assert time.monotonic() - began < limit_s


def test_the_times_between_saves_and_of_the_upload_say_how_long_it_waits(waiting: Waiting) -> None:
    assert waiting.thread._fresher_in_s == pytest.approx(20 + 25)


def test_the_next_save_ends_the_wait_and_its_step_goes_up(waiting: Waiting) -> None:
    time.sleep(0.3)
    assert steps_in(waiting.store) == [1]
    waiting.now_s += 20
    waiting.checkpointer.step(3, state(3))
    within(SOON_S, lambda: until(lambda: 1 not in steps_in(waiting.store)))
    assert steps_in(waiting.store) == [3]


def test_a_save_that_does_not_come_ends_the_wait_too(waiting: Waiting) -> None:
    waiting.now_s += 44.8
    waiting.thread._asks.put(False)
    until(lambda: 0 < waiting.thread._fresher_in_s < 1)  # by a real clock, too
    waiting.now_s += 1
    within(SOON_S, lambda: until(lambda: steps_in(waiting.store) == [2]))


def test_a_save_during_the_upload_before_does_not_have_the_store_listed_twice(
    waiting: Waiting,
) -> None:
    time.sleep(0.3)
    assert waiting.looks == 1


def test_a_call_that_waits_for_the_store_does_not_wait_for_the_next_save(waiting: Waiting) -> None:
    within(SOON_S, lambda: waiting.checkpointer.wait("store"))
    assert steps_in(waiting.store) == [2]


def test_the_end_of_a_job_uploads_at_once_what_waits(waiting: Waiting) -> None:
    within(SOON_S, waiting.checkpointer.close)
    assert steps_in(waiting.store) == [2]


def test_an_interrupt_ends_a_job_while_it_waits(waiting: Waiting) -> None:
    def interrupt() -> None:
        with pytest.raises(KeyboardInterrupt), waiting.checkpointer:
            raise KeyboardInterrupt

    within(SOON_S, interrupt)
    assert steps_in(waiting.store) == [1]


MINE = Keep((lambda steps, _: {s for s in steps if s % 2 == 0},), "Keep.latest(1)")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_keep", Keep.all()),
        ("_keep", Keep.latest(1) | Keep.every(2)),
        ("_keep", Keep.latest(1) | Keep.best("loss", 1)),
        ("_keep", MINE),
        ("_keep", Keep.latest(1) | MINE),
        ("leads", frozenset({1})),
        ("_failures", 1),
        ("_hurries", 1),
        ("_interval_s", 200.0),
    ],
)
def test_it_does_not_wait_where_a_step_has_to_go_up(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    with waiting.thread.paused():
        assert waiting.thread._next() is None
        with monkeypatch.context() as patch:
            patch.setattr(waiting.thread, name, value)
            assert waiting.thread._next() == 2


def test_it_waits_where_newer_steps_replace_each(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting.thread.paused(), monkeypatch.context() as patch:
        patch.setattr(waiting.thread, "_keep", Keep.local(3) | Keep.latest(2) | Keep.latest(3))
        assert waiting.thread._next() is None


def test_a_delta_does_not_wait(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    with waiting.thread.paused(), monkeypatch.context() as patch:
        patch.setattr(waiting.thread._local.described, "bases", lambda _: {2: 1})
        assert waiting.thread._next() == 2


def test_a_store_that_is_slow_to_list_does_not_keep_uploads_waiting(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting.thread.paused(), monkeypatch.context() as patch:
        listed = waiting.thread._store.steps

        def list_slowly() -> list[int]:
            waiting.now_s += 60
            return listed()

        patch.setattr(waiting.thread._store, "steps", list_slowly)
        waiting.now_s -= 60
        assert waiting.thread._next() == 2  # it was fresh when the store was asked


def test_nothing_is_due_while_somebody_has_both_places(waiting: Waiting) -> None:
    with waiting.thread.paused():
        waiting.thread._asks.put(False)  # as the end of the wait, which is then over for good
        until(lambda: not waiting.thread._fresher_in_s, SOON_S)


def test_uploads_that_fail_wait_for_no_fresher_step_and_warn_once(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[float]()

    def fail(*_: Any) -> None:
        waiting.now_s += 80  # the step is as old as one that waits
        tries.append(waiting.now_s)
        raise StoreError("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(uploader, "transfer", fail)
        patch.setattr(uploader, "PAUSES_S", (0.01,))
        waiting.now_s += 20
        waiting.checkpointer.step(3, state(3))
        until(lambda: len(tries) == 1, SOON_S)
        waiting.thread._saved_at = waiting.now_s - 80
        until(lambda: len(tries) > 4, SOON_S)
        assert [event.kind for event in waiting.events].count("behind") == 1


def test_a_step_is_as_old_as_its_commit_though_older_ones_go_slowly(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tidied = waiting.thread._saved, waiting.thread._saved.tidy

    def tidy_slowly(*given: Any) -> None:
        waiting.now_s += 30
        tidied(*given)

    monkeypatch.setattr(run, "tidy", tidy_slowly)
    waiting.now_s += 20
    waiting.checkpointer.step(3, state(3))
    until(lambda: waiting.now_s == 1000 + 200 + 30)
    assert waiting.thread._saved_at == 1000 + 200
    assert waiting.thread._interval_s == 100
