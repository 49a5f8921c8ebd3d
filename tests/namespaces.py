"""Disks of a test: one that each process has for itself, as hosts do, and small ones."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    """Have a small disk at a place, in memory; it may be unmounted within."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield place
    finally:
        if os.path.ismount(place):
            unmount(place)


def unmount(place: Path) -> None:
    """Take a disk away; files that are open stay."""
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
