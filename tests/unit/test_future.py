"""A save in the background as a future: time limits, exceptions, callbacks, `await`."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.engine.ledger import Ledger
from holdfast.errors import HoldfastError, StoreError
from holdfast.saving import handle as handle_module
from holdfast.saving.handle import SaveHandle

WAIT_S = 20.0


class Held:
    """A save that ends when it is told to."""

    def __init__(self, failure: BaseException | None = None, deadline_s: float = 60.0) -> None:
        self.handle = SaveHandle("runs/a", None, Ledger(), deadline_s)
        self.handle.is_given = True
        self.may_end = threading.Event()

        def work() -> None:
            assert self.may_end.wait(WAIT_S)
            if failure is not None:
                raise failure

        self.handle.start(work)


@pytest.fixture
def make() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def begin(*args: object, **options: object) -> Held:
        made.append(Held(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for held in made:
        held.may_end.set()
        held.handle._done.wait(WAIT_S)


Make = Callable[..., Held]


def test_who_waits_no_longer_than_he_said_is_told_and_the_save_goes_on(make: Make) -> None:
    held = make()
    for wait in (held.handle.result, held.handle.exception):
        with pytest.raises(TimeoutError, match=r"save of runs/a has not ended within 0\.01 s"):
            wait(0.01)
        with pytest.raises(TimeoutError):
            wait(timeout=0)
    held.may_end.set()
    assert held.handle.result(timeout=WAIT_S) == "runs/a"
    assert held.handle.exception(timeout=0) is None


def test_a_deadline_that_is_over_is_said_rather_than_the_time_limit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_module, "OUTCOME_GRACE_S", 0.0)
    held = make(deadline_s=0.01)
    held.may_end.wait(0.05)
    with pytest.raises(StoreError, match="did not end by its deadline"):
        held.handle.result(timeout=0)


def test_an_exception_that_was_asked_for_is_told(make: Make) -> None:
    failure = StoreError("the disk is gone")
    held = make(failure)
    held.may_end.set()
    held.handle.add_done_callback(lambda _: None)
    assert held.handle.exception(WAIT_S) is failure
    assert held.handle.untold() is None, "the next save does not raise it again"
    with pytest.raises(StoreError, match="disk is gone"):
        held.handle.result()


def test_callbacks_are_called_once_each_in_order_and_at_once_when_late(make: Make) -> None:
    held, called, all_called = make(), list[tuple[str, SaveHandle, bool]](), threading.Event()

    def note(name: str) -> Callable[[SaveHandle], None]:
        def call(handle: SaveHandle) -> None:
            called.append((name, handle, handle.done()))
            if name == "second":
                all_called.set()

        return call

    held.handle.add_done_callback(note("first"))
    held.handle.add_done_callback(note("second"))
    assert called == []
    held.may_end.set()
    assert all_called.wait(WAIT_S)
    held.handle.add_done_callback(note("late"))
    names = ["first", "second", "late"]
    assert called == [(name, held.handle, True) for name in names]


def test_a_callback_that_fails_is_logged_and_ends_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    held, called = make(), threading.Event()
    held.handle.add_done_callback(lambda _: 1 / 0)
    held.handle.add_done_callback(lambda _: called.set())
    held.may_end.set()
    assert called.wait(WAIT_S)
    assert held.handle.result(WAIT_S) == "runs/a"
    assert "callback of the save of runs/a failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_may_wait_for_whoever_waits_for_the_save(make: Make) -> None:
    held, told = make(), threading.Event()
    answers: list[bool] = []
    held.handle.add_done_callback(lambda _: answers.append(told.wait(WAIT_S)))
    held.may_end.set()
    held.handle.result(WAIT_S)
    told.set()
    held.handle.add_done_callback(lambda _: None)
    deadline = threading.Event()
    while not answers and not deadline.wait(0.01):
        pass
    assert answers == [True]


def test_a_save_is_awaited(make: Make) -> None:
    good, bad = make(), make(StoreError("the disk is gone"))

    async def main() -> tuple[str, int]:
        turns = 0
        waiting = asyncio.ensure_future(asyncio.wait_for(good.handle, WAIT_S))
        while not waiting.done():
            turns += 1
            await asyncio.sleep(0.01)
            if turns == 3:
                good.may_end.set()
        bad.may_end.set()
        with pytest.raises(StoreError, match="disk is gone"):
            await bad.handle
        return await good.handle, turns  # once more, and it has ended

    path, turns = asyncio.run(main())
    assert path == "runs/a"
    assert turns >= 3, "the loop went on"


def test_who_stops_to_await_ends_no_save(make: Make) -> None:
    held = make()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(held.handle, 0.05)

    asyncio.run(main())
    held.may_end.set()
    assert held.handle.result(WAIT_S) == "runs/a", "a loop that is closed hears nothing"


def test_awaiting_a_save_that_hangs_ends_by_its_deadline(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_module, "OUTCOME_GRACE_S", 0.0)
    held = make(deadline_s=0.1)

    async def main() -> None:
        with pytest.raises(StoreError, match="did not end by its deadline"):
            await asyncio.wait_for(held.handle, WAIT_S)

    asyncio.run(main())


def test_a_real_save_is_awaited_and_calls_back(tmp_path: Path) -> None:
    called: list[BaseException | None] = []

    async def main() -> str:
        handle = holdfast.save_async({"w": torch.ones(8)}, tmp_path / "a")
        handle.add_done_callback(lambda handle: called.append(handle.exception()))
        return await handle

    assert asyncio.run(main()) == str(tmp_path / "a")
    with pytest.raises(HoldfastError):
        asyncio.run(main())  # there is a checkpoint at this path


def test_a_forked_child_is_told_that_the_save_is_not_its_own(make: Make) -> None:
    held = make()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            held.handle.exception(0)
        except HoldfastError as error:
            os.write(write, str(error).encode()[:200])
        os._exit(0)
    os.waitpid(child, 0)
    assert b"this is its forked child" in os.read(read, 200)
    os.close(read)
    os.close(write)
