"""Several threads, signal handlers and forked children of one process save and load."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast
from holdfast import worker
from holdfast.engine import pool
from holdfast.errors import BusyError, HoldfastError, OptionError
from holdfast.options import SLOT_BYTES, Options
from holdfast.saving import handle as handle_module
from holdfast.stores.local import LocalStore
from holdfast.testing.faults import Fault, faulty

SLOW = Fault("write", nth=1, action="delay", argument=300, persistent=True)
WITHIN_S = 20.0


class Hooked:
    """A part of a state whose ``state_dict`` does something first."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def state_dict(self) -> dict[str, Any]:
        self.hook()
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hook()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Leave nothing in flight, and no failure untold, to the next test."""
    yield
    handle = handle_module.in_flight()
    if handle is not None:
        handle.wait_done()
    if handle_module._last is not None:
        handle_module._last.untold()


def saved(path: Path) -> dict[str, torch.Tensor]:
    with holdfast.open(path) as checkpoint:
        return checkpoint.tensors(checkpoint.names())


def test_two_threads_that_save_in_the_background_each_save_their_own_state(tmp_path: Path) -> None:
    """One staging pool for both put the other's weights into an acknowledged checkpoint."""
    rounds, failures = 30, []
    together = threading.Barrier(2)

    def train(number: int) -> None:
        try:
            for turn in range(rounds):
                value = float(number * 1000 + turn)
                state = {f"t{i}": torch.full((40_000,), value + i) for i in range(8)}
                together.wait(WITHIN_S)
                holdfast.save_async(state, tmp_path / f"{number}-{turn}").result()
        except BaseException as error:
            failures.append(error)
            together.abort()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for number in range(2):
        for turn in range(rounds):
            for name, tensor in saved(tmp_path / f"{number}-{turn}").items():
                assert (tensor == number * 1000 + turn + int(name[1:])).all(), (number, turn, name)


@pytest.mark.parametrize("busy", ["wait", "skip", "fail"])
def test_a_thread_does_as_busy_says_while_another_prepares_its_save(
    tmp_path: Path, busy: Any
) -> None:
    inside, leave = threading.Event(), threading.Event()
    first = {"w": torch.ones(1000), "h": Hooked(lambda: (inside.set(), leave.wait(WITHIN_S)))}
    handles: list[holdfast.SaveHandle] = []
    thread = threading.Thread(
        target=lambda: handles.append(holdfast.save_async(first, tmp_path / "first"))
    )
    thread.start()
    assert inside.wait(WITHIN_S)
    second = {"w": torch.zeros(1000)}
    if busy == "fail":
        with pytest.raises(BusyError):
            holdfast.save_async(second, tmp_path / "second", busy=busy)
    elif busy == "skip":
        assert holdfast.save_async(second, tmp_path / "second", busy=busy).skipped
    else:
        threading.Timer(0.2, leave.set).start()
        holdfast.save_async(second, tmp_path / "second", busy=busy).result()
        assert not saved(tmp_path / "second")["w"].any()
    leave.set()
    thread.join(WITHIN_S)
    handles[0].result()
    assert saved(tmp_path / "first")["w"].all()
    assert (tmp_path / "second").exists() == (busy == "wait")


def test_a_save_waits_for_another_thread_no_longer_than_its_deadline(tmp_path: Path) -> None:
    inside, leave = threading.Event(), threading.Event()
    state = {"h": Hooked(lambda: (inside.set(), leave.wait(WITHIN_S)))}
    thread = threading.Thread(target=lambda: holdfast.save_async(state, tmp_path / "first"))
    thread.start()
    assert inside.wait(WITHIN_S)
    with pytest.raises(HoldfastError, match="another thread"):
        holdfast.save_async({"w": torch.ones(3)}, tmp_path / "second", deadline_s=0.3)
    leave.set()
    thread.join(WITHIN_S)


def test_a_signal_handler_that_saves_within_save_async_gets_a_typed_error(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            holdfast.save_async({"w": torch.zeros(1000)}, tmp_path / "inner").result()
        except BaseException as error:
            errors.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        state = {"w": torch.ones(1000), "h": Hooked(lambda: signal.raise_signal(signal.SIGUSR1))}
        holdfast.save_async(state, tmp_path / "outer").result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [type(error) for error in errors] == [HoldfastError]
    assert "another one that this thread is preparing" in str(errors[0])
    assert saved(tmp_path / "outer")["w"].all() and not (tmp_path / "inner").exists()
    holdfast.save_async({"w": torch.zeros(9)}, tmp_path / "after").result()


def test_staging_refuses_a_pool_that_is_out(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    lease = pool.staging(store, Options(), SLOT_BYTES)
    with pytest.raises(HoldfastError, match="another background save"):
        pool.staging(store, Options(), SLOT_BYTES)
    lease.give_back()
    pool.staging(store, Options(), SLOT_BYTES).give_back()


def test_a_save_whose_memory_cannot_be_had_gives_its_turn_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.engine.pool.available_bytes", lambda: 1 << 20)
        patch.setattr("holdfast.engine.pool._staging", {})
        for _ in range(2):
            with pytest.raises(OptionError, match=r"and [\d.]+ [kMGT]?B are available"):
                holdfast.save_async({"w": torch.zeros(12 << 20)}, tmp_path / "a")
    holdfast.save_async({"w": torch.zeros(9)}, tmp_path / "a").result()


@pytest.mark.parametrize("verb", ["save_async", "save"])
def test_an_interrupt_in_a_hook_leaves_a_process_that_saves_at_once(
    tmp_path: Path, verb: str
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    state = {"w": torch.ones(1000), "h": Hooked(interrupt)}
    with pytest.raises(KeyboardInterrupt):
        getattr(holdfast, verb)(state, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    started = time.monotonic()
    holdfast.save_async({"w": torch.ones(9)}, tmp_path / "a").result()
    assert time.monotonic() - started < 1


def test_an_interrupt_of_a_save_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    """The alarm comes while the calling thread waits for a disk that is slow."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the alarm")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with faulty(SLOW):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeoutError, match="the alarm"):
                holdfast.save({"w": torch.ones(16 << 20)}, tmp_path / "a")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not (tmp_path / "a").exists()
    holdfast.save({"w": torch.ones(9)}, tmp_path / "a")


def test_an_interrupt_is_not_held_up_by_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the alarm")

    monkeypatch.setattr(worker, "STOP_S", 0.2)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with faulty(Fault("write", nth=1, action="delay", argument=3000)):
            started = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeoutError, match="the alarm") as raised:
                holdfast.save({"w": torch.ones(1000)}, tmp_path / "a")
            assert time.monotonic() - started < 2
            assert "has not ended yet" in str(raised.value.__notes__)
            holdfast.save({"w": torch.ones(9)}, tmp_path / "b")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert saved(tmp_path / "b")["w"].all() and not (tmp_path / "a" / "MANIFEST").exists()


def test_an_interrupted_load_says_that_its_target_is_partly_filled(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000), "h": Hooked(lambda: None)}
    holdfast.save(state, tmp_path / "a")

    def interrupt() -> None:
        raise KeyboardInterrupt

    target = {"w": torch.zeros(1000), "h": Hooked(lambda: None)}
    target["h"].load_state_dict = lambda _: interrupt()  # type: ignore[method-assign, union-attr]
    with pytest.raises(KeyboardInterrupt) as raised:
        holdfast.load(tmp_path / "a", into=target)
    assert "partly filled" in str(raised.value.__notes__)


def test_an_interrupt_while_result_is_waited_for_does_not_end_the_save(tmp_path: Path) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with faulty(SLOW):
            handle = holdfast.save_async({"w": torch.ones(1000)}, tmp_path / "a")
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                handle.result()
            assert handle.result() == str(tmp_path / "a")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_in_a_forked_child_the_handle_of_the_parent_raises_at_once(tmp_path: Path) -> None:
    run = holdfast.Checkpointer(tmp_path / "run", every=1, signals=())
    with faulty(SLOW):
        handle = holdfast.save_async({"w": torch.ones(1000)}, tmp_path / "a")
        child = os.fork()
        if child == 0:
            refused = 0
            calls = (handle.result, handle.wait_staged, handle.cancel, handle.done)
            for call in (*calls, handle.progress, run.wait, lambda: run.step(1, {})):
                try:
                    call()  # type: ignore[operator]
                except HoldfastError as error:
                    refused += "forked" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert handle.result() == str(tmp_path / "a")
    run.close()


def test_children_forked_at_any_moment_of_a_save_save_for_themselves(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((50_000,), float(i)) for i in range(12)}
    for number in range(20):
        handle = holdfast.save_async(state, tmp_path / f"parent-{number}")
        for _ in range(number * 300):
            pass
        child = os.fork()
        if child == 0:
            signal.alarm(15)  # what hangs is ended
            try:
                holdfast.save_async(state, tmp_path / f"child-{number}").result()
                holdfast.save(state, tmp_path / f"child-{number}-again")
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, number
        handle.result()
    for path in sorted(tmp_path.iterdir()):
        assert holdfast.open(path).verify() == []


def test_a_fork_in_a_hook_does_not_save_in_the_child(tmp_path: Path) -> None:
    """The rest of the call goes on in the parent alone: the child has no thread that would."""
    children: list[int] = []
    parent = os.getpid()

    def fork() -> None:
        children.append(os.fork())

    state = {"w": torch.ones(10), "h": Hooked(fork)}
    try:
        holdfast.save(state, tmp_path / "a")
    except HoldfastError as error:
        if os.getpid() != parent:
            os._exit(7 if "a hook of the state forked" in str(error) else 8)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
    assert saved(tmp_path / "a")["w"].all()


ENDINGS = {
    "from atexit": """
        import atexit
        atexit.register(lambda: print(holdfast.save_async(state, path, codec=codec).result()))
    """,
    "from atexit, without asking for the result": """
        import atexit
        atexit.register(lambda: holdfast.save_async(state, path, codec=codec))
    """,
    "from atexit, with the first use of holdfast": """
        import atexit
        def late():
            from holdfast import save
            save(state, path, codec=codec)
        atexit.register(late)
    """,
    "in a thread that outlives the main one": """
        import threading, time
        def late():
            threading.main_thread().join()
            time.sleep(0.3)
            holdfast.save_async(state, path, codec=codec)
        threading.Thread(target=late).start()
    """,
    "as the last thing": """
        holdfast.save_async(state, path, codec=codec)
    """,
    "before an exception": """
        holdfast.save_async(state, path, codec=codec)
        import sys
        sys.exit(0)
    """,
}


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_saved_when_python_ends_is_durable(tmp_path: Path, ending: str, codec: str) -> None:
    """A thread in the background that Python ended anywhere made it abort."""
    program = f"""
import holdfast, torch
path, codec = {str(tmp_path / "a")!r}, {codec!r}
state = {{"w": torch.ones(3_000_000), "n": 1}}
""" + "\n".join(line[8:] for line in ENDINGS[ending].splitlines())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert saved(tmp_path / "a")["w"].all()


@pytest.mark.parametrize("verb", ["save", "save_async", "load"])
def test_a_daemon_thread_that_is_cut_off_by_the_end_of_python_does_not_abort_it(
    tmp_path: Path, verb: str
) -> None:
    for turn in range(3):
        place = tmp_path / str(turn)
        program = f"""
import holdfast, torch, threading, itertools
state = {{"w": torch.ones(3_000_000)}}
holdfast.save(state, {str(place / "a")!r})
started = threading.Event()
def for_ever():
    for number in itertools.count():
        started.set()
        path = {str(place)!r} + f"/{{number}}"
        if {verb!r} == "load":
            holdfast.load({str(place / "a")!r}, into=state)
        else:
            getattr(holdfast, {verb!r})(state, path)
threading.Thread(target=for_ever, daemon=True).start()
started.wait()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr.decode()
        for manifest in place.glob("*/MANIFEST"):
            assert holdfast.open(manifest.parent).verify() == []
