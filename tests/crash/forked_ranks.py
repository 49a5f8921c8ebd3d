"""Ranks that are forked from a process that has loaded everything: they start within a moment.

To be imported before anything saves or loads: it makes the pools of this process small.
"""

import dataclasses
import os
import select
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import crash_content
import torch.distributed as dist
from crash_content import load_number, make_state

import holdfast.options
from holdfast.errors import PeerError

# Fresh memory is slow to touch, and each rank has its own: 2 MiB of it instead of 32. The rooms
# take the size over when they are imported, at the first save.
assert "holdfast.engine.pool" not in sys.modules
holdfast.options.SLOT_BYTES = 1 << 20
OPTIONS = dataclasses.replace(crash_content.OPTIONS, pool_bytes=2 << 20)

PEER_EXIT, FAILED_EXIT = 3, 4  # what a survivor says: PeerError, or anything else
DEADLINE_S = 20.0  # for survivors to notice; far less than the timeout of the collectives
COLLECTIVE_TIMEOUT_S = 120.0


def load_everything(root: Path) -> None:
    """Import all that a save and a load need, before the first fork."""
    holdfast.Checkpointer(root / "try", options=OPTIONS).save(1, make_state(1))
    load_number(root / "try" / "step-00000001", OPTIONS)
    shutil.rmtree(root / "try")


def fork(main: Callable[[int], None], rank: int) -> int:
    """Run a rank's part in a child, and nothing else in it; return its process id."""
    child = os.fork()
    if child:
        return child
    status = FAILED_EXIT
    try:
        main(rank)
        status = 0
    except PeerError:
        status = PEER_EXIT
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


def join(name: str, port: int, rank: int, world_size: int) -> None:
    """Make the process group of a name; who meets at the port makes them all there."""
    meeting = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port))
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=meeting, rank=rank, world_size=world_size, timeout=timeout
    )


def read_until(reading: int, enough: Callable[[str], bool]) -> str:
    """Read until there is enough, or until all writers are gone."""
    text = ""
    deadline = time.monotonic() + DEADLINE_S
    while not enough(text) and time.monotonic() < deadline:
        if select.select([reading], [], [], 0.1)[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                break
            text += part.decode()
    return text
