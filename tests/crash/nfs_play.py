"""holdfast on NFS: Linux's own server and two clients, in User-Mode Linux.

Boots a guest for each version of NFS, which plays the cases of `nfs/cases.py`: two ranks on two
clients, kills, a server that is started anew, lost replies, files that another client removes, and
what a client's caches hold back.

    python tests/crash/nfs_play.py --versions 4.2 3 --seed 1 --only "any lost reply"
"""

import argparse
import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from blocks.uml import UML, boot

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = ROOT / "build" / "nfs"  # of the server; unpacked, not installed: nothing of it runs here
VERSIONS = ("4.2", "3")
MEMORY, MEMORY_PLACE = "1024M", Path("/dev/shm")
DISK_BYTES = 1 << 30
SILENT_S = 600.0  # a longer case prints a line in between
NOISE = ("SELinux:", "mmapper_init", "reboot:", "sysrq:")  # of the kernel
INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:{programs}/usr/sbin:{programs}/sbin
export LD_LIBRARY_PATH={programs}/usr/lib/x86_64-linux-gnu:{programs}/lib/x86_64-linux-gnu
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 TMPDIR=/mnt TORCH_CPP_LOG_LEVEL=ERROR
mount -t proc proc /proc && mount -t sysfs sys /sys
for place in /mnt /run /var/lib; do mount -t tmpfs tmpfs $place; done
cd {here} && exec {python} -m nfs.guest {arguments}
"""


def missing() -> str:
    """Say what keeps us from booting a guest with a server; "" if nothing does."""
    if os.geteuid() != 0:
        return "only root may boot a guest on all files of this machine"
    lacking = [name for name in (UML, "mkfs.ext4", "ip") if shutil.which(name) is None]
    if lacking:
        return f"there is no {', '.join(lacking)}; make nfs installs it"
    if not (PROGRAMS / "usr/sbin/rpc.nfsd").exists():
        return f"there is no server in {PROGRAMS}; make nfs puts it there"
    return ""


def play(version: str, seed: str, scale: float, names: list[str]) -> list[str]:
    """Play cases in a guest, and print what it says; return those that failed."""
    with tempfile.TemporaryDirectory(prefix="holdfast-guest-") as path:
        here = Path(path)
        image = here / "disk"
        with open(image, "xb") as file:
            file.truncate(DISK_BYTES)
        arguments = shlex.join([version, seed, str(scale), *names])
        init = INIT.format(
            programs=PROGRAMS,
            here=shlex.quote(str(Path(__file__).parent)),
            python=shlex.quote(sys.executable),
            arguments=arguments,
        )
        guest = boot(here, MEMORY_PLACE, image, init, MEMORY)
        try:
            return _judge(guest, version)
        finally:
            if guest.poll() is None:
                os.killpg(guest.pid, signal.SIGKILL)
            guest.wait()


def _judge(guest: "subprocess.Popen[bytes]", version: str) -> list[str]:
    text, failed, is_done, until = "", list[str](), False, time.monotonic() + SILENT_S
    assert guest.stdout is not None
    while time.monotonic() < until and not is_done:
        if not select.select([guest.stdout], [], [], 1)[0]:
            continue
        part = os.read(guest.stdout.fileno(), 1 << 16).decode(errors="replace")
        if not part:
            break
        *lines, text = (text + part).split("\n")
        for line in (line.rstrip("\r") for line in lines):
            until = time.monotonic() + SILENT_S
            if not line.startswith(NOISE):
                print(f"NFS {version}: {line}", flush=True)
            is_done = is_done or line == "done"
            if line.startswith("FAILED "):
                failed.append(f"NFS {version}, {line}")
    return failed if is_done else [*failed, f"NFS {version}: the guest did not come to its end"]


def main() -> int:
    """Play cases; exit 0 when all hold, 1 when one fails, 2 when no guest can be booted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE")
    parser.add_argument("--seed", default=str(random.randrange(1 << 32)))
    parser.add_argument("--scale", type=float, default=1.0, help="of all; 0.1: a tenth of it")
    arguments = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(f"seed {arguments.seed}", flush=True)
    failed = []
    for version in arguments.versions:
        failed += play(version, arguments.seed, arguments.scale, arguments.only)
    print(*failed or ["all hold"], sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
