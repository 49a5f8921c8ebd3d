"""Where crash tests work: memory when there is room, since most of them need no real disk."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, in memory where the machine has a place for that."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="holdfast-crash-") as path:
        yield Path(path)


@pytest.fixture
def disk(scratch: Path) -> Path:
    """An empty directory for what is recorded; `scratch` beside it is for the states."""
    path = scratch / "disk"
    path.mkdir()
    return path
