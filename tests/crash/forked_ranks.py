"""Ranks that are forked from a process that has loaded everything: they start within a moment.

To be imported before anything saves or loads: it makes the pools of this process small.
"""

import dataclasses
import faulthandler
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path

import crash_content
import torch.distributed as dist
from crash_content import load_number, make_state

import holdfast.options
from holdfast.codecs.base import Codec
from holdfast.errors import PeerError

# Fresh memory is slow to touch, and each rank has its own: 2 MiB of it instead of 32. The rooms
# take the size over when they are imported, at the first save.
assert "holdfast.engine.pool" not in sys.modules
holdfast.options.SLOT_BYTES = 1 << 20
OPTIONS = dataclasses.replace(crash_content.OPTIONS, pool_bytes=2 << 20)

PEER_EXIT, FAILED_EXIT = 3, 4  # what a survivor says: PeerError, or anything else
COLLECTIVE_TIMEOUT_S = 120.0
POLL_S = 0.002
TELL_S = 1.0


def load_everything(root: Path, codecs: "Iterable[str | Codec]" = ("raw",)) -> None:
    """Import all that a save and a load need, before the first fork."""
    for codec in codecs:
        checkpointer = holdfast.Checkpointer(root / "try", codec=codec, options=OPTIONS)
        for step in (1, 2):
            checkpointer.save(step, make_state(step))
            load_number(Path(checkpointer.path(step)), OPTIONS)
        checkpointer.close()
        shutil.rmtree(root / "try")


def fork(main: Callable[[int], None], rank: int) -> int:
    """Run a rank's part in a child, and nothing else in it; return its process id."""
    child = os.fork()
    if child:
        return child
    status = FAILED_EXIT
    faulthandler.register(signal.SIGUSR1)  # every thread tells where it is: see `reap`
    try:
        main(rank)
        status = 0
    except PeerError:
        status = PEER_EXIT
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


def join(
    name: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    *,
    host: str = "127.0.0.1",
    serves: bool = False,
) -> None:
    """Make the process group of a name; who meets at the port makes them all there.

    Args:
        serves: this rank is the one that the others meet at.
    """
    store = dist.TCPStore(host, port, is_master=serves, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def read_until(reading: int, enough: Callable[[str], bool], within_s: float) -> str:
    """Read until there is enough, until all writers are gone, or for so long."""
    text = ""
    until = time.monotonic() + within_s
    while not enough(text) and time.monotonic() < until:
        if select.select([reading], [], [], 0.1)[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                break
            text += part.decode()
    return text


def strike(children: Mapping[int, int], ranks: Iterable[int], number: int) -> None:
    """Send a signal to ranks; ``children`` maps each rank to a process not waited for yet."""
    for rank in ranks:
        os.kill(children[rank], number)


def await_death(child: int, within_s: float) -> bool:
    """Wait until a child is dead, and leave it to be waited for; return whether it is."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        time.sleep(POLL_S)
    return False


def reap(children: Mapping[int, int], within_s: float) -> tuple[dict[int, int], list[int]]:
    """Wait for all children; let those that still run after so long say where, and kill them.

    Returns:
        how each rank ended, as `os.waitstatus_to_exitcode` says; the ranks that had to be killed.
    """
    ended: dict[int, int] = {}
    late: list[int] = []
    until = time.monotonic() + within_s
    while len(ended) < len(children):
        for rank in children.keys() - ended.keys():
            found, status = os.waitpid(children[rank], os.WNOHANG)
            if found:
                ended[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until and rank not in late:
                late.append(rank)
                os.kill(children[rank], signal.SIGUSR1)
                time.sleep(TELL_S)
                os.kill(children[rank], signal.SIGKILL)
        time.sleep(POLL_S)
    return ended, late
