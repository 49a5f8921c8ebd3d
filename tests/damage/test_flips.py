"""Every single bit of a checkpoint: each flip is found, by a load, by verify and by both readers.

The checkpoint is small and has everything: two ranks, several chunks, a tie, an empty tensor,
values, padding before and behind payloads.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import holdfast
from attacks.lies import save_truth, target
from format import reader
from holdfast.codecs import Compact, Delta, Excp
from holdfast.errors import CorruptError, VersionError
from unit.test_chains import manifest
from unit.test_replay import Run

from .test_files import data_files

NewPath = Callable[[], Path]
BUFFERED = holdfast.Options(chunk_elements=4, pool_bytes=32 << 20, io="buffered")
BUFFERED_LARGE = holdfast.Options(chunk_elements=20_000, pool_bytes=32 << 20, io="buffered")
FASTEST = holdfast.Options(chunk_elements=4, pool_bytes=32 << 20)
SAMPLE = (
    11  # every so many bits, where a test takes longer; prime, so that no bit of a byte is left
)
PARTS = 4  # of a test that takes a minute for all bits


@contextmanager
def flipped(descriptor: int, bit: int) -> Iterator[None]:
    """Flip a bit of an open file, and flip it back."""
    byte = os.pread(descriptor, 1, bit // 8)
    os.pwrite(descriptor, bytes([byte[0] ^ 1 << bit % 8]), bit // 8)
    try:
        yield
    finally:
        os.pwrite(descriptor, byte, bit // 8)


def flips(path: Path, step: int = 1, first: int = 0) -> Iterator[tuple[Path, int]]:
    """Flip each ``step``-th bit of each file in turn; yield (file, bit) while it is flipped."""
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        descriptor = os.open(file, os.O_RDWR)
        try:
            for bit in range(first, 8 * file.stat().st_size, step):
                with flipped(descriptor, bit):
                    yield file, bit
        finally:
            os.close(descriptor)


@pytest.fixture
def checkpoint(new_path: NewPath) -> Path:
    path = new_path()
    save_truth(path)
    return path


def bits_of(path: Path, step: int = 1, first: int = 0) -> int:
    sizes = [p.stat().st_size for p in path.rglob("*") if p.is_file()]
    return sum(len(range(first, 8 * size, step)) for size in sizes)


@pytest.mark.parametrize("first", range(PARTS))
def test_every_flipped_bit_fails_a_load(checkpoint: Path, first: int) -> None:
    into, found, undetected = target(), Counter[str](), []
    for file, bit in flips(checkpoint, PARTS, first):
        try:
            holdfast.load(checkpoint, into=into, options=BUFFERED)
            undetected.append((file.name, bit))
        except (CorruptError, VersionError) as error:
            found[type(error).__name__] += 1
    assert undetected == []
    assert found.total() == bits_of(checkpoint, PARTS, first) > 15_000 // PARTS
    # Only the flips of one version number, of 32 bits, look like a newer holdfast; 0 is no version.
    assert found["VersionError"] <= 32 // PARTS - (first == 0)
    holdfast.load(checkpoint, into=into, options=BUFFERED)
    assert into["w"].flatten().tolist() == list(range(12))


def test_every_flipped_bit_is_reported_by_verify(checkpoint: Path) -> None:
    found = 0
    whole = holdfast.open(checkpoint, options=BUFFERED)
    for file, _ in flips(checkpoint):
        if file.name == "MANIFEST":
            with pytest.raises((CorruptError, VersionError)):
                holdfast.open(checkpoint, options=BUFFERED)
            found += 1
        else:
            damage = whole.verify()
            assert damage
            assert all(file.name in fault.where for fault in damage)
            found += 1
    assert found == bits_of(checkpoint)
    assert whole.verify() == []


def test_flipped_bits_are_found_by_the_other_reader(checkpoint: Path) -> None:
    found = 0
    for _ in flips(checkpoint, SAMPLE):
        with pytest.raises((reader.Corrupt, reader.Newer)):
            reader.read(checkpoint)
        found += 1
    assert found == bits_of(checkpoint, SAMPLE)
    assert len(reader.read(checkpoint)["tensors"]) == 3


def test_flipped_bits_are_found_by_the_fastest_reads_too(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"  # on a disk, where direct reads work
    save_truth(path)
    into = target()
    for _ in flips(path, 8 * SAMPLE + 1):
        with pytest.raises((CorruptError, VersionError)):
            holdfast.load(path, into=into, options=FASTEST)


def test_no_wrong_byte_reaches_the_target_before_the_error(checkpoint: Path) -> None:
    truth = torch.arange(12, dtype=torch.float32)
    for file, bit in flips(checkpoint, SAMPLE):
        into = target()
        into["w"].fill_(-1)
        with pytest.raises((CorruptError, VersionError)) as caught:
            holdfast.load(checkpoint, into=into, options=BUFFERED)
        elements = into["w"].flatten()
        assert bool(((elements == truth) | (elements == -1)).all()), (file.name, bit)
        filled = getattr(caught.value, "filled", ())
        assert bool((elements == -1).all()) or "w" in filled


def test_a_ranged_read_never_gives_a_wrong_element(checkpoint: Path) -> None:
    """It reads only its own chunks, so a flip elsewhere may stay unseen; in them, it may not."""
    boxes = [((0, 0), (3, 4)), ((0, 0), (1, 2)), ((1, 1), (2, 2)), ((2, 3), (1, 1))]
    truth = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    whole, refused = holdfast.open(checkpoint, options=BUFFERED), Counter[int]()
    for file, _ in flips(checkpoint, SAMPLE):
        if file.name == "MANIFEST":
            continue
        for number, (offset, shape) in enumerate(boxes):
            try:
                found = whole.tensor("w", (offset, shape))
            except CorruptError:
                refused[number] += 1
            else:
                rows, columns = (slice(a, a + n) for a, n in zip(offset, shape, strict=True))
                assert torch.equal(found, truth[rows, columns])
    assert refused[0] > refused[1] > 0
    assert refused[3] > 0


def coded(root: Path) -> Iterator[Path]:
    """Checkpoints with payloads of every mode."""
    codecs = ["lossless", Delta(replay=True), Compact("high"), Compact("tiny"), Compact(abs=1e-3)]
    codecs += [Compact(bf16_exact=True)]
    for number, codec in enumerate([*codecs, Excp()]):
        run = Run()
        run.step(20)
        master = torch.randn(300, generator=run.draw)
        for step in range(2):
            run.step()
            master = master + torch.randn(300, generator=run.draw) / 1000
            pair = {"half": {"w": master.bfloat16()}, "master": {"w": master}}
            state = {**pair, "ones": torch.ones(99), **run.state}
            path = root / f"{number}" / f"step-{step}"
            holdfast.save(state, path, codec=codec, options=BUFFERED_LARGE)
            yield path


def test_a_flipped_bit_is_found_in_a_payload_of_any_mode(new_path: NewPath) -> None:
    seen = set()
    for path in coded(new_path()):
        read = manifest(path)
        modes = (read.table.chunk_size_mode >> 24).tolist()
        for mode in set(modes) - seen:
            rows = [row for row, other in enumerate(modes) if other == mode]
            row = max(rows, key=lambda row: int(read.chunk_bytes[row]))
            seen.add(mode)
            first, size = int(read.chunk_start[row]), int(read.chunk_bytes[row])
            (file,) = data_files(path)
            descriptor = os.open(file, os.O_RDWR)
            # Of one that is empty nothing can be damaged.
            for bit in range(8 * first, 8 * (first + size), max(1, size // 8)):
                with flipped(descriptor, bit), holdfast.open(path) as checkpoint:
                    assert any("checksum" in fault.what for fault in checkpoint.verify())
                    with pytest.raises(CorruptError, match="checksum"):
                        checkpoint.state()
            os.close(descriptor)
    assert seen == set(range(18))
