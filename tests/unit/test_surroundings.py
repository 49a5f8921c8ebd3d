"""A process whose surroundings are odd: closed standard streams, a sandbox, a shared directory."""

import errno
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import processes
from holdfast.engine import memory, workspace
from holdfast.errors import BusyError, StoreError
from holdfast.runs import progress_file
from holdfast.stores.local import LocalStore
from holdfast.testing import Fault, faulty

STATE = {"w": torch.arange(1000.0)}

CLOSED = """
import os, sys, threading, torch, holdfast
from holdfast.errors import HoldfastError

root, ended = sys.argv[1], False
state = {"w": torch.randn(300_000)}

def logs():
    while not ended:
        for descriptor in (0, 1, 2):
            try:
                os.write(descriptor, b"a library says something")
            except OSError:
                pass

thread = threading.Thread(target=logs)
thread.start()
found = []
for number in range(12):
    options = holdfast.Options(io=("io_uring", "direct", "buffered")[number % 3])
    path, other = f"{root}/{number}", {"w": torch.zeros(300_000)}
    try:
        holdfast.save_async(state, path, options=options).result()
        holdfast.load(path, into=other, options=options)
        found.append("same" if other["w"].equal(state["w"]) else "another")
    except HoldfastError as error:
        found.append(str(error))
ended = True
thread.join()
with open(f"{root}/found", "w") as file:
    file.write("\\n".join(found))
"""


def test_what_is_written_to_closed_standard_streams_is_written_to_no_checkpoint(
    tmp_path: Path,
) -> None:
    """A daemon may have closed them; a library that logs to descriptor 2 does not know."""
    script = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", script, sys.executable, CLOSED, str(tmp_path)], check=True)
    assert (tmp_path / "found").read_text().split("\n") == ["same"] * 12


def test_a_job_takes_a_run_whose_old_epochs_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a sticky directory, where they are another user's."""
    program = (
        "import torch, holdfast\n"
        f"with holdfast.Checkpointer({str(tmp_path)!r}, every=1) as c:\n"
        "    c.step(1, {'w': torch.zeros(1000)})\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    real = LocalStore.remove

    def remove(self: LocalStore, name: str) -> None:
        if name.startswith(".epoch-"):
            raise StoreError(f"unlink {name}: Operation not permitted")
        real(self, name)

    monkeypatch.setattr(LocalStore, "remove", remove)
    with holdfast.Checkpointer(tmp_path, every=1) as checkpointer:
        assert checkpointer.restore(dict(STATE)) == 1
        checkpointer.step(2, STATE)
        checkpointer.wait()
        checkpointer.step(3, STATE)
    assert len([*tmp_path.glob(".epoch-*")]) == 2
    assert holdfast.Checkpointer(tmp_path).steps() == [1, 2, 3]


def test_a_job_that_cannot_be_seen_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid may count in another container, or /proc may hide it."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(progress_file, "TICK_S", 0.05)
    monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    with holdfast.Checkpointer(tmp_path, every=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, STATE)
        while not [*tmp_path.glob(".progress-*")]:
            pass
        monkeypatch.undo()
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(processes, "pid_space", lambda: 7)
            with pytest.raises(BusyError, match=f"in use by process {ended.pid} on"):
                holdfast.prune(tmp_path, holdfast.Keep.latest(1), dry_run=False)
        with monkeypatch.context() as hidden:
            hidden.setattr(os, "kill", _not_permitted)
            with pytest.raises(BusyError, match=f"in use by process {ended.pid} on"):
                holdfast.prune(tmp_path, holdfast.Keep.latest(1), dry_run=False)
        assert holdfast.prune(tmp_path, holdfast.Keep.latest(1)).removed == (1, 2)  # it has ended


def _not_permitted(*_: Any) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_the_name_of_a_control_group_may_be_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_bytes(b"0::/\xff\xfe\n")
    assert memory._lines(tmp_path / "cgroup") == ["0::/\udcff\udcfe"]


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_sandbox_may_forbid_to_ask_for_cores_and_priorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    for name in ("sched_getaffinity", "getpriority", "setpriority"):
        monkeypatch.setattr(os, name, _not_permitted)
    holdfast.save(STATE, tmp_path / "a", codec=codec)
    assert workspace.Threads().count >= 1
    other = {"w": torch.zeros(1000)}
    holdfast.load(tmp_path / "a", into=other)
    assert other["w"].equal(STATE["w"])


def test_a_thread_of_a_codec_that_cannot_be_started_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with pytest.raises(StoreError, match=r"start a thread .*: can't start new thread\. Allow"):
        holdfast.save({"w": torch.randn(1 << 20)}, tmp_path / "a", codec="lossless")
    assert not (tmp_path / "a" / "MANIFEST").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_an_export_to_a_file_system_without_locks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    holdfast.save(STATE, tmp_path / "a")
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match=r"This file system has no locks \(flock\)\. Choose"):
        holdfast.export_checkpoint(tmp_path / "a", tmp_path / "b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_file_system_without_hard_links_is_named_in_the_error(tmp_path: Path) -> None:
    no_links = faulty(Fault("link", persistent=True, argument=errno.EPERM))
    with no_links, pytest.raises(StoreError, match="Operation not permitted") as caught:
        holdfast.save(STATE, tmp_path / "a")
    assert any("has no hard links" in note for note in caught.value.__notes__)
