"""The servers of `stores.py`: seaweedfs, and a double that throws away what it is given.

The double is there twice: as fast as it can be, and as if behind a network card of 10 Gbit/s.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from stores import servers  # noqa: E402

BUCKET = servers.BUCKET
UP_S = 10.0
CLOCK_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Up:
    """A server that is up, with its settings in the environment.

    Attributes:
        kept: prefix of what has to be read again.
    """

    name: str
    port: int
    process_id: int
    kept: str = ""

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> dict[str, int]:
        """Return what the double has counted since the last call: requests, bytes of objects."""
        with urllib.request.urlopen(f"{self.endpoint}/?counts") as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def cpu_s(self) -> float:
        """Return the processor time that it has taken."""
        fields = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_HZ


@contextlib.contextmanager
def discarding(name: str = "discarding", bytes_per_s: int = 0) -> Iterator[Up]:
    """Compile and run the double.

    Args:
        bytes_per_s: of the wire, in each direction; 0: as many as it can.
    """
    port = servers.free_port()
    with tempfile.TemporaryDirectory() as root:
        program = Path(root, "discard_server")
        flags = ["-std=c++20", "-O2", "-pthread", "-o", str(program)]
        subprocess.run(["g++", *flags, str(HERE / "discard_server.cpp")], check=True)
        process = subprocess.Popen([program, str(port), str(bytes_per_s)])
        up = Up(name, port, process.pid, "kept/")
        try:
            _wait_for(up)
            with servers.environment(_settings(port)):
                yield up
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def seaweedfs() -> Iterator[Up]:
    """Run seaweedfs."""
    with servers.serving("seaweedfs") as up, servers.environment(_settings(up.port)):
        yield Up("seaweedfs", up.port, up.process.pid)


SERVERS = {
    "discarding": discarding,
    "10gbit": partial(discarding, "10gbit", 10**10 // 8),
    "seaweedfs": seaweedfs,
}


def _settings(port: int) -> dict[str, str]:
    return servers.SERVERS["seaweedfs"].settings(port)


def _wait_for(up: Up) -> None:
    deadline = time.monotonic() + UP_S
    while True:
        try:
            up.counts()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
