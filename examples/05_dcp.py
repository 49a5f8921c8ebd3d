"""Train with FSDP2, save through PyTorch's DCP into holdfast checkpoints, resume on any ranks.

torchrun --nproc-per-node 2 examples/05_dcp.py runs/dcp
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter


class Training(Stateful):
    """A model and its optimizer, under the names that no layout changes."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)

    def step(self, number: int) -> float:
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        loss = (self.model(batch) - batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


dist.init_process_group("gloo")
path, training = f"{sys.argv[1]}/world-{dist.get_world_size()}", Training()
for number in range(10):
    training.step(number)
dcp.save({"training": training, "step": 10}, storage_writer=HoldfastWriter(path))
expected = training.step(10)

resumed = {"training": Training(), "step": 0}
dcp.load(resumed, storage_reader=HoldfastReader(path))
assert resumed["step"] == 10 and resumed["training"].step(10) == expected
if dist.get_rank() == 0:
    with holdfast.open(path) as checkpoint:  # an ordinary checkpoint
        assert checkpoint.verify() == []
        print(f"{path}: {len(checkpoint.names())} tensors, resumed at loss {expected:.4f}")
dist.destroy_process_group()
