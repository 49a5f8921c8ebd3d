"""What a directory on a local file system is asked besides reading and writing whole files."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.errors import StoreError
from holdfast.stores.local import LocalStore
from holdfast.testing.faults import recording

NewPath = Callable[[], Path]


@pytest.mark.parametrize(("user", "blocks"), [(0, 7), (1000, 5)])
def test_root_may_write_to_the_reserve_and_others_may_not(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, user: int, blocks: int
) -> None:
    system = SimpleNamespace(f_frsize=4096, f_blocks=9, f_bfree=7, f_bavail=5, f_flag=0)
    monkeypatch.setattr(os, "statvfs", lambda _: system)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert LocalStore(new_path()).free_bytes() == blocks * 4096


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
        LocalStore(root / "made" / "too" / "step").publish("name", ".name", b"", lambda: None)
    synced = {path for operation, path, *_ in disk.trace() if operation == "sync_directory"}
    assert {str(root / "made" / "too"), str(root / "made"), str(root)} <= synced


def test_what_is_to_be_checked_last_is_and_keeps_a_name_from_being_made(new_path: NewPath) -> None:
    store = LocalStore(new_path())

    def check() -> None:
        assert store.exists(".name") and not store.exists("name")
        raise StoreError("too late")

    with pytest.raises(StoreError, match="too late"):
        store.publish("name", ".name", b"data", check)
    assert store.list() == []


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
            LocalStore(root).publish("name", ".name", b"", lambda: None)
    assert LocalStore(root).list() == []
