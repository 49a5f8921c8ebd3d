"""Children that are forked at any moment of a save, as data loaders fork, save by themselves.

Each child ends by a deadline, or it hangs: in a lock that a thread of its parent held.
"""

import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.engine.basis import keep_basis, last_link, take_basis

SECONDS = 60  # for a child; it needs a tenth of one
HANGS = 1000  # no exit code: who kills a child for want of memory leaves -SIGKILL
# Some in `make test`, all in `make test-all`.
many_forks = pytest.mark.parametrize("forks", [12, 30])
SMALL = holdfast.Options(pool_bytes=32 << 20)


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed}


def saves_and_loads(
    state: dict[str, Any], other: dict[str, Any], path: Path, **options: Any
) -> None:
    holdfast.save(state, path, options=SMALL, **options)
    holdfast.load(path, into=other, options=SMALL)
    saved = state["model"].state_dict()
    assert all(
        torch.equal(found, saved[name]) for name, found in other["model"].state_dict().items()
    )


def saves_lazily(state: dict[str, Any], path: Path) -> None:
    holdfast.save_async(state, path, stage="lazy").result()
    with holdfast.open(path) as checkpoint:
        assert checkpoint.tensor("model.0.weight").equal(state["model"][0].weight)


def waits_for_the_disk(process: int) -> bool:
    """Return whether a thread of it cannot be interrupted: no lock of a program does that."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return any((task / "stat").read_text().rpartition(") ")[2][0] == "D" for task in tasks)


def show_where_it_hangs(process: int) -> None:
    """Print what each of its threads does: in Python, and in the kernel."""
    os.kill(process, signal.SIGUSR1)
    time.sleep(1)
    for thread in Path(f"/proc/{process}/task").iterdir():
        print(thread.name, *((thread / name).read_text() for name in ("wchan", "syscall")))


def forked(work: Callable[[], None]) -> int:
    """Run it in a child; return its exit code, or that it hangs."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.register(signal.SIGUSR1, file=2)
            torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    descriptor = os.pidfd_open(child)
    ended, _, _ = select.select([descriptor], [], [], SECONDS)
    while not ended and waits_for_the_disk(child):
        ended, _, _ = select.select([descriptor], [], [], SECONDS)
    if not ended:
        show_where_it_hangs(child)
        os.kill(child, signal.SIGKILL)
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if ended else HANGS


@pytest.fixture(autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A child waits for ever for a module that another thread was importing: that is Python's."""
    path = tmp_path_factory.mktemp("first")
    saves_lazily(state_of(1), path / "a")
    saves_and_loads(state_of(3), state_of(4), path / "b")


@contextmanager
def saving_all_the_time(directory: Path) -> Iterator[None]:
    """Save lazily in another thread, one save after the other."""
    state, ended, failures = state_of(1), threading.Event(), []

    def saves() -> None:
        for number in range(1 << 20):
            if ended.is_set():
                return
            try:
                handle = holdfast.save_async(state, directory / f"{number}", stage="lazy")
                state["optimizer"].step()
                handle.result()
            except BaseException as error:
                failures.append(error)
                return

    thread = threading.Thread(target=saves)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert failures == []


@many_forks
def test_a_child_forked_during_lazy_saves_saves_and_loads(tmp_path: Path, forks: int) -> None:
    state, other = state_of(3), state_of(4)  # in a child torch's own locks may be held
    with saving_all_the_time(tmp_path):
        for number in range(forks):
            assert forked(partial(saves_and_loads, state, other, tmp_path / f"child-{number}")) == 0


@many_forks
def test_a_child_forked_during_lazy_saves_saves_lazily(tmp_path: Path, forks: int) -> None:
    state = state_of(5)
    with saving_all_the_time(tmp_path):
        for number in range(forks):
            assert forked(partial(saves_lazily, state, tmp_path / f"child-{number}")) == 0


@pytest.mark.parametrize("io", ["io_uring", "direct", "buffered"])
def test_a_child_saves_beside_the_queue_of_its_parent(tmp_path: Path, io: Any) -> None:
    options = holdfast.Options(pool_bytes=32 << 20, io=io)
    holdfast.save({"w": torch.ones(1 << 20)}, tmp_path / "a", options=options)

    def saves() -> None:
        holdfast.save({"w": torch.ones(1 << 20)}, tmp_path / "b", options=options)

    assert forked(saves) == 0
    holdfast.save({"w": torch.ones(1 << 20)}, tmp_path / "c", options=options)  # it works on
    for name in ("a", "b", "c"):
        assert holdfast.open(tmp_path / name).verify() == []


@many_forks
def test_a_child_forked_while_links_are_kept_saves_links(tmp_path: Path, forks: int) -> None:
    state, other, ended = state_of(3), state_of(4), threading.Event()

    def keeps() -> None:
        while not ended.is_set():
            basis = take_basis("runs/a", 0, 1 << 20)
            keep_basis("runs/a", 0, basis, "runs/a/1", "0" * 32)
            last_link("runs/a", 0)

    thread = threading.Thread(target=keeps)
    thread.start()
    try:
        for number in range(forks):
            saves = partial(saves_and_loads, state, other, tmp_path / f"{number}", codec="delta")
            assert forked(saves) == 0
    finally:
        ended.set()
        thread.join()


IMPORTS = """
import sys, threading
import torch
import holdfast

class Note:
    def find_spec(self, name, *_):
        if threading.current_thread() is not threading.main_thread():
            print(threading.current_thread().name, "imports", name)

sys.meta_path.insert(0, Note())
model = torch.nn.Linear(8, 8)
state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
holdfast.save_async(state, sys.argv[1] + "/a", stage="lazy").result()
holdfast.save_async(state, sys.argv[1] + "/b", codec="delta").result()
"""


def test_the_thread_of_a_save_imports_nothing(tmp_path: Path) -> None:
    """A child that is forked while another thread imports a module can never import it."""
    command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == ""


HELD = """
import _thread, gc, logging, sys, threading, time
from concurrent.futures import thread
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from tests.unit.test_fork import forked, saves_and_loads, saves_lazily, state_of

state, other, path = state_of(3), state_of(4), Path(sys.argv[1])
saves_lazily(state, path / "a")
saves_and_loads(state, other, path / "b")
kinds = (_thread.LockType, _thread.RLock)
locks = [r for o in gc.get_objects() for r in gc.get_referents(o) if isinstance(r, kinds)]
taken_by_os_fork = {id(logging._lock), id(thread._global_shutdown_lock)}
locks = {id(lock): lock for lock in locks if id(lock) not in taken_by_os_fork}
held = []

def holds():
    taken = [lock for lock in locks.values() if lock.acquire(False)]
    held.append(len(taken))
    while held:  # for as long as the child lives
        time.sleep(0.01)
    for lock in taken:
        lock.release()

threading.stack_size(1 << 28)  # else the child's first thread gets this one's number, and its locks
_thread.start_new_thread(holds, ())
threading.stack_size(0)
while not held:
    time.sleep(0.01)
count = held[0]

def saves():
    saves_lazily(state, path / "c")
    saves_and_loads(state, other, path / "d")

code = forked(saves)
held.clear()
print(count, code)
"""


def test_a_child_needs_no_lock_that_another_thread_of_its_parent_held(tmp_path: Path) -> None:
    """Whichever: a thread of the parent holds every lock of Python's at the fork.

    `functools.cached_property` has one of each class, before Python 3.12.
    """
    command = [sys.executable, "-c", HELD, str(tmp_path), str(Path(__file__).parents[2])]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    count, code = map(int, ended.stdout.split())
    assert count > 20
    assert code == 0


class Saved(Dataset[int]):
    """Each sample is what a worker read from a checkpoint of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        path = self.directory / f"worker-{os.getpid()}-{index}"
        holdfast.save({"n": torch.tensor([index])}, path, options=SMALL)
        with holdfast.open(path) as checkpoint:
            return int(checkpoint.tensor("n"))


def test_workers_of_a_data_loader_start_at_any_moment_of_a_save(tmp_path: Path) -> None:
    state = state_of(1)
    for number in range(10):
        handle = holdfast.save_async(state, tmp_path / f"{number}", stage="lazy")
        for _ in range(number * 500):  # later and later in it
            pass
        loader = DataLoader(
            Saved(tmp_path), num_workers=2, multiprocessing_context="fork", timeout=SECONDS
        )
        assert [int(batch) for batch in loader] == [0, 1]
        handle.result()
        state["optimizer"].step()
