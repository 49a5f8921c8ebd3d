"""A copy to an object store sends what it has read from where it is, and reads on meanwhile.

The client is a double: it keeps the memory that it is given for a while, as real ones do while
requests are under way, and puts the object together when it is closed.
"""

import errno
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import obstore
import pytest
import torch

import holdfast
from holdfast.engine.slot_writes import SLOTS_MAX, slots_for
from holdfast.engine.stream import write_error
from holdfast.errors import NoSpaceError, NotCommittedError, StoreError
from holdfast.options import SLOT_BYTES
from holdfast.stores import local, objects_files, remote_files
from holdfast.stores.base import Code
from holdfast.stores.objects_settings import PART_BYTES
from holdfast.stores.url import open_store
from stores.test_copy import files

TENSORS, TENSOR_BYTES = 5, SLOT_BYTES  # in one file, in more parts than the small pool has slots
_NUMBERS = itertools.count()
SMALL = holdfast.Options(pool_bytes=2 * SLOT_BYTES)


class LateWriter:
    """A writer of obstore that copies the bytes of each call only some time later."""

    late_s = 0.05
    part_bytes = PART_BYTES
    settings: ClassVar[dict[str, Any]] = {}
    fail_at = -1  # at this call
    longest_kept = 0  # calls whose memory was kept at once
    kept = 0

    def __init__(self, client: Any, key: str, **settings: Any) -> None:
        self._client, self._key = client, key
        LateWriter.settings = settings
        self._threads: list[threading.Thread] = []
        self._pieces: dict[int, bytes] = {}
        self._has_failed = False

    def __enter__(self) -> "LateWriter":
        return self

    def __exit__(self, kind: object, *more: object) -> None:
        self._join()

    def write(self, data: memoryview) -> None:
        """Take memory, which stays as it is until nothing refers to it."""
        if self._has_failed:  # as obstore's: the cause is not told again
            raise OSError("this writer has failed")
        if len(self._threads) == LateWriter.fail_at:
            self._has_failed = True
            raise OSError("so says the double")
        LateWriter.kept += 1
        LateWriter.longest_kept = max(LateWriter.longest_kept, LateWriter.kept)
        thread = threading.Thread(target=self._send, args=([data], len(self._threads)))
        self._threads.append(thread)
        thread.start()

    def _send(self, held: list[memoryview], number: int) -> None:
        time.sleep(self.late_s)
        self._pieces[number] = bytes(held[0])
        LateWriter.kept -= 1
        held.clear()

    def close(self) -> None:
        """Make the object."""
        self._join()
        if self._has_failed:
            raise OSError("this writer has failed")
        data = b"".join(self._pieces[n] for n in range(len(self._threads)))
        obstore.put(self._client, self._key, data)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LateWriter]]:
    """Let uploads to ``memory://`` keep memory while they send it, as those to a server do."""
    real = objects_files.Upload.__init__

    def gives_back(self: Any, *given: Any) -> None:
        real(self, *given)
        self.gives_back = True
        self._traffic = self._traffic._replace(part_bytes=LateWriter.part_bytes)

    monkeypatch.setattr(objects_files.Upload, "__init__", gives_back)
    monkeypatch.setattr(obstore, "open_writer", LateWriter)
    for name, value in {
        "part_bytes": PART_BYTES,
        "fail_at": -1,
        "longest_kept": 0,
        "kept": 0,
    }.items():
        monkeypatch.setattr(LateWriter, name, value)
    yield LateWriter


@pytest.fixture
def source(tmp_path: Path) -> str:
    chance = np.random.default_rng(1)
    made = chance.integers(0, 256, (TENSORS, TENSOR_BYTES), np.uint8)
    path = str(tmp_path / "source")
    options = holdfast.Options(file_bytes=1 << 30)
    holdfast.save(
        {f"t{n}": torch.from_numpy(row) for n, row in enumerate(made)}, path, **{"options": options}
    )
    assert len([*Path(path).glob("data/*/*")]) == 1
    return path


@pytest.fixture
def target() -> str:
    return f"memory://slots/{next(_NUMBERS)}"


@pytest.mark.parametrize("options", [None, SMALL], ids=["default", "small"])
def test_memory_is_read_into_again_only_when_it_was_sent(
    source: str, target: str, late: type[LateWriter], options: holdfast.Options | None
) -> None:
    holdfast.copy_checkpoint(source, target, options=options)
    assert files(source) == files(target)
    assert not holdfast.verify(target).damage
    assert late.longest_kept >= 1 + (options is None)


def test_a_small_file_that_fails_does_not_hold_its_memory_for_ever(
    tmp_path: Path, target: str, late: type[LateWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put by one request, whose error refers to the call, and the call to the memory."""
    source, real = str(tmp_path / "small"), obstore.put
    holdfast.save({"t": torch.ones(1000)}, source)

    def put(client: Any, key: str, *given: Any, **more: Any) -> Any:
        if "/data/" in key:
            raise OSError("so says the double")
        return real(client, key, *given, **more)

    monkeypatch.setattr(obstore, "put", put)
    for _ in range(2):
        with pytest.raises(StoreError, match="so says the double"):
            holdfast.copy_checkpoint(source, target)
    monkeypatch.setattr(obstore, "put", real)
    holdfast.copy_checkpoint(source, target)
    assert files(source) == files(target)


@pytest.mark.parametrize("part_bytes", [5 << 20, 3 * SLOT_BYTES, 1 << 30])
def test_a_part_may_be_larger_than_all_memory(
    source: str, target: str, late: type[LateWriter], part_bytes: int
) -> None:
    late.part_bytes = part_bytes
    holdfast.copy_checkpoint(source, target, options=SMALL)
    assert files(source) == files(target)


def test_from_a_store_to_a_store(source: str, target: str, late: type[LateWriter]) -> None:
    holdfast.copy_checkpoint(source, f"{target}-first")
    holdfast.copy_checkpoint(f"{target}-first", target)
    assert files(source) == files(target)


def test_a_pool_is_larger_only_if_that_is_allowed() -> None:
    def slots(parts: int, part_bytes: int, pool_bytes: int | None = None) -> int:
        kind = remote_files.ThreadedQueueKind(parts, part_bytes, True)
        store = SimpleNamespace(queue_kind=lambda *given: kind)
        return slots_for(cast("Any", store), pool_bytes)

    assert slots(8, SLOT_BYTES) == 10 and slots(1, 5 << 20) == 3
    assert slots(16, 32 << 20) == SLOTS_MAX  # 34 would be touched for the smallest checkpoint
    assert slots(16, 32 << 20, 544 << 20) == 34 and slots(16, 32 << 20, 320 << 20) == 20


def test_a_disk_is_asked_without_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "probe", lambda *place: pytest.fail("it has written a file"))
    assert slots_for(open_store(tmp_path)) == 0


def test_what_was_read_is_not_copied_on_its_way(
    source: str, target: str, late: type[LateWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = list[int]()
    real = remote_files.Files.write

    def write(self: Any, fd: int, data: Any, offset: int) -> None:
        copied.append(len(data))
        real(self, fd, data, offset)

    monkeypatch.setattr(remote_files.Files, "write", write)
    holdfast.copy_checkpoint(source, target)
    assert sum(copied) < SLOT_BYTES  # header, footer and gaps


@pytest.mark.parametrize("fail_at", range(6))
def test_a_write_that_fails_says_so_and_the_next_copy_is_whole(
    source: str, target: str, late: type[LateWriter], fail_at: int
) -> None:
    late.fail_at = fail_at
    for options in (None, SMALL):
        with pytest.raises(StoreError, match="so says the double"):
            holdfast.copy_checkpoint(source, target, options=options)
        with pytest.raises(NotCommittedError):
            holdfast.open(target)
    late.fail_at = -1
    holdfast.copy_checkpoint(source, target)
    assert files(source) == files(target)


def test_a_full_store_is_told_once_and_in_its_own_words() -> None:
    told = remote_files._code_of(write_error("there/file", 0, 9, 0, Code(errno.ENOSPC, "x: full")))
    error = write_error("there/file", 4096, 9, 0, told)
    assert isinstance(error, NoSpaceError) and error.errno == errno.ENOSPC
    assert str(error) == "x: full; free space or choose another directory"


@pytest.mark.parametrize(("slots", "parts"), [(2, 2), (3, 3), (8, 8), (40, 8)])
def test_a_writer_has_no_more_parts_in_flight_than_there_is_memory_for(
    source: str, target: str, late: type[LateWriter], slots: int, parts: int
) -> None:
    """It tells of a part that failed only when it has so many."""
    options = holdfast.Options(pool_bytes=slots * SLOT_BYTES)
    holdfast.copy_checkpoint(source, target, options=options)
    assert late.settings["max_concurrency"] == parts
