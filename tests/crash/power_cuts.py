"""Power cuts of a whole operating system: Linux in user mode, whose memory is lost with it.

Two ranks save on ext4 inside the guest. At random moments the guest is stopped, and its disk is
copied as it is: what SIGKILL would leave at that moment. Then it goes on, until it is killed. The
host mounts each copy, and every step that the guest had acknowledged has to be there, bit-exact.
What the guest had written without flushing is there too: `block_loop` is about losing that.

    python tests/crash/power_cuts.py --cuts 100 --boots 2 --seed 1
"""

import argparse
import contextlib
import logging
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blocks import disks
from blocks.explore import work_directory
from blocks.plants import PLANTED
from blocks.saved_runs import Plan, disagreements, look, save_again
from blocks.uml import UML, boot
from crash_oracle import promises_broken
from forked_ranks import load_everything

HERE = Path(__file__).parent / "blocks"
MEMORY = "1024M"  # of the guest; torch takes half of it
BOOT_S = 400.0  # torch is loaded through a file system of the host's: half a minute alone
BETWEEN_S = 0.6  # cuts, at most; some saves long
KEEP = Plan("raw", "sync", "buffered").keep
INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 TMPDIR=/mnt
mount -t proc proc /proc && mount -t tmpfs tmpfs /mnt && mkdir /mnt/disk
mount -t ext4 -o noatime /dev/ubda /mnt/disk
exec {python} {guest} /mnt/disk/runs/a {seed} {planted}
"""


def missing() -> str:
    """Say what keeps us from booting a guest; "" if nothing does."""
    if shutil.which(UML) is None:
        return f"there is no {UML}; apt-get install user-mode-linux"
    return disks.missing(disks.EXT4)


@dataclass(slots=True)
class Guest:
    """A running guest, and what it has said so far."""

    process: "subprocess.Popen[bytes]"
    text: str = ""

    def hear(self, seconds: float) -> None:
        """Take what it says until then."""
        pipe, deadline = self.process.stdout, time.monotonic() + seconds
        assert pipe is not None
        while select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                return
            self.text += part.decode(errors="replace")

    def saved(self) -> set[int]:
        """Return the steps that it has acknowledged, in whole lines."""
        lines = self.text.rpartition("\n")[0].splitlines()
        return {int(line.split()[1]) for line in lines if line.startswith("saved ")}

    def kill(self) -> None:
        """Kill its kernel, and whatever runs in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the guest's kernel and the thread that does its disk's work."""
        # What runs in the guest is traced by its kernel, and does nothing while that stands still.
        tasks = [task for task in _children(self.process.pid) if not _is_traced(task)]
        tasks.insert(0, self.process.pid)
        for task in tasks:
            os.kill(task, signal.SIGSTOP)
        while not all(_state(task) == "T" for task in tasks):
            time.sleep(0.001)
        try:
            yield
        finally:
            for task in reversed(tasks):
                os.kill(task, signal.SIGCONT)


def _children(process: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _status(process: int, name: str) -> str:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    raise AssertionError(f"/proc/{process}/status has no {name}")


def _is_traced(process: int) -> bool:
    return _status(process, "TracerPid") != "0"


def _state(process: int) -> str:
    return _status(process, "State")


@contextlib.contextmanager
def booted(work: Path, image: Path, seed: int, planted: str) -> Iterator[Guest]:
    """Boot a guest on an image, wait until it saves; in the end it is killed."""
    with tempfile.TemporaryDirectory(prefix="holdfast-guest-") as here:
        guest = Guest(_boot(Path(here), work, image, seed, planted))
        deadline = time.monotonic() + BOOT_S
        try:
            while not guest.saved():
                guest.hear(0.2)
                if guest.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"the guest does not save; it said {guest.text[-2000:]}")
            yield guest
        finally:
            guest.kill()


def _boot(
    here: Path, work: Path, image: Path, seed: int, planted: str
) -> "subprocess.Popen[bytes]":
    python, program = shlex.quote(sys.executable), shlex.quote(str(HERE / "guest.py"))
    fault = shlex.quote(planted) if planted else ""
    init = INIT.format(python=python, guest=program, seed=seed, planted=fault)
    return boot(here, work, image, init, MEMORY)


@dataclass(slots=True)
class Tally:
    """What was seen; anything in ``faults`` is a broken promise."""

    stops: int = 0
    kills: int = 0
    acknowledged: set[tuple[int, int]] = field(default_factory=set)  # boot, step
    checked: int = 0  # acknowledged steps that were to be there, over all cuts
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.stops + self.kills} power cuts ({self.stops} of a guest that was stopped, "
            f"{self.kills} of one that was killed), {len(self.acknowledged)} acknowledged saves, "
            f"{self.checked} times one was to be there; {len(self.faults)} faults"
        )


def judge(
    work: Path, image: Path, boot: int, saved: set[int], tally: Tally, *, go_on: bool
) -> None:
    """Mount a disk as it was left, and judge the run on it."""
    root = work / "mount" / "runs" / "a"
    with (
        contextlib.closing(disks.Loop(image)) as loop,
        disks.mounted(loop, disks.EXT4, work / "mount"),
    ):
        looked = look(root)
        failed = save_again(root) if go_on else ""
    faults = promises_broken(looked.run, saved, KEEP) + list(disagreements(looked))
    tally.faults += [f"boot {boot}, {len(saved)} saves: {f}" for f in [*faults, failed] if f]
    tally.acknowledged |= {(boot, step) for step in saved}
    tally.checked += len(saved & {s for s, found in looked.run.verdicts.items() if found == s})


def cut_power(
    work: Path, boot: int, cuts: int, rng: random.Random, planted: str, tally: Tally
) -> None:
    """Boot once; cut so many times, the last time for good."""
    image, copy = work / "disk", work / "copy"
    disks.make_image(disks.EXT4, image)
    with booted(work, image, rng.randrange(1 << 32), planted) as guest:
        for number in range(cuts - 1):
            guest.hear(rng.uniform(0, BETWEEN_S))
            with guest.stopped():
                guest.hear(0)
                subprocess.check_call(["cp", "--sparse=always", image, copy])
            judge(work, copy, boot, guest.saved(), tally, go_on=number % 10 == 0)
            tally.stops += 1
            if tally.faults:
                return
        guest.hear(rng.uniform(0, BETWEEN_S))
        guest.kill()
        guest.hear(0)
    judge(work, image, boot, guest.saved(), tally, go_on=True)
    tally.kills += 1
    image.unlink()


def main() -> int:
    """Cut as often as asked; exit 0 when every promise was kept, 2 when no guest can be booted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--boots", type=int, default=2, help="each ends with a SIGKILL")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--plant", choices=list(PLANTED), default="", help="it has to be noticed")
    arguments = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    print(f"seed {arguments.seed}", flush=True)
    logging.disable(logging.CRITICAL)  # what is wrong with a disk is said by its judge
    torch.set_num_threads(1)
    disks.go_private()
    cuts = -(-arguments.cuts // arguments.boots)
    begun, tally = time.monotonic(), Tally()
    with work_directory() as work:
        load_everything(work)
        for boot in range(arguments.boots):
            rng = random.Random(f"{arguments.seed}/{boot}")
            cut_power(work, boot, cuts, rng, arguments.plant, tally)
            print(f"{time.monotonic() - begun:5.0f} s, boot {boot}: {tally}", flush=True)
            if tally.faults:
                break
    print(*tally.faults[:20], sep="\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
