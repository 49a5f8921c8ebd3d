"""Memory does not grow with what is exported or imported."""

import tempfile
from pathlib import Path

import pytest

from .campaign import check_memory

BUILD = Path(__file__).parents[2] / "build"  # git ignores what a kill leaves there


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_memory_stays_below_the_limit(codec: str) -> None:
    # On a disk: what is in /dev/shm is memory.
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as root:
        check_memory(Path(root), 1_300_000_000 if codec == "raw" else 700_000_000, codec)
