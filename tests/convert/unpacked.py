"""Checkpoints that other packages have written: archives in `foreign`, made by `make_*.py`."""

import tarfile
from pathlib import Path

FOREIGN = Path(__file__).parent / "foreign"


def unpacked(name: str, directory: Path) -> Path:
    """Put one into a directory, which may not be there yet; return the directory."""
    with tarfile.open(FOREIGN / f"{name}.tgz") as archive:
        archive.extractall(directory, filter="data")
    return directory
