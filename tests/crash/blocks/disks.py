"""Real file systems on disks of our own: one that logs its writes, and images mounted again.

Everything is mounted in a name space of this process and its children, and every device goes when
its last holder does: however this process ends, nothing of it stays behind.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parent / "log_plugin.py"
PACKAGES = {  # the program that is missing, and the Debian package that has it
    "nbdkit": "nbdkit",
    "nbdfuse": "libnbd-bin",
    "fusermount3": "fuse3",
    "losetup": "mount",
    "mkfs.ext4": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
}
NEEDED = ("nbdkit", "nbdfuse", "fusermount3", "losetup")
READY_S = 60.0
BLKFLSBUF = 0x1261
CLONE_NEWNS, MS_REC, MS_PRIVATE, MS_NOATIME, MNT_DETACH = 0x00020000, 0x4000, 1 << 18, 1024, 2
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class FileSystem:
    """How one is made, mounted and mended.

    Attributes:
        size: of the disk, in bytes; the smallest that its mkfs likes.
        make, options, mend: arguments of its programs, and of mount(2).
        atomic: bytes that a disk writes whole or not at all, as the file system supposes.
    """

    name: str
    size: int
    make: tuple[str, ...]
    options: str
    mend: tuple[str, ...]
    atomic: int


EXT4 = FileSystem(
    "ext4",
    64 << 20,
    ("mkfs.ext4", "-q", "-F", "-J", "size=4", "-E", "lazy_itable_init=0,nodiscard"),
    "",
    ("e2fsck", "-y"),
    512,
)
XFS = FileSystem("xfs", 300 << 20, ("mkfs.xfs", "-q", "-f", "-K"), "", ("xfs_repair",), 512)
# Its superblock is 4 KiB with one checksum, and it mounts no copy of it by itself.
BTRFS = FileSystem(
    "btrfs",
    112 << 20,
    ("mkfs.btrfs", "-q", "-f", "-K"),
    "nodiscard",
    ("btrfs", "rescue", "super-recover", "-y"),
    4096,
)
FILE_SYSTEMS = {kind.name: kind for kind in (EXT4, XFS, BTRFS)}


def missing(kind: FileSystem) -> str:
    """Say what keeps us from making crash states of a file system here; "" if nothing does."""
    if os.geteuid() != 0:
        return "only root may mount"
    lacking = [name for name in (*NEEDED, kind.make[0]) if shutil.which(name) is None]
    if lacking:
        packages = " ".join(sorted({PACKAGES[name] for name in lacking}))
        return f"there is no {', '.join(lacking)}; apt-get install {packages}"
    if not Path("/dev/fuse").exists() or not Path("/dev/loop-control").exists():
        return "there is no /dev/fuse or no /dev/loop-control"
    known = Path("/proc/filesystems").read_text().split()
    return "" if kind.name in known else f"this kernel knows no {kind.name}"


def go_private() -> None:
    """Move this process into a mount name space that ends with it and its children.

    From now on SIGTERM ends it in order.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    _check(LIBC.unshare(CLONE_NEWNS), "unshare")
    mount("none", Path("/"), None, MS_REC | MS_PRIVATE)


def mount(device: str, where: Path, kind: str | None, flags: int = 0, options: str = "") -> None:
    """Do mount(2)."""
    arguments = (device.encode(), os.fsencode(where), kind.encode() if kind else None)
    _check(LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode()), f"mount {device}")


def unmount(where: Path, flags: int = 0) -> None:
    """Do umount2(2)."""
    _check(LIBC.umount2(os.fsencode(where), flags), f"umount {where}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


class Loop:
    """A loop device over a file, for as long as this object is open."""

    def __init__(self, file: Path) -> None:
        command = ["losetup", "--find", "--show", "--nooverlap", str(file)]
        self.name = subprocess.check_output(command, text=True).strip()
        self._descriptor = os.open(self.name, os.O_RDONLY)
        # From now on the device goes when its last holder does.
        subprocess.check_call(["losetup", "--detach", self.name])

    def forget(self) -> None:
        """Drop what the kernel remembers of the device, because the file has changed beneath."""
        fcntl.ioctl(self._descriptor, BLKFLSBUF)

    def close(self) -> None:
        """Let go of the device."""
        os.close(self._descriptor)


@contextlib.contextmanager
def mounted(loop: Loop, kind: FileSystem, where: Path, options: str = "") -> Iterator[None]:
    """Mount a device for the block."""
    joined = ",".join(filter(None, (kind.options, options)))
    mount(loop.name, where, kind.name, MS_NOATIME, joined)
    try:
        yield
    finally:
        unmount(where)


def make_image(kind: FileSystem, path: Path) -> None:
    """Make an empty file system in a sparse file."""
    with open(path, "xb") as file:
        file.truncate(kind.size)
    subprocess.run([*kind.make, str(path)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["fallocate", "--dig-holes", str(path)], check=True)


def mend(kind: FileSystem, loop: Loop) -> None:
    """Do what a boot does with a file system that does not mount."""
    subprocess.run([*kind.mend, loop.name], check=False, capture_output=True)


@contextlib.contextmanager
def logged_disk(image: Path, log: Path, where: Path) -> Iterator[Path]:
    """Serve an image, which is changed, as a file whose writes and flushes are logged."""
    with served(where, "python", str(PLUGIN), f"image={image}", f"log={log}") as (file, _):
        yield file


@contextlib.contextmanager
def served(where: Path, *plugin: str) -> "Iterator[tuple[Path, subprocess.Popen[bytes]]]":
    """Serve what a plugin of nbdkit has, as a file; yield that, and the server."""
    where.mkdir()
    socket = where.parent / "nbd.sock"
    server = start("nbdkit", "-f", "-U", str(socket), *plugin)
    try:
        _await(socket.exists, server)
        client = start("nbdfuse", str(where), "--unix", str(socket))
        try:
            _await((where / "nbd").exists, client)
            yield where / "nbd", server
        finally:
            unmount(where, MNT_DETACH)
            _end(client)  # it does so by itself
    finally:
        server.terminate()
        _end(server)
        socket.unlink(missing_ok=True)
    where.rmdir()


def start(*command: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process that does not outlive this one; options as Popen takes them."""

    def die_with_parent() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen(
        command, preexec_fn=die_with_parent, stdin=subprocess.DEVNULL, **options
    )


def _await(done, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{process.args[0]} did not start; it ended with {process.poll()}")
        time.sleep(0.01)


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(READY_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
