"""Loads from a store whose client reads into memory of its own: checked and placed in its threads.

The bucket is in this process; the code is that of every store of objects.
"""

import signal
import threading
from typing import Any

import obstore
import pytest
import torch

import holdfast
from holdfast import worker
from holdfast.errors import CorruptError
from holdfast.stores.objects_client import client
from holdfast.stores.objects_files import Opened

CHUNK = 4 << 20  # bytes of a chunk of fp32
TENSORS = 8


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    made = f"memory://fetch/{request.node.name}"
    holdfast.save(state_of(1.0), made)
    return made


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.full((CHUNK // 4,), value + n) for n in range(TENSORS)}


def same(found: dict[str, torch.Tensor], value: float) -> list[str]:
    """Return the names of the tensors that have the values of `state_of`."""
    return [name for name, good in state_of(value).items() if torch.equal(found[name], good)]


def test_neighbours_are_read_by_one_request(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, read = [], Opened.read

    def counted(self: Opened, size: int, offset: int) -> Any:
        sizes.append(size)
        return read(self, size, offset)

    monkeypatch.setattr(Opened, "read", counted)
    found = state_of(0.0)
    holdfast.load(path, into=found)
    assert len(same(found, 1.0)) == TENSORS
    assert [size // CHUNK for size in sizes if size >= CHUNK] == [2] * (TENSORS // 2)


def test_what_lies_otherwise_than_stored_is_placed_too(path: str) -> None:
    found: dict[str, Any] = {name: torch.zeros(CHUNK // 4, 2)[:, 0] for name in state_of(0.0)}
    found["t3"] = torch.zeros(CHUNK // 4)
    holdfast.load(path, into=found)
    assert len(same(found, 1.0)) == TENSORS


def test_damage_names_what_was_filled_by_then(path: str) -> None:
    _damage(path, 5 * CHUNK + CHUNK // 2)
    found = state_of(0.0)
    with pytest.raises(CorruptError, match=r"checksum .* MANIFEST says") as raised:
        holdfast.load(path, into=found)
    assert sorted(raised.value.filled) == same(found, 1.0)
    assert "t5" not in raised.value.filled


def test_nothing_is_placed_for_a_caller_that_was_interrupted(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, is_sent = Opened.read, threading.Lock()
    (stop, is_told) = worker._Job.stop, threading.Event()

    def told(self: Any, error: BaseException) -> None:
        is_told.set()
        stop(self, error)

    def interrupting(self: Opened, size: int, offset: int) -> Any:
        if size >= CHUNK and is_sent.acquire(blocking=False):
            # To the thread that waits: any other may get what is sent to the process.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert size < CHUNK or is_told.wait(10)
        return read(self, size, offset)

    monkeypatch.setattr(worker._Job, "stop", told)
    monkeypatch.setattr(Opened, "read", interrupting)
    found = state_of(0.0)
    # Shells start what runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            holdfast.load(path, into=found)
    finally:
        signal.signal(signal.SIGINT, before)
    assert same(found, 1.0) == []


def _damage(path: str, at: int) -> None:
    """Change a byte of the only data file."""
    bucket, key = client("memory", "fetch"), path.removeprefix("memory://fetch/")
    (item,) = [item for part in obstore.list(bucket, f"{key}/data") for item in part]
    data = bytearray(obstore.get(bucket, item["path"]).bytes())
    data[at] ^= 1
    obstore.put(bucket, item["path"], bytes(data))
