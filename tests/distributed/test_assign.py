"""Sharded modules on the meta device get their shards; a run's newest step is loaded by all."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import Checkpointer

from .ranks import run_ranks


def sharded(device: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2,))
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save_and_assign(rank: int, run: str) -> tuple[bool, bool, int | None]:
    """Return whether what is loaded computes the same, whether it trains, and the step."""
    del rank
    saved = sharded("cpu", 0)
    with Checkpointer(run) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": saved})
    empty = sharded("meta", 1)
    report = holdfast.load(run, {"net": empty}, rename={"model": "net"}, assign=True)
    batch = torch.ones(2, 8)
    is_same = torch.equal(saved(batch), empty(batch))
    optimizer = torch.optim.AdamW(empty.parameters())
    empty(batch).sum().backward()
    optimizer.step()
    return is_same, not torch.equal(saved(batch), empty(batch)), report.step


def test_sharded_modules_on_the_meta_device_get_their_shards(tmp_path: Path) -> None:
    assert run_ranks(2, save_and_assign, str(tmp_path / "run")) == [(True, True, 2)] * 2
