"""What the thread that calls a verb, and the worker that runs its body, are to each other."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import _core, threads, worker
from holdfast.engine import staging
from holdfast.errors import AlreadyCommittedError
from holdfast.runs.saver import Saver
from holdfast.runs.schedule import Schedule
from holdfast.saving.handle import SaveHandle, in_flight
from holdfast.state.ambient import ordinary_torch
from holdfast.testing import Fault, faulty

WITHIN_S = 20.0


@contextmanager
def left_at(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> Iterator[Callable[[], None]]:
    """Interrupt the caller as its body comes to a function; yield what lets the body go on there.

    As with a second interrupt, the caller does not wait for it.
    """
    there, goes_on, function = threading.Event(), threading.Event(), getattr(module, name)
    serve = worker._Job.serve

    def held_up(*given: Any, **named: Any) -> Any:
        if worker.here.job is not None and not there.is_set():
            there.set()
            assert goes_on.wait(WITHIN_S)
        return function(*given, **named)

    def interrupted(job: worker._Job) -> Any:
        while not there.wait(0.001):
            asks = bool(job._calls)
            if job.ended.is_set():
                return serve(job)
            if asks:  # for the state
                job._calls.popleft().make()  # type: ignore[union-attr]
        points.setattr(worker._Job, "serve", serve)
        raise KeyboardInterrupt

    with monkeypatch.context() as points:
        points.setattr(worker, "STOP_S", 0.0)
        points.setattr(worker._Job, "serve", interrupted)
        points.setattr(module, name, held_up)
        yield goes_on.set
        goes_on.set()


THREADS_THAT_DIE = """
import _thread, sys, threading, torch, holdfast
from holdfast import threads

start = _thread.start_new_thread
_thread.start_new_thread = lambda function, given: start(lambda: None, ())
threading.Thread._bootstrap = lambda thread: None
threads.BEGIN_S = 0.1
state, path = {"w": torch.arange(8.0)}, sys.argv[1]
for stage in ("eager", "lazy"):
    assert holdfast.save_async(state, f"{path}/{stage}", stage=stage).result()
    into = {"w": torch.zeros(8)}
    holdfast.load(f"{path}/{stage}", into=into)
    assert torch.equal(into["w"], state["w"])
print(*threading.enumerate())
"""


def test_a_thread_that_dies_before_its_first_line_is_done_without(tmp_path: Path) -> None:
    program = [sys.executable, "-c", THREADS_THAT_DIE, str(tmp_path)]
    answer = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.splitlines()) == 1 == answer.stdout.count("Thread(")


def let_end() -> None:
    """Wait until no body is at anything."""
    for job in list(worker._jobs):
        assert job.ended.wait(WITHIN_S)


PROFILED = """
import _thread, sys, threading, time, torch, holdfast

state, into = {"w": torch.arange(8.0)}, [{"w": torch.zeros(8)} for _ in range(8)]
holdfast.save(state, sys.argv[1])
seen = set()
threading.setprofile(lambda frame, *_: seen.add(frame.f_code.co_name))
# CPython 3.11 lets one thread at a time set its profile function, and is at it for this long.
sys.addaudithook(lambda event, _: event == "sys.setprofile" and time.sleep(0.05))
ended = threading.Semaphore(0)

def load(target):
    holdfast.load(sys.argv[1], into=target)
    ended.release()

for one in into:
    _thread.start_new_thread(load, (one,))  # these are not profiled
for one in into:
    assert ended.acquire(timeout=20)
assert all(torch.equal(one["w"], state["w"]) for one in into) and "load_from" in seen

threading.setprofile(None)

def trace(*_):
    raise ZeroDivisionError

threading.settrace(trace)
try:
    holdfast.load(sys.argv[1], into=into[0])
except ZeroDivisionError:
    print("raised")
"""


def test_a_call_ends_where_its_worker_cannot_be_profiled_or_traced(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROFILED, str(tmp_path / "a.ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "raised", done.stderr


def test_a_second_interrupt_before_the_first_is_passed_on_leaves_no_save_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody answered the body any more; it waited for its hooks for ever, and all after it."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    state = {"w": torch.ones(3), "model": torch.nn.Linear(1, 1)}  # which has a hook
    with monkeypatch.context() as points:  # two at which a handler may raise
        points.setattr(worker._Call, "make", interrupted)
        points.setattr(worker._Job, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised:
            holdfast.save_async(state, tmp_path / "interrupted")
    holdfast.save_async(state, tmp_path / "next", deadline_s=WITHIN_S).result()
    assert list(tmp_path.iterdir()) == [tmp_path / "next"]
    assert worker.HELD_UP in raised.value.__notes__


def test_who_drops_a_body_and_lost_that_word_by_an_interrupt_ends_it() -> None:
    """It was taken by the caller, who waited for its end, and nobody ended it."""
    job = worker._Job(lambda: None, lambda _: None)
    assert job._take()  # an interrupt comes right here
    job.leave(KeyboardInterrupt())
    assert job.ended.wait(0)


def test_a_worker_runs_where_its_caller_may() -> None:
    everywhere = os.sched_getaffinity(0)
    try:
        for cpus in [{min(everywhere)}, everywhere, {max(everywhere)}, everywhere] * 20:
            os.sched_setaffinity(0, cpus)  # of this thread
            assert worker.run(lambda: os.sched_getaffinity(0)) == cpus
    finally:
        os.sched_setaffinity(0, everywhere)


def test_an_interrupt_as_a_load_asks_for_its_last_hook_ends_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body raised the interrupt itself, whose notes were copied to their own end."""
    counter = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1)
    path, state = tmp_path / "a", {"w": torch.ones(3), "n": 1, "counter": counter}
    holdfast.save(state, path)
    make = worker._Call.make

    def interrupted(call: "worker._Call[Any]") -> None:
        if getattr(call.function, "func", None) == counter.load_state_dict:
            raise KeyboardInterrupt
        make(call)

    monkeypatch.setattr(worker._Call, "make", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        holdfast.load(path, into=state)
    assert ["partly filled" in note for note in raised.value.__notes__] == [True]


def test_a_save_that_failed_before_its_call_was_interrupted_is_no_failure_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has got an exception for it already."""
    serve = worker._Job.serve

    def interrupted(job: worker._Job) -> None:
        serve(job).wait_done()
        raise KeyboardInterrupt

    with monkeypatch.context() as points, faulty(Fault("sync", persistent=True)):
        points.setattr(worker._Job, "serve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            holdfast.save_async({"w": torch.ones(3)}, tmp_path / "a")
    holdfast.save_async({"w": torch.ones(3)}, tmp_path / "b").result()


@pytest.mark.parametrize("verb", ["save", "save_async", "load"])
def test_settings_of_torch_are_changed_in_no_thread_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """An exception as a ``with`` ends keeps them from being put back: training could not go on."""

    class Stateful:
        def state_dict(self) -> dict[str, Any]:
            hooks.append(threading.get_ident())
            return {"w": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            hooks.append(threading.get_ident())

    model = torch.nn.BatchNorm1d(4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "own": Stateful(), "t": torch.ones(3)}
    state["random"] = holdfast.RandomState()
    hooks, main, entered = list[int](), threading.get_ident(), list[int]()
    holdfast.save(state, tmp_path / "a")
    enter = _GeneratorContextManager.__enter__

    def entering(block: Any) -> Any:
        if block.gen.gi_code.co_name == ordinary_torch.__name__:
            entered.append(threading.get_ident())
        return enter(block)

    with monkeypatch.context() as points:
        points.setattr(_GeneratorContextManager, "__enter__", entering)
        if verb == "load":
            holdfast.load(tmp_path / "a", into=state)
        elif verb == "save":
            holdfast.save(state, tmp_path / "b")
        else:
            holdfast.save_async(state, tmp_path / "b").result()
    assert entered and main not in entered
    assert set(hooks) == {main}


@pytest.mark.parametrize("stage", ["eager", "lazy"])
@pytest.mark.parametrize("verb", ["save_async", "Checkpointer.step"])
def test_a_save_that_its_caller_left_as_it_was_staged_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, stage: Any
) -> None:
    """The caller trained on, and a checkpoint of several steps became visible."""
    state = {"w": torch.ones(3), "n": 1}
    with left_at(monkeypatch, staging, "copy_from_host") as go_on:
        with pytest.raises(KeyboardInterrupt):
            if verb == "save_async":
                holdfast.save_async(state, tmp_path / "a", stage=stage)
            else:
                holdfast.Checkpointer(tmp_path, every=1, stage=stage, signals=()).step(1, state)
        state["w"] += 1  # type: ignore[operator]
        go_on()
    holdfast.save_async(state, tmp_path / "b", deadline_s=WITHIN_S).result()
    found = [path.parent.name for path in tmp_path.rglob("MANIFEST")]
    assert found == ["b"]


def test_a_save_that_its_caller_left_and_that_fails_is_no_failure_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when one interrupt comes: the caller has got an exception for it."""
    state = {"w": torch.ones(3)}
    with left_at(monkeypatch, SaveHandle, "start") as go_on, faulty(Fault("sync", persistent=True)):
        with pytest.raises(KeyboardInterrupt):
            holdfast.save_async(state, tmp_path / "a")
        go_on()
        let_end()
        before = in_flight()
        if before is not None:
            before.wait_done()
    holdfast.save_async(state, tmp_path / "b", deadline_s=WITHIN_S).result()
    assert list(tmp_path.iterdir()) == [tmp_path / "b"]


def test_a_step_that_its_caller_left_is_not_taken_for_the_one_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the left body noted came after what the next noted, which was acknowledged too soon."""
    run, state = holdfast.Checkpointer(tmp_path, every=1, signals=()), {"w": torch.ones(3)}
    with left_at(monkeypatch, Saver, "settle") as go_on:
        with pytest.raises(KeyboardInterrupt):
            run.step(1, state)
        threading.Timer(0.3, go_on).start()
        with faulty(Fault("sync", action="delay", argument=1000, persistent=True)):
            run.step(2, state)
            let_end()
            run.wait()
            assert Path(run.path(2), "MANIFEST").exists()


def test_a_save_that_its_caller_left_is_not_taken_for_one_of_what_was_restored_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that the left body has saved at last was not saved again, without a word."""
    run, state = holdfast.Checkpointer(tmp_path, every=1, signals=()), {"w": torch.ones(3)}
    run.save(1, state)
    with left_at(monkeypatch, Schedule, "measure") as go_on:
        with pytest.raises(KeyboardInterrupt):
            run.save(2, state)
        run.restore(state, step=1)
        go_on()
        let_end()
    state["w"] += 1
    with pytest.raises(AlreadyCommittedError):
        run.save(2, state)


def test_a_thread_of_a_body_lets_the_caller_go_on_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who saves in the background goes on at once, though the thread that writes wants the GIL."""
    monkeypatch.setattr(threads, "FIRST_S", WITHIN_S)
    order: list[str] = []
    left = threading.Event()

    def body() -> None:
        worker.start(thread, "test-second")

    def thread(may_begin: threads.MayBegin) -> None:
        assert may_begin()
        order.append("thread")
        left.set()

    for _ in range(50):
        order.clear()
        left.clear()
        worker.run(body)
        order.append("caller")
        assert left.wait(WITHIN_S)
        assert order == ["caller", "thread"]


def test_a_thread_of_a_body_begins_though_the_body_waits_for_it() -> None:
    done = threading.Event()

    def body() -> bool:
        assert worker.start(lambda may_begin: may_begin() and done.set(), "test") is not None
        return done.wait(WITHIN_S)

    assert worker.run(body)


def test_a_signal_finds_the_caller_where_it_may_run(tmp_path: Path) -> None:
    """The caller is kept to one CPU as it wakes; a handler would hand that on to its children."""
    state, before = {"w": torch.ones(8)}, os.sched_getaffinity(0)
    seen: list[set[int]] = []
    holdfast.save(state, tmp_path / "a")
    handler = signal.signal(signal.SIGALRM, lambda *_: seen.append(os.sched_getaffinity(0)))
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    try:
        until = time.monotonic() + WITHIN_S
        while len(seen) < 500 and time.monotonic() < until:
            holdfast.load(tmp_path / "a", into=state)
            assert os.sched_getaffinity(0) == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert seen and all(cpus == before for cpus in seen)


EXITS_IN_A_WAIT = """
import sys, threading, time

sys.path.insert(0, sys.argv[1])
import _core  # alone: the rest takes a second

waiter = _core.Waiter()
threading.Thread(target=_core.wait_for, args=(waiter,), daemon=True).start()
time.sleep(0.02)
threading._register_atexit(waiter.wake)
"""


def test_python_ends_while_a_daemon_thread_wakes() -> None:
    """It ends that thread as the thread asks for the GIL, below frames of C++."""
    command = [sys.executable, "-c", EXITS_IN_A_WAIT, str(Path(_core.__file__).parent)]
    for _ in range(12):  # in a third of them, at that moment
        subprocess.run(command, check=True, timeout=WITHIN_S)


def test_only_a_waiter_is_waited_for() -> None:
    with pytest.raises(TypeError, match="expected a Waiter"):
        worker.wait_for(3)  # type: ignore[arg-type]


IN_A_CPUSET = """
import os, sys, torch, holdfast

cpuset, path = sys.argv[1:]
state, first = {"w": torch.ones(8)}, min(os.sched_getaffinity(0))
open(f"{cpuset}/cpuset.cpus", "w").write(str(first))
open(f"{cpuset}/cgroup.procs", "w").write(str(os.getpid()))
holdfast.save(state, path)
holdfast.load(path, into=state)
assert os.sched_getaffinity(0) == {first}
open(f"{cpuset}/cpuset.cpus", "w").write(f"0-{os.cpu_count() - 1}")
assert len(os.sched_getaffinity(0)) > 1
holdfast.load(path, into=state)
print({len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")})
"""


@pytest.fixture
def cpuset() -> Iterator[Path]:
    """Make a cpuset below that of this machine; skip where that may not be."""
    place = Path("/sys/fs/cgroup/cpuset", f"holdfast-{os.getpid()}")
    if len(os.sched_getaffinity(0)) < 2 or not os.access(place.parent, os.W_OK):
        pytest.skip("needs two CPUs, and the right to make a cpuset (cgroup v1)")
    place.mkdir()
    try:
        (place / "cpuset.mems").write_text((place.parent / "cpuset.mems").read_text())
        yield place
    finally:
        place.rmdir()


def test_threads_of_a_process_follow_its_cpuset(cpuset: Path, tmp_path: Path) -> None:
    """As it grows, so do they: holdfast sets no CPUs of theirs that were never set."""
    command = [sys.executable, "-c", IN_A_CPUSET, str(cpuset), str(tmp_path / "a")]
    ended = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert ended.stdout.strip() == f"{{{os.cpu_count()}}}"


SANDBOXED = """
import ctypes, os, platform, sys, torch, holdfast

class Rule(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte)]
    _fields_ += [("value", ctypes.c_uint)]

class Filter(ctypes.Structure):
    _fields_ = [("rules", ctypes.c_ushort), ("first", ctypes.POINTER(Rule))]

state = {"w": torch.ones(8)}
holdfast.save(state, sys.argv[1])  # from here on there is a worker
number = {"x86_64": 203, "aarch64": 122}[platform.machine()]  # of sched_setaffinity
refuse, allow = 0x00050001, 0x7FFF0000
rules = (Rule * 4)((0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, refuse), (6, 0, 0, allow))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(4, rules)), 0, 0) == 0
before = os.sched_getaffinity(0)
for _ in range(20):
    holdfast.load(sys.argv[1], into=state)
    assert os.sched_getaffinity(0) == before
"""


def test_a_thread_that_may_not_set_its_cpus_is_kept_to_none(tmp_path: Path) -> None:
    """A sandbox of the calling thread alone: the worker could set its CPUs, and nobody back."""
    command = [sys.executable, "-c", SANDBOXED, str(tmp_path / "a")]
    subprocess.run(command, check=True, timeout=60)


def test_a_body_that_waits_for_its_thread_has_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "FIRST_S", WITHIN_S)
    done = threading.Event()

    def body() -> bool:
        worker.start(lambda may_begin: may_begin() and done.set(), "test", at_once=True)
        return done.wait(WITHIN_S / 4)

    assert worker.run(body)
