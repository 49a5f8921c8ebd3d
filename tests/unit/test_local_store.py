"""What a directory on a local file system is asked besides reading and writing whole files."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import holdfast
from descriptors import open_descriptors
from holdfast._core import Vfs
from holdfast.errors import StoreError
from holdfast.stores import local
from holdfast.stores.local import LocalStore
from holdfast.testing.faults import Fault, faulty, recording

NewPath = Callable[[], Path]


@pytest.mark.parametrize(("user", "blocks"), [(0, 7), (1000, 5)])
def test_root_may_write_to_the_reserve_and_others_may_not(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, user: int, blocks: int
) -> None:
    system = SimpleNamespace(f_frsize=4096, f_blocks=9, f_bfree=7, f_bavail=5, f_flag=0)
    monkeypatch.setattr(os, "statvfs", lambda _: system)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert LocalStore(new_path()).free_bytes() == blocks * 4096


def test_the_disk_begins_with_a_small_file_while_the_target_is_bound(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[str]()
    read = LocalStore.start_read
    monkeypatch.setattr(LocalStore, "start_read", lambda s, n: begun.append(n) or read(s, n))
    small, large = {"a": torch.ones(1024)}, {"a": torch.ones(4 << 20)}
    for state in (small, large):
        holdfast.save(state, path := new_path())
        holdfast.load(path, into=state)
    assert [name.rpartition("/")[2] for name in begun] == ["00000-0.hf"]


def test_a_hint_to_read_is_never_an_error(new_path: NewPath) -> None:
    place = new_path()
    place.mkdir()
    (place / "link").symlink_to("/dev/null")
    before = open_descriptors()
    for name in ("absent", "link", ".", "absent/too"):
        LocalStore(place).start_read(name)
    (place / "file").write_bytes(b"bytes")
    LocalStore(place).start_read("file")
    with faulty(Fault("open", persistent=True)):
        LocalStore(place).start_read("file")
    assert open_descriptors() == before


def test_a_line_that_was_written_in_part_is_an_error_and_spoils_no_other(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = new_path()
    place.mkdir()
    store, write = LocalStore(place), os.write
    store.append("lines", b"one\n")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: write(file, data[:2]))
        with pytest.raises(StoreError, match=r"append to .*lines: 2 of 4 bytes were written"):
            store.append("lines", b"two\n")
    store.append("lines", b"three\n")
    store.append("lines", b"four\n")
    assert (place / "lines").read_text() == "one\ntw\nthree\nfour\n"


def test_young_directories_are_synced_by_a_machine_whose_clock_is_ahead(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, right = new_path(), time.time
    monkeypatch.setattr(time, "time", lambda: right() + 7200.0)
    with recording() as disk:
        store = LocalStore(root / "made" / "too" / "step")
        store.prepare(".name", b"")
        store.sync_above(".name")
    synced = {path for operation, path, *_ in disk.trace() if operation == "sync_directory"}
    assert {str(root / "made"), str(root)} <= synced


def test_a_prepared_file_gets_a_name_that_nothing_has(new_path: NewPath) -> None:
    store = LocalStore(new_path())
    store.prepare(".name", b"one")
    assert store.publish(".name", "name")
    store.prepare(".other", b"two")
    assert not store.publish(".other", "name")
    assert [entry.name for entry in store.list()] == ["name"]
    assert store.get("name", 9) == b"one"


def test_a_prepared_file_takes_the_place_of_another(new_path: NewPath) -> None:
    store = LocalStore(new_path())
    for content in (b"one", b"two"):
        store.prepare(".name", content)
        store.replace(".name", "name")
    assert [entry.name for entry in store.list()] == ["name"]
    assert store.get("name", 9) == b"two"


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_what_could_not_be_prepared_is_not_there(new_path: NewPath, operation: str) -> None:
    with faulty(Fault(operation)):
        store = LocalStore(new_path())
        with pytest.raises(StoreError):
            store.prepare(".name", b"one")
    assert store.list() == []


def test_who_made_a_directory_syncs_the_one_it_is_in(new_path: NewPath) -> None:
    """The others sync what they have made; what is left is for the coordinator."""
    root = new_path()
    (root / "step").mkdir(parents=True)
    with recording() as disk:
        stores = [LocalStore(root / "step") for _ in range(3)]
        for number, store in enumerate(stores):
            store.vfs.close(store.create(f"data/id/{number}", direct=False))
            store.sync_made(f"data/id/{number}")
        stores[1].sync_path("data/id/0")
        stores[0].sync_path("data/id/0")
    synced = [
        str(Path(path).relative_to(root))
        for operation, path, *_ in disk.trace()
        if operation == "sync_directory"
    ]
    assert synced[:5] == ["step/data/id", "step/data", "step", "step/data/id", "step/data/id"]
    assert synced[5:] == ["step/data", "step", ".", "."]


def test_a_directory_above_is_synced_once_until_it_changes(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who saves every minute need not sync what is above the run each time."""
    root, age_s = new_path(), 5.0
    (root / "run").mkdir(parents=True)

    def seen(path: str) -> SimpleNamespace:
        found = os.stat(path)
        return SimpleNamespace(st_dev=found.st_dev, st_ctime=found.st_ctime - age_s)

    def synced(disk: Vfs) -> bool:
        store, begin = LocalStore(root / "run" / "step"), len(disk.trace())
        name = f".{os.urandom(4).hex()}"
        store.prepare(name, b"")
        store.sync_above(name)
        return str(root) in [call[1] for call in disk.trace()[begin:]]

    monkeypatch.setattr(local, "os", SimpleNamespace(**{**vars(os), "stat": seen}))
    with recording() as disk:
        assert synced(disk) and synced(disk)  # the next entry may come within a tick of the clock
        age_s = 60.0
        assert synced(disk) and not synced(disk)
        (root / "other").mkdir()
        assert synced(disk) and not synced(disk)
    with recording() as disk:
        assert synced(disk)  # what another disk was told, this one was not


def test_nothing_is_made_where_it_cannot_be_told_what_is_young(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_path()
    root.mkdir()

    def lose_contact(path: str) -> os.stat_result:
        raise OSError(errno.EIO, "the server does not answer", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lose_contact)
        with pytest.raises(StoreError, match=r"stat above .*: the server does not answer"):
            holdfast.save({"value": 1}, root)
    assert LocalStore(root.parent).list() == []
