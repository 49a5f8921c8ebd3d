"""What several ranks need is read once and sent: who reads what, and what happens when one fails.

Ranks are threads of one process with queues between them; the checkpoint, the disk and the checks
are real. Real processes share in tests/distributed.
"""

import itertools
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from format.simulated_ranks import ThreadGroup, run_ranks
from holdfast import Options, worker
from holdfast.engine.check import read_manifest
from holdfast.engine.place import Targets
from holdfast.errors import CorruptError, HoldfastError, PeerError, StoreError
from holdfast.format.manifest import Manifest
from holdfast.layout import whole
from holdfast.options import SLOT_BYTES
from holdfast.plan.load_plan import find_chunks, wants_of
from holdfast.plan.reads import Reads
from holdfast.plan.share_plan import SharedRun, encode_rows, holders_of, share_out
from holdfast.stores.url import open_store

WAIT_S = 30.0
Queues = dict[tuple[int, int], "queue.Queue[bytes]"]


class SendingThreads(ThreadGroup):
    """Ranks that send: a queue for each pair. `spoil` changes what is on its way."""

    sends = True
    spoil: Callable[[bytes], bytes] = staticmethod(bytes)

    def __init__(self, inner: ThreadGroup, queues: Queues) -> None:
        super().__init__(inner.rank, inner._table, inner._meeting)
        self._queues = queues

    def start_send(self, data: memoryview, rank: int) -> Callable[[], None]:
        self._queues[self.rank, rank].put(self.spoil(bytes(data)))
        return lambda: None

    def start_receive(self, data: memoryview, rank: int) -> Callable[[], None]:
        def wait() -> None:
            data[:] = self._queues[rank, self.rank].get(timeout=WAIT_S)

        return wait


def load_together(
    path: Path, world_size: int, wanted: Callable[[int], dict[str, torch.Tensor]], **group: object
) -> list[tuple[dict[str, torch.Tensor], holdfast.LoadReport | HoldfastError]]:
    """Load on every rank, each with a pool of its own; return targets, and reports or errors."""
    ranks = range(world_size)
    queues: Queues = {(a, b): queue.Queue() for a in ranks for b in ranks}

    def work(
        inner: ThreadGroup,
    ) -> tuple[dict[str, torch.Tensor], holdfast.LoadReport | HoldfastError]:
        sending = SendingThreads(inner, queues)
        for name, value in group.items():
            setattr(sending, name, value)
        into = wanted(inner.rank)
        options = Options(pool_bytes=(2 + inner.rank) * SLOT_BYTES)
        try:
            report = holdfast.load(path, into=into, strict=False, group=sending, options=options)
        except HoldfastError as error:
            return into, error
        return into, report

    return run_ranks(world_size, work)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("shared") / "c"
    chance = torch.Generator().manual_seed(1)
    sizes = [3_000_000, 1, 0, 70_000, 1 << 20, 5_000, 2_500_000]
    state = {f"w{i}": torch.randn(size, generator=chance) for i, size in enumerate(sizes)}
    holdfast.save(state, path, options=Options(chunk_elements=1 << 16))
    return path, state


@pytest.fixture(scope="module")
def saved_in_files(
    tmp_path_factory: pytest.TempPathFactory, saved: tuple[Path, dict[str, torch.Tensor]]
) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("files") / "c"
    options = Options(chunk_elements=1 << 14, file_bytes=2 << 20)
    holdfast.save(saved[1], path, options=options)
    return path, saved[1]


def blank(state: dict[str, torch.Tensor], names: str) -> dict[str, torch.Tensor]:
    return {f"w{name}": torch.full_like(state[f"w{name}"], -1.0) for name in names}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_replicas_read_each_chunk_once_between_them(
    saved: tuple[Path, dict[str, torch.Tensor]], world_size: int
) -> None:
    path, state = saved
    found = load_together(path, world_size, lambda _: blank(state, "0123456"))
    reports = [report for _, report in found if isinstance(report, holdfast.LoadReport)]
    for into, _ in found:
        assert all(torch.equal(into[name], state[name]) for name in state)
    stored = sum(holdfast.open(path).file_bytes)
    read = [report.bytes_read for report in reports]
    assert sum(read) <= 1.02 * stored
    assert max(read) <= 1.05 * stored / world_size + (1 << 18), "a chunk more than the others"
    assert sum(report.bytes_sent for report in reports) == (world_size - 1) * sum(read)


def test_ranks_that_need_other_things_share_what_is_common(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, state = saved
    names = ["014", "0156", "36", ""]
    found = load_together(path, 4, lambda rank: blank(state, names[rank]))
    for into, report in found:
        assert isinstance(report, holdfast.LoadReport)
        assert all(torch.equal(into[name], state[name]) for name in into)
    once = load_together(path, 1, lambda _: blank(state, "013456"))[0][1]
    assert isinstance(once, holdfast.LoadReport)
    read = [r.bytes_read for _, r in found if isinstance(r, holdfast.LoadReport)]
    assert once.bytes_read <= sum(read) <= 1.02 * once.bytes_read
    assert read[3] == 0, "a rank that needs nothing reads nothing"


def needs(manifest: Manifest, names: set[str]) -> Reads:
    tensors = enumerate(manifest.table.header.tensors)
    wanted = {t.path: (i, [whole(t.shape)]) for i, t in tensors if str(t.path[0]) in names}
    return find_chunks(manifest, wants_of(wanted))


@pytest.mark.parametrize("seed", range(30))
def test_every_chunk_has_one_reader_and_all_ranks_agree(
    saved: tuple[Path, dict[str, torch.Tensor]], seed: int
) -> None:
    path, state = saved
    chance = random.Random(seed)
    manifest = read_manifest(open_store(path))
    world_size = chance.randrange(1, 7)
    kept = chance.uniform(0.1, 1.0)
    reads = []
    for _ in range(world_size):
        needed_here = needs(manifest, {n for n in state if chance.random() < 0.7})
        reads.append(
            needed_here[np.array([chance.random() < kept for _ in needed_here.rows], bool)]
        )
    told = [encode_rows(each) for each in reads]
    shares = [share_out(manifest, reads[r], told, r, SLOT_BYTES) for r in range(world_size)]
    needed = {r: set(reads[r].rows.tolist()) for r in range(world_size)}
    readers: Counter[int] = Counter()
    for rank, (alone, shared) in enumerate(shares):
        own = [read.row for run in alone for read in run.chunks]
        common = [read.row for entry in shared for read in entry.run.chunks]
        assert sorted(own + common) == sorted(needed[rank]), "all that it needs, once"
        readers.update(own)
        for entry in shared:
            assert rank in entry.audience and entry.reader in entry.audience
            for read in entry.run.chunks:
                holders = tuple(r for r in range(world_size) if read.row in needed[r])
                assert entry.audience == holders
            if entry.reader == rank:
                readers.update(read.row for read in entry.run.chunks)
    assert set(readers.values()) <= {1}, "two ranks read a chunk"
    assert set(readers) == set().union(*needed.values())
    for a, b in combinations(range(world_size), 2):
        assert in_common(shares[a][1], b) == in_common(shares[b][1], a)


@pytest.mark.parametrize("seed", range(60))
def test_who_cannot_read_a_file_is_helped_by_one_that_can(
    saved_in_files: tuple[Path, dict[str, torch.Tensor]], seed: int
) -> None:
    path, state = saved_in_files
    chance = random.Random(seed)
    manifest = read_manifest(open_store(path))
    files = len(manifest.file_names)
    assert files > 3
    world_size = chance.randrange(2, 7)
    # Disks of hosts: some files on one, some on two, some on none.
    told_files = [[chance.random() < 0.3 for _ in range(files)] for _ in range(world_size)]
    holders = holders_of(told_files)
    reads = []
    for _ in range(world_size):
        here = needs(manifest, {n for n in state if chance.random() < 0.7})
        reads.append(here[np.array([chance.random() < 0.6 for _ in here.rows], bool)])
    told = [encode_rows(each) for each in reads]
    shares = [
        share_out(manifest, reads[r], told, r, SLOT_BYTES, holders) for r in range(world_size)
    ]
    readers: Counter[int] = Counter()
    for rank, (alone, shared) in enumerate(shares):
        own = [read.row for run in alone for read in run.chunks]
        common = [read.row for entry in shared for read in entry.run.chunks]
        got = own + common
        assert len(got) == len(set(got)), "a chunk comes twice"
        assert set(reads[rank].rows.tolist()) <= set(got), "a chunk is missing"
        readers.update(own)
        for row in own:
            assert may_read(manifest, told_files, rank, row)
        for entry in shared:
            rows = [read.row for read in entry.run.chunks]
            assert all(may_read(manifest, told_files, entry.reader, row) for row in rows)
            if entry.reader == rank:
                readers.update(rows)
    assert set(readers.values()) <= {1}, "two ranks read a chunk"
    for a, b in combinations(range(world_size), 2):
        assert in_common(shares[a][1], b) == in_common(shares[b][1], a)


def may_read(manifest: Manifest, told: list[list[bool]], rank: int, row: int) -> bool:
    file = int(manifest.file_first_chunk.searchsorted(row, "right")) - 1
    return told[rank][file] or not any(each[file] for each in told)


def in_common(shared: tuple[SharedRun, ...], other: int) -> list[tuple[object, ...]]:
    """What two ranks have in common, in order: neither waits for a run that the other is past."""
    return [(e.run.extent, e.reader, e.audience) for e in shared if other in e.audience]


def test_damage_on_disk_is_told_by_the_rank_that_read_it(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    _, state = saved
    path = tmp_path / "c"
    holdfast.save(state, path)
    (file,) = path.glob("data/*/*.hf")
    with file.open("r+b") as opened:
        opened.seek(5 << 20)
        byte = opened.read(1)
        opened.seek(5 << 20)
        opened.write(bytes([byte[0] ^ 1]))
    errors = [error for _, error in load_together(path, 3, lambda _: blank(state, "0123456"))]
    assert sorted(type(error).__name__ for error in errors) == [
        "CorruptError",
        "PeerError",
        "PeerError",
    ]
    for error in errors:
        assert "the bytes were damaged after they were written" in str(error)


def test_damage_on_the_way_is_told_by_the_rank_that_received_it(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, state = saved

    def spoil(data: bytes) -> bytes:
        return data[:4096] + bytes([data[4096] ^ 1]) + data[4097:] if len(data) > 4096 else data

    found = load_together(path, 2, lambda _: blank(state, "0123456"), spoil=spoil)
    for into, error in found:
        assert isinstance(error, CorruptError)
        assert "came here damaged, though it was whole there" in str(error)
        for name, value in into.items():
            right = (value == state[name]) | (value == -1.0)
            assert bool(right.all()), f"bytes that fail their check were placed into {name}"


@pytest.mark.parametrize("place", [0, 1, 5])
@pytest.mark.parametrize("failure", [StoreError, KeyboardInterrupt, MemoryError])
def test_a_rank_that_fails_half_way_keeps_nobody_waiting(
    saved: tuple[Path, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    failure: type[BaseException],
    place: int,
) -> None:
    path, state = saved
    placed, there, victims = itertools.count(), Targets.fill, set[int]()

    def fill_or_fail(targets: Targets, reads: Reads, base: int) -> Reads:
        if worker.place()[0] in victims and next(placed) == place:
            raise failure("here")
        return there(targets, reads, base)

    monkeypatch.setattr(Targets, "fill", fill_or_fail)

    def wanted(rank: int) -> dict[str, torch.Tensor]:
        if rank == 1:
            victims.add(threading.get_ident())
        return blank(state, "0123456")

    if failure is StoreError:
        errors = [error for _, error in load_together(path, 3, wanted)]
        assert [type(error) for error in errors] == [PeerError, StoreError, PeerError]
    else:
        with pytest.raises(failure, match="here"):
            load_together(path, 3, wanted)
