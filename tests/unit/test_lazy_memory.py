"""Copies from memory that may go away meanwhile: no handler of signals, nothing that is forbidden.

Each test runs in a process of its own, which it may end, or forbid things to.
"""

import ctypes
import errno
import faulthandler
import platform
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateError

SECONDS = 120  # more than any of it takes
CALLS = {  # what a filter forbids, by machine
    "x86_64": {"process_vm_readv": 310, "process_vm_writev": 311},
    "aarch64": {"process_vm_readv": 270, "process_vm_writev": 271},
}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ERRNO, ALLOW = 0x00050000, 0x7FFF0000  # what a filter says: fail so, go on


def run(script: Callable[..., None], *values: Any) -> "subprocess.CompletedProcess[str]":
    """Call a function of this module in a process of its own."""
    call = f"from unit.{Path(__file__).stem} import {script.__name__} as run; run(*{values!r})"
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-c", call]
    return subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=SECONDS)


def large(megabytes: int) -> dict[str, Any]:
    weight = nn.Parameter(torch.ones(megabytes << 18))  # so large that freeing it unmaps it
    return {"w": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}


def handlers() -> list[bytes]:
    """Return what the kernel has for the signals of faults."""
    libc = ctypes.CDLL(None)
    found = []
    for number in (signal.SIGSEGV, signal.SIGBUS):
        room = ctypes.create_string_buffer(256)
        assert libc.sigaction(int(number), None, room) == 0
        found.append(room.raw[:16])  # the handler, and whom it blocks
    return found


def forbid(names: list[str], error: int) -> None:
    """Make system calls fail from here on, as containers do."""
    program = [struct.pack("=HBBI", 0x20, 0, 0, 0)]  # load the number of the call
    for name in names:
        number = CALLS[platform.machine()][name]
        program.append(struct.pack("=HBBI", 0x15, 0, 1, number))  # is it this one?
        program.append(struct.pack("=HBBI", 0x06, 0, 0, ERRNO | error))
    program.append(struct.pack("=HBBI", 0x06, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    given = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, given) == 0


def looks_at_handlers(directory: str) -> None:
    faulthandler.enable()
    before = handlers()
    for number in range(3):
        handle = holdfast.save_async(large(64), f"{directory}/{number}", stage="lazy")
        while not handle._staged.is_set():
            assert handlers() == before
        handle.result()
    assert handlers() == before


def installs_handlers_meanwhile(directory: str) -> None:
    default = handlers()
    for number in range(4):
        state = large(64)
        handle = holdfast.save_async(state, f"{directory}/{number}", stage="lazy")
        faulthandler.enable()
        enabled = handlers()
        assert enabled != default
        handle.result()
        assert handlers() == enabled
        handle = holdfast.save_async(state, f"{directory}/{number}-off", stage="lazy")
        faulthandler.disable()
        handle.result()
        assert handlers() == default


def faults_after_saves(directory: str) -> None:
    for number in range(4):
        handle = holdfast.save_async(large(64), f"{directory}/{number}", stage="lazy")
        faulthandler.enable()
        handle.result()
    print("saved", flush=True)
    ctypes.string_at(0)


def saves_without(names: list[str], error: int, directory: str) -> None:
    forbid(names, error)
    state = {**large(33), "n": 3}
    with torch.no_grad():
        state["w"].copy_(torch.randn_like(state["w"]))
    holdfast.save_async(state, f"{directory}/a", stage="lazy").result()
    with holdfast.open(f"{directory}/a") as checkpoint:
        assert checkpoint.tensor("w").equal(state["w"].detach())
    failed = 0
    for number in range(12):
        state = large(64)
        handle = holdfast.save_async(state, f"{directory}/{number}", stage="lazy")
        for _ in range(number * 200):
            pass
        state["w"].untyped_storage().resize_(0)
        try:
            handle.result()
        except StateError as fault:
            assert "memory of w was freed" in str(fault)
            failed += 1
    assert failed


def test_a_lazy_save_touches_no_handler_of_signals(tmp_path: Path) -> None:
    ended = run(looks_at_handlers, str(tmp_path))
    assert ended.returncode == 0, ended.stderr


def test_handlers_installed_or_removed_during_a_lazy_save_stay_so(tmp_path: Path) -> None:
    ended = run(installs_handlers_meanwhile, str(tmp_path))
    assert ended.returncode == 0, ended.stderr


def test_a_fault_after_lazy_saves_ends_the_process_at_once(tmp_path: Path) -> None:
    ended = run(faults_after_saves, str(tmp_path))
    assert ended.stdout == "saved\n", ended.stderr
    assert ended.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ended.stderr  # the other handler had its turn


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_lazy_save_does_without_the_calls_that_containers_forbid(
    tmp_path: Path, error: int
) -> None:
    ended = run(saves_without, ["process_vm_readv", "process_vm_writev"], error, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
