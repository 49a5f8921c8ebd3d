"""fsync for peers that leave it to the caller: files, and the directories that name them."""

import os
from pathlib import Path


def sync_all(path: Path) -> None:
    """Make a file, or a directory and all below it, durable, and its entry in the one above."""
    for entry in sorted(path.rglob("*")) if path.is_dir() else []:
        _sync(entry)
    _sync(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
