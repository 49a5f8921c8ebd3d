"""What runs inside: prepares the machine, then plays cases on one version of NFS.

    python -m nfs.guest VERSION SEED SCALE CASE...

Prints a line for each case, and "done" at the end.
"""

import logging
import os
import random
import sys
import time
import traceback
from pathlib import Path

import torch
from forked_ranks import load_everything

from .cases import CASES
from .lab import Lab
from .machine import DISK, Client, prepare_system


def main() -> None:
    """Play cases."""
    version, seed, scale, names = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:]
    begun = time.monotonic()
    prepare_system()
    torch.set_num_threads(1)
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    DISK.joinpath("try").mkdir()
    load_everything(DISK / "try")
    clients = [Client(name, number, version) for number, name in enumerate("ab", 1)]
    print(f"ready {time.monotonic() - begun:.1f}", flush=True)
    for name in names or CASES:
        case, begun = CASES[name], time.monotonic()
        lab = Lab(*clients, name.replace(" ", "-"), random.Random(f"{seed} {name}"), scale)
        try:
            (DISK / lab.name).mkdir()
            told = case(lab)
            print(f"ok {name} ({time.monotonic() - begun:.1f} s): {told}", flush=True)
        except BaseException:
            text = traceback.format_exc().strip().replace("\n", "\n    ")
            print(f"FAILED {name} ({time.monotonic() - begun:.1f} s)\n    {text}", flush=True)
    print("done", flush=True)
    Path("/proc/sysrq-trigger").write_text("o")
    time.sleep(60)


if __name__ == "__main__":
    main()
