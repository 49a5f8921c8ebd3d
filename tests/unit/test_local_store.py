"""What a directory on a local file system is asked besides reading and writing whole files."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

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
