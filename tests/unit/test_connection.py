"""What a process group can do, and the connection to its store that background saves have."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import holdfast
from holdfast.errors import OptionError, PeerError
from holdfast.group import torch as group_module

HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host() -> Iterator[subprocess.Popen[str]]:
    """Run the rank that keeps the store."""
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.fixture
def store(host: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Connect to it as a process group does."""
    assert host.stdout is not None
    found = TCPStore("127.0.0.1", int(host.stdout.readline()), wait_for_workers=False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _: found)
    monkeypatch.setattr(group_module, "ANSWER_S", 0.5)
    return found


class Ranks:
    """Stand for a process group."""


def test_a_store_whose_host_is_frozen_holds_nobody_up(
    host: subprocess.Popen[str], store: Any
) -> None:
    connected: Any = Ranks()
    new: Any = Ranks()
    group_module._connection(connected)
    host.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, host.pid, os.WSTOPPED)  # its threads go on for a moment
    for each in (connected, new):
        started = time.monotonic()
        with pytest.raises(PeerError, match="does not answer"):
            group_module._connection(each)
        assert time.monotonic() - started < 10


def test_a_connection_that_a_thread_waits_on_is_not_waited_for(store: Any) -> None:
    ranks: Any = Ranks()
    first = group_module._connection(ranks)
    thread = threading.Thread(target=_wait, args=(first, 5), daemon=True)
    thread.start()
    second, until_s = first, time.monotonic() + 4
    while second is first and time.monotonic() < until_s:  # the thread is on its way to wait
        second = group_module._connection(ranks)
    assert second is not first and thread.is_alive()
    assert group_module._connection(ranks) is second


def test_a_store_kept_here_outlives_its_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _: kept[0])
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", Ranks)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "gloo")
    ranks = group_module.TorchGroup(None).background("a", time.monotonic() + 5)
    client = kept[0].clone()
    del kept[:]  # as destroy_process_group does
    client.set("holdfast/a/1/1", len(b"here").to_bytes(8, "little") + b"here")
    assert ranks.gather(b"there") == [b"there", b"here"]


def _wait(store: Any, seconds: float) -> None:
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(seconds=seconds))


@pytest.mark.skipif(torch.cuda.is_available(), reason="plans in the memory of the device then")
def test_a_group_without_a_backend_for_the_cpu_says_what_to_add(new_path: Any) -> None:
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OptionError, match=r"none for the CPU.*'cpu:gloo,cuda:nccl'"):
            holdfast.save({"w": torch.ones(2)}, new_path())
    finally:
        dist.destroy_process_group()
