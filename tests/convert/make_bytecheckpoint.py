"""Write `foreign/bytecheckpoint.tgz` with ByteCheckpoint: FSDP2 on two ranks of gloo.

pip install --no-deps bytecheckpoint==0.0.2 grpcio protobuf
python make_bytecheckpoint.py DIRECTORY && tar -C DIRECTORY -czf foreign/bytecheckpoint.tgz .
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard

RANKS = 2


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 3, bias=False))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()


def save(rank: int, directory: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.__version__ = "2.5.0"  # type: ignore[assignment]  # the newest that it takes
    net, _ = trained()
    fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step(net, optimizer)
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "extra_state": {"note": rank}}
    module: Any = import_module("bytecheckpoint")
    module.save(directory, state, framework="fsdp2", global_steps=2)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29596"}
    Path(sys.argv[1]).mkdir()
    multiprocessing.spawn(save, (sys.argv[1],), RANKS)
