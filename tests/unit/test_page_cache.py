"""Which files go through the page cache, and that nothing is lost or wrong on that way."""

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Options
from holdfast.engine import pool
from holdfast.errors import CorruptError, NoSpaceError, StoreError
from holdfast.stores.local import LocalStore
from holdfast.testing import Fault, faulty

ELEMENTS = 5 << 20  # 20 MiB: larger than one write
BLOCKS = range(0, 4 * ELEMENTS, 1 << 20)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ELEMENTS // 5, generator=generator) for name in "abcde"}


def data_files(place: Path) -> list[Path]:
    return sorted((place / "data").rglob("*.hf"))


def cached_part(file: Path) -> float:
    """Return which part of a file is in the page cache; reads none of it.

    A page of it may be there in any case: XFS cuts off padding in memory.
    """
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found, first = (ctypes.c_ubyte * pages)(), ctypes.c_ubyte.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(len(mapped))
        assert not libc.mincore(ctypes.byref(first), size, found), os.strerror(ctypes.get_errno())
        del first  # or the file could not be unmapped
        return sum(page & 1 for page in found) / pages


@pytest.fixture
def place(tmp_path: Path) -> Path:
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(4096))
    try:
        with probe.open("rb", buffering=0) as file:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        os.close(os.open(probe, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the file system cannot read past the page cache, or say so: {error}")
    return tmp_path / "c"


@contextmanager
def opened_directly(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Give the names of the files that are read past the page cache."""
    names = set[str]()
    before = LocalStore.open

    def spied(store: LocalStore, name: str, *, direct: bool) -> int:
        (names.add if direct else names.discard)(name)
        return before(store, name, direct=direct)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "open", spied)
        yield names


def in_place(place: Path, seed: int = 9) -> dict[str, torch.Tensor]:
    found = state(seed)
    holdfast.load(place, into=found)
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in "abcde")


def test_a_small_state_is_saved_and_loaded_through_the_page_cache(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save(state(), place)
    (file,) = data_files(place)
    assert cached_part(file) == 1
    LocalStore(str(place)).forget_cached()
    assert cached_part(file) < 0.01
    with opened_directly(monkeypatch) as direct:
        assert same(in_place(place), state())
    assert not direct
    assert cached_part(file) == 1


def test_a_large_state_goes_past_the_page_cache(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CACHED_BYTES", 16 << 20)
    holdfast.save(state(), place)
    (file,) = data_files(place)
    assert cached_part(file) < 0.01
    with opened_directly(monkeypatch) as direct:
        assert same(in_place(place), state())
    assert len(direct) == 1


def test_of_many_files_the_first_go_through_the_page_cache(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CACHED_BYTES", 12 << 20)
    holdfast.save(state(), place, options=Options(file_bytes=5 << 20))
    files = data_files(place)
    assert [round(cached_part(file), 2) for file in files] == [1, 1, 0, 0, 0]
    with opened_directly(monkeypatch) as direct:
        assert same(in_place(place), state())
    assert len(direct) == 3


def test_a_large_file_that_is_in_the_page_cache_is_read_from_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CACHED_BYTES", 16 << 20)
    holdfast.save(state(), place)
    (file,) = data_files(place)
    file.read_bytes()
    with opened_directly(monkeypatch) as direct:
        assert same(in_place(place), state())
        assert not direct
        holdfast.verify(place)
        assert len(direct) == 1, "verify looks at the disk"


@pytest.mark.parametrize(
    "save",
    [
        lambda place: holdfast.save(state(), place, codec="lossless"),
        lambda place: holdfast.save(state(), place, options=Options(io="direct")),
        lambda place: holdfast.save_async(state(), place).result(),
    ],
    ids=["encoded", "io", "in the background"],
)
def test_other_saves_go_past_the_page_cache(place: Path, save: Callable[[Path], object]) -> None:
    save(place)
    (file,) = data_files(place)
    assert cached_part(file) < 0.01
    assert same(in_place(place), state())


def test_the_environment_chooses_for_all_but_the_smallest_files(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_IO", "direct")
    holdfast.save(state(), place)
    (file,) = data_files(place)
    assert cached_part(file) < 0.01
    file.read_bytes()
    with opened_directly(monkeypatch) as direct:
        assert same(in_place(place), state())
    assert len(direct) == 1


def test_small_files_are_written_through_the_page_cache_however_many_there_are(
    place: Path,
) -> None:
    many = {str(n): torch.randn(200_000) for n in range(8)}
    options = Options(file_bytes=1 << 20)
    holdfast.save_async(many, place, options=options).result()
    files = data_files(place)
    assert [cached_part(file) for file in files] == [1] * len(files)
    assert len(files) > 4


def test_damage_in_the_page_cache_is_found(place: Path) -> None:
    holdfast.save(state(), place)
    (file,) = data_files(place)
    for offset in random.Random(1).sample(BLOCKS, 5):
        with file.open("r+b") as opened:
            opened.seek(offset + 4097)
            byte = opened.read(1)
            opened.seek(offset + 4097)
            opened.write(bytes([byte[0] ^ 4]))
        with pytest.raises(CorruptError, match=r"checksum"):
            in_place(place)
        with file.open("r+b") as opened:
            opened.seek(offset + 4097)
            opened.write(byte)
        assert same(in_place(place), state())


def test_a_file_cut_in_the_page_cache_is_found(place: Path) -> None:
    holdfast.save(state(), place)
    (file,) = data_files(place)
    os.truncate(file, 10 << 20)
    with pytest.raises(CorruptError, match="cut"):
        in_place(place)


@pytest.mark.parametrize(("number", "code"), [(6, errno.EIO), (30, errno.EIO), (60, errno.ENOSPC)])
def test_a_write_into_the_page_cache_that_fails_ends_the_save(
    place: Path, number: int, code: int
) -> None:
    kind = NoSpaceError if code == errno.ENOSPC else StoreError
    with faulty(Fault("write", number, argument=code)), pytest.raises(kind):
        holdfast.save(state(), place)
    assert not place.exists()
    holdfast.save(state(), place)
    assert same(in_place(place), state())


def test_short_and_interrupted_writes_and_reads_are_resumed(place: Path) -> None:
    short = (
        Fault("write", 3, action="short", argument=4097),
        Fault("write", 20, argument=errno.EINTR),
    )
    with faulty(*short):
        holdfast.save(state(), place)
    with faulty(
        Fault("read", 5, action="short", argument=4097), Fault("read", 6, argument=errno.EINTR)
    ):
        assert same(in_place(place), state())


def test_a_read_from_the_page_cache_that_fails_ends_the_load(place: Path) -> None:
    holdfast.save(state(), place)
    with faulty(Fault("read", 6, argument=errno.EIO)), pytest.raises(StoreError, match="read"):
        in_place(place)
    assert same(in_place(place), state())


def test_an_fsync_that_fails_is_answered_with_new_files(place: Path) -> None:
    with faulty(Fault("sync", 1, argument=errno.EIO)):
        holdfast.save(state(), place)
    (file,) = data_files(place)
    assert file.name == "00000-1.hf"
    LocalStore(str(place)).forget_cached()
    assert same(in_place(place), state())


def test_a_local_copy_is_read_from_the_page_cache_and_the_rest_from_its_store(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CACHED_BYTES", 3 << 20)  # each file is looked for
    store, options = f"memory://page-cache/{place.parent.name}", Options(file_bytes=5 << 20)
    with holdfast.Checkpointer(store, local=place, options=options) as run:
        run.save(1, state())
    near = sorted(place.rglob("*.hf"))
    near.pop(2).unlink()
    for file in near:
        file.read_bytes()
    found = state(9)
    with opened_directly(monkeypatch) as direct:
        assert holdfast.Checkpointer(store, local=place, options=options).restore(found) == 1
    assert same(found, state())
    assert all(name.endswith("00000-2.hf") for name in direct)
