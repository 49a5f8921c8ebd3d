"""Write `foreign/torchsnapshot.tgz` with torchsnapshot: two ranks of gloo.

pip install --no-deps torchsnapshot==0.1.0
python make_torchsnapshot.py DIRECTORY && tar -C DIRECTORY -czf foreign/torchsnapshot.tgz .
"""

import os
import sys
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed._shard import sharded_tensor

RANKS = 2


def state(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "step": 3,
        "rate": 0.5,
        "name": "a/b%",
        "bytes": b"ab",
        "flag": True,
        "nothing": None,
        "pair": (1, 2),
        "nested": {"x/y": [1, {"k": torch.arange(3)}], 7: "seven"},
        "half": torch.randn(6).bfloat16(),
        "turned": torch.randn(4, 3).t(),
        "large": torch.randn(40, 5),
        "count": torch.tensor(9),
        "shared": torch.randn(8, 3),
        "own": torch.full((2,), float(rank)),
    }


def save(rank: int, directory: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    held = state(rank)
    shard = held["shared"].chunk(RANKS)[rank].clone()
    local = sharded_tensor.Shard.from_tensor_and_offsets(shard, [4 * rank, 0], rank)
    held["shared"] = sharded_tensor.init_from_local_shards([local], 8, 3)
    module: Any = import_module("torchsnapshot")
    with import_module("torchsnapshot.knobs").override_max_chunk_size_bytes(200):
        everywhere = [f"state/{name}" for name in ("large", "half", "turned", "nested/**")]
        module.Snapshot.take(directory, {"state": module.StateDict(**held)}, replicated=everywhere)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29595"}
    multiprocessing.spawn(save, (sys.argv[1],), RANKS)
