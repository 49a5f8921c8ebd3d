"""Ranks that share one device: they save together, another number loads, and one dies.

NCCL takes one rank a device, so these talk by gloo; `test_modules` has a group of NCCL alone.
"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from .gpu import DEVICE, needs_device

pytestmark = needs_device
HEAD = """
import os, sys, signal, torch, holdfast
import torch.distributed as dist
rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(sys.argv[4], world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
device = "DEVICE"
full = torch.arange(6.0 * 1000 * 512).view(6000, 512)
size = 6000 // world
def state(full):
    rows = full[rank * size : (rank + 1) * size].to(device)
    box = holdfast.Shard(rows, (6000, 512), offset=(rank * size, 0))
    return {"sharded": box, "same": torch.arange(5000.0, device=device)}
"""


def start(script: str, ranks: int, path: Path, meet: Path) -> list[subprocess.Popen[str]]:
    text = HEAD.replace("DEVICE", DEVICE) + textwrap.dedent(script)
    return [
        subprocess.Popen(
            [sys.executable, "-c", text, str(rank), str(ranks), str(path), str(meet)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def ended(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    found = []
    for rank in ranks:
        text = rank.communicate(timeout=180)[0]
        found.append((rank.returncode, text))
    return found


def test_two_ranks_save_and_three_load(tmp_path: Path) -> None:
    save = """
    holdfast.save(state(full), path)
    handle = holdfast.save_async(state(full), path + "-async", stage="lazy")
    handle.result()
    dist.barrier()
    """
    load = """
    for at in (path, path + "-async"):
        target = state(torch.zeros_like(full))
        holdfast.load(at, into=target)
        assert torch.equal(target["sharded"].data.cpu(), full[rank * size : (rank + 1) * size])
        assert torch.equal(target["same"].cpu(), torch.arange(5000.0))
    dist.barrier()
    """
    for n, (script, ranks) in enumerate(((save, 2), (load, 3), (load, 1))):
        found = ended(start(script, ranks, tmp_path / "a", tmp_path / f"meet{n}"))
        assert [code for code, _ in found] == [0] * ranks, found


def test_a_rank_that_dies_in_a_save_fails_it_for_the_other(tmp_path: Path) -> None:
    script = """
    holdfast.save(state(full), path)
    options = holdfast.Options(deadline_s=20)
    handle = holdfast.save_async(state(full), path + "-dead", options=options)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        handle.result()
    except holdfast.errors.HoldfastError as error:
        print("told:", error)
        os._exit(7)
    os._exit(0)
    """
    first, second = ended(start(script, 2, tmp_path / "a", tmp_path / "meet"))
    assert second[0] == -signal.SIGKILL
    assert first[0] in (0, 7), first  # 0: it died after its part was written
    assert (tmp_path / "a-dead" / "MANIFEST").exists() == (first[0] == 0)
    assert (tmp_path / "a" / "MANIFEST").exists()


def test_a_rank_that_dies_in_a_collective_is_told(tmp_path: Path) -> None:
    """The next save of the other fails within its deadline; what was committed stays good."""
    script = """
    import datetime
    holdfast.save(state(full), path)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        tensor = torch.ones(1000, device=device)
        dist.all_reduce(tensor)
    except RuntimeError as error:
        pass
    try:
        holdfast.save(state(full), path + "-next", options=holdfast.Options(deadline_s=20))
    except holdfast.errors.HoldfastError as error:
        print("told:", error)
        os._exit(7)
    os._exit(0)
    """
    first, second = ended(start(script, 2, tmp_path / "a", tmp_path / "meet"))
    assert second[0] == -signal.SIGKILL and first[0] == 7, first
    assert not (tmp_path / "a-next" / "MANIFEST").exists()
    done = os.system(f"{sys.executable} -m holdfast verify {tmp_path / 'a'} > /dev/null")
    assert done == 0
