"""Boots Linux in user mode on the files of this machine. Knows nothing of what runs in it."""

import os
import subprocess
from pathlib import Path

from . import disks

UML = "linux.uml"


def boot(here: Path, work: Path, image: Path, init: str, memory: str) -> "subprocess.Popen[bytes]":
    """Boot a guest that sees our files, read-only; its console is the process's output.

    Args:
        here: an empty directory for what boots it; not below /dev, which in the guest is its own.
        work: where its memory is kept.
        image: of its disk.
        init: the text of its first program.
    """
    program, shim, source = here / "init", here / "uml_ptrace.so", Path(__file__).parent
    subprocess.check_call(
        ["cc", "-O2", "-shared", "-fPIC", "-o", shim, source / "uml_ptrace.c", "-ldl"]
    )
    program.write_text(init)
    program.chmod(0o755)
    command = [UML, f"mem={memory}", "rootfstype=hostfs", "rootflags=/", "ro", f"ubd0={image}"]
    return disks.start(
        *command,
        *(f"init={program}", "con=null", "con0=fd:0,fd:1", "quiet"),
        env=os.environ | {"LD_PRELOAD": str(shim), "TMPDIR": str(work)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
