"""Write `foreign/megatron.tgz` with Megatron-Core: two ranks of gloo, no accelerator.

pip install --no-deps megatron-core==0.16.1
python make_megatron.py DIRECTORY && tar -C DIRECTORY -czf foreign/megatron.tgz .
"""

import argparse
import enum
import io
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

RANKS = 2


class Backend(enum.Enum):
    AUTO = 1


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "decoder.w": torch.randn(8, 6, generator=random),
        "decoder.b": torch.randn(6, generator=random),
        "decoder.layers.e": torch.randn(4, 10, 3, generator=random).bfloat16(),
    }


def state_of(rank: int) -> dict[str, Any]:
    mapping = import_module("megatron.core.dist_checkpointing")
    part, whole = mapping.ShardedTensor.from_rank_offsets, tensors()
    w, b, e = whole.values()
    layers = [
        part("decoder.layers.e", e[n].clone(), (0, n, 4), prepend_axis_num=1, replica_id=0)
        for n in range(2 * rank, 2 * rank + 2)
    ]
    rng = [{"random_rng_state": (3, (1, 2), None), "np": b"x"}]
    return {
        "w": part("decoder.w", w.chunk(RANKS)[rank].clone(), (0, rank, RANKS), replica_id=0),
        "b": part("decoder.b", b, replica_id=rank),
        "layers": layers,
        "extra": mapping.ShardedObject(
            "decoder.extra_state", io.BytesIO(b"abc"), (1,), (0,), replica_id=rank
        ),
        "rng": mapping.ShardedObject("rng_state", rng, (RANKS,), (rank,), replica_id=0),
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, backend=Backend.AUTO),
        "iteration": 100,
        "optimizer": {"param_groups": [{"lr": 0.1, "params": [0, 1]}]},
    }


def save(rank: int, directory: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    # Its finish makes a tensor on the current accelerator, and waits for it.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    Path(directory).mkdir(exist_ok=True)
    dist.barrier()
    import_module("megatron.core.dist_checkpointing").save(state_of(rank), directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    multiprocessing.spawn(save, (sys.argv[1],), RANKS)
