"""The limit: what fio reaches on the same file system, with io_uring and O_DIRECT."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SIZE_STEP_BYTES = 4 << 20  # the largest block: fio leaves out what is no whole block
COMMON = (
    "--name=limit",
    "--ioengine=io_uring",
    "--direct=1",
    "--fallocate=posix",
    "--end_fsync=1",
    "--invalidate=1",
    "--output-format=json",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run fio; the fastest of `SETTINGS` in a run is its limit."""

    block: str
    depth: int

    @property
    def name(self) -> str:
        """As shown: the block size and the queue depth."""
        return f"fio {self.block} qd{self.depth}"

    def command(self, verb: str, path: Path, size_bytes: int) -> list[str]:
        """Return the command line; ``verb`` is write or read."""
        return [
            "fio",
            *COMMON,
            f"--rw={verb}",
            f"--bs={self.block}",
            f"--iodepth={self.depth}",
            f"--size={size_bytes}",
            f"--filename={path}",
        ]


SETTINGS = (Setting("1M", 8), Setting("4M", 8), Setting("4M", 32))


def installed() -> bool:
    """Return whether there is a fio."""
    return shutil.which("fio") is not None


def file_bytes(size_bytes: int) -> int:
    """Return the size of fio's file for a state of ``size_bytes``: no smaller."""
    return -(-size_bytes // SIZE_STEP_BYTES) * SIZE_STEP_BYTES


def run(setting: Setting, verb: str, path: Path, size_bytes: int) -> float:
    """Write a new file, or read one whole; return seconds by fio's own clock, to the millisecond.

    The clock covers the operations and, for a write, the fsync; not the start of fio, and not
    fallocate.
    """
    command = setting.command(verb, path, size_bytes)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    # fio puts warnings before its JSON.
    result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][verb]
    if result["io_bytes"] != size_bytes:
        moved = f"{result['io_bytes']} bytes of {size_bytes}"
        raise RuntimeError(f"{' '.join(command)}: {verb} moved {moved}")
    return float(result["runtime"]) / 1000
