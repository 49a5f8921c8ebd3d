"""A directory that each process has for itself: what hosts with disks of their own look like."""

import ctypes
import os
from pathlib import Path

import pytest

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)

needs_namespaces = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


def own_disk(path: str | Path, disk: str | Path) -> None:
    """Let this process, and what it starts, see one directory at the place of another."""
    os.makedirs(disk, exist_ok=True)
    os.makedirs(path, exist_ok=True)
    _check(_libc.unshare(CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    _check(_libc.mount(os.fsencode(disk), os.fsencode(path), None, MS_BIND, None))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
