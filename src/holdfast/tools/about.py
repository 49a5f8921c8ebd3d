"""`holdfast --version --verbose`: what a report of a fault has to say of the machine."""

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .. import _core
from ..errors import HoldfastError
from ..version import DISTRIBUTION, __version__
from .bench_disk import describe

PACKAGES = ("torch", "numpy", "rich", "blake3", "cryptography")


def about(directory: str) -> dict[str, str]:
    """Describe this holdfast, the machine, and the disk of a directory.

    Args:
        directory: where checkpoints are to be written; usually the working directory.

    Returns:
        name of each fact → what was found.

    Example:
        ``about(".")["instruction set"]`` is "AVX-512", "AVX2" or "baseline".
    """
    disk, cores = dict.fromkeys(("file_system", "device", "model"), "unknown"), os.cpu_count()
    with contextlib.suppress(OSError):  # a sandbox
        cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # no /proc, or no such directory any more
        disk |= {name: found for name, found in describe(Path(directory)).items() if found}
    return {
        "holdfast": f"{__version__} ({DISTRIBUTION})",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: _version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "C library": " ".join(platform.libc_ver()) or "unknown",
        "cores": str(cores),
        "instruction set": _core.instruction_set(),
        "writes by": _backend(directory),
        "file system": disk["file_system"],
        "disk": f"{disk['device']} ({disk['model']})",
    }


def render(facts: dict[str, str]) -> list[str]:
    """Return the facts as lines of a table."""
    width = max(map(len, facts))
    return [f"{name:<{width}}  {found}" for name, found in facts.items()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _backend(directory: str) -> str:
    try:
        return _core.probe(directory)
    except (HoldfastError, OSError) as error:
        return f"unknown: {error}"
