"""The machine inside: a server of NFS, and two clients that know nothing of each other.

Each client has a network and a host name of its own, so the server takes them for two machines.
Both mount through a `Proxy`. Runs as root in User-Mode Linux alone.
"""

import ctypes
import os
import pickle
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .proxy import Proxy

MODULES = (
    *("oid_registry", "grace", "sunrpc", "lockd", "nfs_acl", "auth_rpcgss", "nfsd"),
    *("netfs", "fscache", "nfs", "nfsv3", "dns_resolver", "nfsv4", "veth"),
)
FINIT_MODULE = 313
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 4096, 0x4000, 1 << 18
MOUNTD_PORT, SERVER_PORT = 20048, 2049
GRACE_S = 10  # the least that the server takes; 90 by default
DISK, RUN = Path("/mnt/disk"), Path("/mnt/run")
LIBC = ctypes.CDLL(None, use_errno=True)
ResultT = TypeVar("ResultT")


def call(*command: str) -> None:
    """Run a program, which has to succeed."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def prepare_system() -> None:
    """Load the kernel's modules, make a disk, and start the server."""
    found = {p.stem: p for p in Path("/usr/lib/uml/modules", os.uname().release).rglob("*.ko")}
    for name in MODULES:
        with open(found[name], "rb") as module:
            if LIBC.syscall(FINIT_MODULE, module.fileno(), b"", 0):
                raise OSError(ctypes.get_errno(), f"load {name}")
    for path in ("/var/lib/nfs/v4recovery", "/mnt/run", "/run/rpcbind", "/run/netns"):
        os.makedirs(path)
    for path in ("/var/lib/nfs/etab", "/var/lib/nfs/rmtab"):
        Path(path).touch()
    shutil.copytree("/etc", "/run/etc", symlinks=True)
    call("mount", "--bind", "/run/etc", "/etc")
    Path("/etc/exports").write_text("")
    with open("/etc/passwd", "a") as users:
        users.write("_rpc:x:0:0::/run:/bin/sh\n")
    call("ip", "link", "set", "lo", "up")
    call("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    for name in ("nfsv4gracetime", "nfsv4leasetime"):
        Path("/proc/fs/nfsd", name).write_text(f"{GRACE_S}\n")
    call("mkfs.ext4", "-qF", "/dev/ubda")
    DISK.mkdir()
    call("mount", "-t", "ext4", "/dev/ubda", str(DISK))
    call("rpcbind")
    call("exportfs", "-o", "rw,sync,no_root_squash,fsid=0,insecure,no_subtree_check", f"*:{DISK}")
    call("rpc.mountd", "-p", str(MOUNTD_PORT))
    start_server()


def start_server() -> None:
    """Start the threads of the server."""
    call("rpc.nfsd", "--no-udp", "4")


def stop_server() -> None:
    """Stop the server: it forgets who has what open, and which replies it has given."""
    call("rpc.nfsd", "0")


def restart_server() -> None:
    """Stop the server, and start it anew."""
    stop_server()
    start_server()


class Client:
    """A machine that mounts: everything below ``mount`` goes through its own network."""

    def __init__(self, name: str, number: int, version: str) -> None:
        self.name, self.mount = name, Path("/mnt", name)
        self._version, self._number = version, number
        self._here, there = f"10.0.{number}.1", f"10.0.{number}.2"
        self._port = 2050
        self._there = there
        call("ip", "netns", "add", name)
        call("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", f"w{name}")
        call("ip", "link", "set", f"w{name}", "netns", name)
        call("ip", "addr", "add", f"{self._here}/24", "dev", f"v{name}")
        call("ip", "link", "set", f"v{name}", "up")
        call("ip", "-n", name, "addr", "add", f"{there}/24", "dev", f"w{name}")
        for link in (f"w{name}", "lo"):
            call("ip", "-n", name, "link", "set", link, "up")
        self.proxy = Proxy((self._here, self._port), SERVER_PORT, restart_server)
        self.mount.mkdir()
        self.mount_at(self.mount)

    def mount_at(self, where: Path, options: str = "") -> None:
        """Mount the server's disk; ``options`` as in mount's man page."""
        where.mkdir(exist_ok=True)
        shared = f"port={self._port},proto=tcp,sec=sys,addr={self._here}{options and ','}{options}"
        if self._version == "3":
            source, extra = (
                f"{self._here}:{DISK}",
                (
                    f"vers=3,nolock,mountaddr={self._here},mountport={MOUNTD_PORT},mountproto=tcp,"
                    "mountvers=3"
                ),
            )
            kind = "nfs"
        else:
            source, kind = f"{self._here}:/", "nfs4"
            extra = f"vers={self._version},clientaddr={self._there}"
        command = f"hostname {self.name}; mount -i -t {kind} -o {extra},{shared} {source} {where}"
        call("nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "sh", "-c", command)

    def begin(self, function: Callable[[], Any], mount: Path | None = None) -> "Running":
        """Run something in a process of this machine, where its mount is at `RUN`."""
        reading, writing = os.pipe()
        child = os.fork()
        if child:
            os.close(writing)
            return Running(child, reading)
        status = 1
        try:
            os.close(reading)
            _check(LIBC.unshare(CLONE_NEWNS), "unshare")
            _check(LIBC.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "/")
            source = os.fsencode(mount or self.mount)
            _check(LIBC.mount(source, bytes(RUN), None, ctypes.c_ulong(MS_BIND), None), "bind")
            try:
                answer: tuple[bool, Any] = (True, function())
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = (False, error)
            with open(writing, "wb") as pipe:
                pipe.write(pickle.dumps(answer))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def do(self, function: Callable[[], ResultT], mount: Path | None = None) -> ResultT:
        """Do as `begin`, and wait for its result, which is returned or raised."""
        result: ResultT = self.begin(function, mount).result()
        return result


class Running:
    """What runs on a client."""

    def __init__(self, child: int, reading: int) -> None:
        self.child, self._reading = child, reading

    def result(self) -> Any:
        """Wait; return what it returned, or raise what it raised.

        Raises:
            ChildProcessError: it was killed.
        """
        with open(self._reading, "rb") as pipe:
            data = pipe.read()
        os.waitpid(self.child, 0)
        if not data:
            raise ChildProcessError("it was killed")
        succeeded, answer = pickle.loads(data)
        if succeeded:
            return answer
        raise answer

    def kill(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.child, number)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def wait_until(done: Callable[[], bool], within_s: float) -> float:
    """Wait until something is so; return the seconds that it took, or raise a TimeoutError."""
    begun = time.monotonic()
    while not done():
        if time.monotonic() - begun > within_s:
            raise TimeoutError(f"not within {within_s} s")
        time.sleep(0.02)
    return time.monotonic() - begun
