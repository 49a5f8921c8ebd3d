"""Where ranks run: networks that can be cut, groups with little memory, disks that can hang.

All of it goes with its last process, or with this one, however that ends; but for a memory group
that this process was killed in the use of: an empty directory, ``holdfast-chaos-…``.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from blocks import disks
from forked_ranks import fork

from .jobs import LIBC, PR_SET_PDEATHSIG, Meeting

CLONE_NEWNET = 0x40000000
ADDRESS = "10.77.0.{}"
PORT = 29500
CGROUP = Path("/sys/fs/cgroup")
GROUP_NAME = "holdfast-chaos-{}"
HOG_BYTES = 1 << 20


def missing_network() -> str:
    """Say what keeps us from making networks here; "" if nothing does."""
    if os.geteuid() != 0:
        return "only root may make networks"
    lacking = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if lacking:
        return f"there is no {', '.join(lacking)}; apt-get install iproute2 util-linux"
    script = "ip link add br0 type bridge && ip link add veth0 type veth peer name veth1"
    tried = subprocess.run(["unshare", "-n", "sh", "-c", script], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no veth or bridge here: {tried.stderr.decode()}"


@dataclass
class Network:
    """Ranks with a machine's network each, joined by a switch, whose ports can be closed."""

    _switch: int = 0
    _closing: int = -1
    slowed_by: str = field(default="", init=False)

    def __enter__(self) -> "Network":
        waiting, self._closing = os.pipe()
        ready, telling = os.pipe()

        def be_switch(_: int) -> None:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(self._closing)
            self.enter(0)
            os.write(telling, b"r")
            os.read(waiting, 1)

        self._switch = fork(be_switch, 0)
        os.read(ready, 1)
        for descriptor in (waiting, ready, telling):
            os.close(descriptor)
        _ip(self._switch, "link add br0 type bridge", "link set br0 up")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._closing)
        os.waitpid(self._switch, 0)

    @property
    def meeting(self) -> Meeting:
        """Where ranks meet in it."""
        return Meeting(ADDRESS.format(1), PORT, "eth0")

    def enter(self, rank: int) -> None:
        """Give this process a network of its own: for a rank, before it is attached."""
        if LIBC.unshare(CLONE_NEWNET):
            raise AssertionError("unshare failed, but `missing_network` found nothing")
        if self._closing >= 0 and self._switch:
            os.close(self._closing)  # the switch ends when nobody has it

    def attach(self, children: dict[int, int]) -> None:
        """Join the networks of ranks."""
        for rank, child in children.items():
            port = f"port{rank}"
            _ip(
                self._switch,
                f"link add {port} type veth peer name eth0 netns {child}",
                f"link set {port} master br0 up",
            )
            address = ADDRESS.format(rank + 1)
            _ip(child, "link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")

    def cut(self, rank: int) -> None:
        """Close a rank's port: nothing comes through, and nobody is told."""
        _ip(self._switch, f"link set port{rank} down")

    def mend(self, rank: int) -> None:
        """Open it again."""
        _ip(self._switch, f"link set port{rank} up")

    def slow(self, rank: int, delay_ms: int) -> None:
        """Delay what goes to a rank; where the kernel has no netem, let it trickle instead."""
        for what in (f"netem delay {delay_ms}ms", "tbf rate 100kbit burst 2kb latency 2s"):
            command = f"tc qdisc add dev port{rank} root {what}"
            if _in(self._switch, *command.split()).returncode == 0:
                self.slowed_by = what
                return
        raise AssertionError("neither netem nor tbf; `missing_slow_network` found nothing")

    def hasten(self, rank: int) -> None:
        """Take that away."""
        _in(self._switch, *f"tc qdisc del dev port{rank} root".split())


def missing_slow_network() -> str:
    """Say what keeps us from slowing networks; "" if nothing does."""
    if reason := missing_network():
        return reason
    if shutil.which("tc") is None:
        return "there is no tc; apt-get install iproute2"
    script = (
        "ip link set lo up; tc qdisc add dev lo root netem delay 1ms || "
        "tc qdisc add dev lo root tbf rate 1mbit burst 2kb latency 2s"
    )
    tried = subprocess.run(["unshare", "-n", "sh", "-c", script], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this kernel has neither netem nor tbf"


def _in(child: int, *command: str) -> "subprocess.CompletedProcess[str]":
    entered = ["nsenter", "--target", str(child), "--net", *command]
    return subprocess.run(entered, capture_output=True, text=True, check=False)


def _ip(child: int, *commands: str) -> None:
    for command in commands:
        done = _in(child, "ip", *command.split())
        assert done.returncode == 0, f"ip {command}: {done.stderr}"


def missing_memory_group() -> str:
    """Say what keeps us from limiting memory here; "" if nothing does."""
    try:
        with memory_group(1 << 30):
            return ""
    except OSError as error:
        return f"no memory cgroup can be made here: {error}"


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a memory cgroup, version 2 or 1; yield what a process id is written to, to enter it."""
    first = CGROUP / "memory"
    group = (first if first.is_dir() else CGROUP) / GROUP_NAME.format(os.getpid())
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if first.is_dir() else "memory.max"
        (group / name).write_text(str(limit_bytes))
        yield group / "cgroup.procs"
    finally:
        until = time.monotonic() + 10  # a process that has ended may be there for a moment
        while True:
            try:
                group.rmdir()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)


def hog_when_told(pipe: int) -> None:
    """Take memory without end, in a thread, as soon as the pipe says so."""
    taken: list[bytearray] = []

    def take() -> None:
        if os.read(pipe, 1):
            while True:
                taken.append(bytearray(b"\1") * HOG_BYTES)

    threading.Thread(target=take, daemon=True).start()


def missing_disk() -> str:
    """Say what keeps us from making disks here; "" if nothing does."""
    return disks.missing(disks.EXT4)


@dataclass
class Disk:
    """An ext4 file system on a disk that can hang."""

    where: Path
    server: "subprocess.Popen[bytes]"

    def hang(self) -> None:
        """Answer no request any more."""
        self.server.send_signal(signal.SIGSTOP)

    def come_back(self) -> None:
        """Answer all of them."""
        self.server.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def disk(work: Path) -> Iterator[Disk]:
    """Make one in a `work_directory`, and mount it there."""
    image, where = work / "image", work / "mount"
    disks.make_image(disks.EXT4, image)
    with disks.served(work / "fuse", "file", str(image)) as (file, server):
        loop = disks.Loop(file)
        try:
            with disks.mounted(loop, disks.EXT4, where):
                found = Disk(where, server)
                try:
                    yield found
                finally:
                    found.come_back()
        finally:
            loop.close()
