"""What runs inside User-Mode Linux until its power is cut: two ranks that save again and again.

Each step is told on standard output when it is durable. The codec and the way of saving change
every few steps.

    python guest.py ROOT SEED [PLANTED FAULT]
"""

import fcntl
import itertools
import os
import random
import socket
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from forked_ranks import fork, join, load_everything

from blocks.plants import NOTHING, PLANTED
from blocks.saved_runs import Plan, save_steps

WORLD_SIZE = 2
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def main() -> None:
    """Save for ever."""
    root, seed = Path(sys.argv[1]), sys.argv[2]
    planted = PLANTED[sys.argv[3]] if len(sys.argv) > 3 else NOTHING
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", b"lo", IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    load_everything(root.parent)
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank_main(rank: int) -> None:
        join("guest", meeting.port, rank, WORLD_SIZE)
        planted.plant(rank)
        rng = random.Random(seed)
        for number in itertools.count():
            plan = Plan.choose(rng)
            save_steps(root, rank, plan, tell, first=1 + number * plan.steps)

    def tell(step: int) -> None:
        os.write(1, f"saved {step}\n".encode())

    children = [fork(rank_main, rank) for rank in range(WORLD_SIZE)]
    print("ready", flush=True)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
