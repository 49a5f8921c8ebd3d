"""What a directory on a local file system is asked besides reading and writing whole files."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.errors import StoreError
from holdfast.stores.local import LocalStore

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
