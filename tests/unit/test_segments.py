"""What a codec makes is put where it is written from: segments, and the files they go to."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast._core import checksum
from holdfast.codecs import Delta
from holdfast.codecs.base import Payload
from holdfast.engine import stream, workspace, write
from holdfast.engine.basis import forget_bases
from holdfast.engine.workspace import Segment
from holdfast.errors import CorruptError, StoreError
from holdfast.options import Options
from holdfast.testing import Fault, faulty

from .test_codec_properties import manifest, payloads
from .test_lossless import trained

NewPath = Callable[[], Path]
MIB = 1 << 20


def noisy(tensors: int = 12, size_bytes: int = 3 * MIB) -> dict[str, torch.Tensor]:
    """Weights that a codec makes a little smaller: each task is a segment written by itself."""
    torch.manual_seed(11)
    return {f"w{n}": 0.02 * torch.randn(size_bytes // 4000, 1000) for n in range(tensors)}


def is_whole(path: Path, state: dict[str, torch.Tensor]) -> bool:
    """Whether a checkpoint holds a state, and no check of it fails."""
    with holdfast.open(path) as checkpoint:
        found = checkpoint.state()
        return not checkpoint.verify() and all(torch.equal(found[k], state[k]) for k in state)


@pytest.mark.parametrize(
    "make", [lambda: noisy(4), lambda: noisy(300, 8000), trained], ids=["large", "small", "trained"]
)
def test_one_call_for_a_task_makes_the_bytes_that_many_calls_do(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, make: Callable[[], dict[str, Any]]
) -> None:
    state, options = make(), Options(chunk_elements=50_000)
    holdfast.save(state, one := new_path(), codec="lossless", options=options)
    monkeypatch.setattr(Delta, "by_segment", False)
    holdfast.save(state, many := new_path(), codec="lossless", options=options)
    assert payloads(one) == payloads(many)
    assert np.array_equal(manifest(one).table.shard_digest, manifest(many).table.shard_digest)


@pytest.mark.parametrize("background", [False, True])
def test_one_call_for_a_task_makes_the_links_that_many_calls_do(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """By bases in memory and read back, of tensors that changed, or not, or are as small as it."""
    runs, options = [new_path(), new_path()], Options(chunk_elements=5000)
    for run, by_segment in zip(runs, (True, False), strict=True):
        monkeypatch.setattr(Delta, "by_segment", by_segment)
        forget_bases()
        state = trained() | {"few": torch.zeros(3), "bytes": torch.arange(100, dtype=torch.uint8)}
        state["turned"] = torch.linspace(-1, 1, 12_000).reshape(100, 120).t()
        state["frozen"] = torch.linspace(-1, 1, 12_000)
        for step in range(1, 5):
            path = run / f"step-{step:08d}"
            if background:
                holdfast.save_async(state, path, step=step, codec="delta", options=options).result()
            else:
                holdfast.save(state, path, step=step, codec="delta", options=options)
            state["turned"].mul_(1.0001)
            state["few"] += 1
            for moved in state["model"].values():
                moved.mul_(1.001)
            if step == 2:
                forget_bases()
    found = set[int]()
    for step in range(1, 5):
        one, many = (run / f"step-{step:08d}" for run in runs)
        assert payloads(one) == payloads(many)
        assert np.array_equal(manifest(one).table.shard_digest, manifest(many).table.shard_digest)
        assert holdfast.verify(one, deep=True).damage == ()
        found |= {int(mode) >> 24 for mode in manifest(one).table.chunk_size_mode}
    assert {6, 7} <= found


@pytest.mark.parametrize("threads", [1, 3])
def test_files_end_where_they_would_if_nothing_were_ahead(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Whether a shard goes into a file is known only when what is ahead of it has its size."""
    made = workspace.Threads.__init__

    def few(self: workspace.Threads) -> None:
        made(self)
        self.count = threads

    monkeypatch.setattr(workspace.Threads, "__init__", few)
    state = noisy(40, 512 << 10)
    holdfast.save(state, path := new_path(), codec="lossless", options=Options(file_bytes=2 * MIB))
    assert is_whole(path, state)
    sizes = [file.stat().st_size for file in sorted((path / "data").rglob("*.hf"))]
    assert all(size <= 2 * MIB for size in sizes)
    # Of 512 KiB each takes some 430, and the next is taken for 512 until it has been encoded.
    assert len(sizes) == 10


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_state_that_changes_while_it_is_saved_gives_a_whole_checkpoint(
    new_path: NewPath, codec: str
) -> None:
    """Not the one that was meant, but every byte is what its checksums say."""
    state, ended = noisy(8), threading.Event()

    def change() -> None:
        while not ended.is_set():
            for values in state.values():
                values.numpy()[::7] += 0.001

    changing = threading.Thread(target=change)
    changing.start()
    try:
        paths = [new_path() for _ in range(4)]
        for path in paths:
            holdfast.save(state, path, codec=codec)
    finally:
        ended.set()
        changing.join()
    for path in paths:
        with holdfast.open(path) as checkpoint:
            assert not checkpoint.verify(deep=True)


@pytest.mark.parametrize("nth", [1, 2, 6])
@pytest.mark.parametrize("codec", ["lossless", "delta"])
def test_a_write_that_fails_ends_the_save_and_harms_no_other(
    new_path: NewPath, codec: str, nth: int
) -> None:
    state, path = noisy(), new_path()
    fault = Fault("write", nth, persistent=True)
    with faulty(fault), pytest.raises(StoreError):
        holdfast.save(state, path, codec=codec)
    assert not list(path.rglob("*.hf"))
    holdfast.save(state, path, codec=codec)
    assert is_whole(path, state)


@pytest.mark.parametrize("codec", ["lossless", "delta"])
def test_a_failed_sync_writes_all_of_it_again(new_path: NewPath, codec: str) -> None:
    state, path = noisy(), new_path()
    with faulty(Fault("sync")):
        holdfast.save(state, path, codec=codec)
    assert is_whole(path, state)


def test_nothing_is_synced_before_it_is_written(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = [], write.DataFileWriter._sync

    def noted(self: write.DataFileWriter, call: Callable[[Any], None], target: Any) -> None:
        synced.append(self._lease.queue.pending)
        sync(self, call, target)

    monkeypatch.setattr(write.DataFileWriter, "_sync", noted)
    with faulty(Fault("write", 3, action="delay", argument=300)):
        threads = Options(io="direct")  # one waits, the others go on
        holdfast.save(noisy(4), new_path(), codec="lossless", options=threads)
    assert synced == [0, 0]


def test_few_segments_are_on_their_way_at_once(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, lend = [0], stream.FileStream.lend

    def counted(self: Any, *values: Any) -> int:
        at = lend(self, *values)
        seen[0] = max(seen[0], len(self._lent))
        return at

    monkeypatch.setattr(stream.FileStream, "lend", counted)
    monkeypatch.setattr(stream, "LENT_IN_FLIGHT_MAX", 2)
    state = noisy()
    holdfast.save(state, path := new_path(), codec="lossless")
    assert 1 <= seen[0] <= 2
    assert is_whole(path, state)


def test_a_damaged_gap_between_segments_is_noticed(new_path: NewPath) -> None:
    holdfast.save(noisy(4), path := new_path(), codec="lossless")
    table = manifest(path).table
    ends = 64 * table.chunk_offset.astype(np.int64) + (table.chunk_size_mode & 0xFFFFFF)
    (file,) = (path / "data").rglob("*.hf")
    with file.open("r+b") as opened:
        opened.seek(int(ends[0]))
        opened.write(b"\1")
    with pytest.raises(CorruptError, match="zero"):
        holdfast.load(path, into={name: torch.zeros_like(w) for name, w in noisy(4).items()})


def test_a_segment_begins_where_its_payloads_may(new_path: NewPath) -> None:
    """Large raw payloads begin on a page of the file, also where the segment is a small one."""
    random = torch.randint(0, 256, (70_000,), dtype=torch.uint8)
    state = {"a": torch.arange(300), "b": random, "c": torch.arange(9)}
    holdfast.save(state, path := new_path(), codec="lossless")
    assert is_whole(path, state)
    table = manifest(path).table
    raw = (table.chunk_size_mode >> 24) == 0
    large = (table.chunk_size_mode & 0xFFFFFF) >= 65_536
    assert (raw & large).any()
    assert not (64 * table.chunk_offset.astype(np.int64)[raw & large] % 4096).any()


def test_a_segment_zeroes_what_lies_between() -> None:
    segment = Segment(3 * 5000)
    memory = workspace.bytes_at(segment.address, 8192)
    memory.fill_(7)
    source = torch.full((5000,), 9, dtype=torch.uint8)
    assert segment.add(Payload(source.data_ptr(), 10, 2), 1)[0] == 0
    assert segment.add(Payload(0, 0, 5), 2) == (0, checksum(0, 0, 2))
    assert segment.add(Payload(source.data_ptr(), 5000, 0), 3) == (
        64,
        checksum(source.data_ptr(), 5000, 3),
    )
    assert segment.fill_page() == 8192
    expected = torch.zeros(8192, dtype=torch.uint8)
    expected[:10], expected[64:5064] = 9, 9
    assert torch.equal(memory, expected)
    segment.close()
