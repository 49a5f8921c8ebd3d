"""What DCP does with sharded optimizers of FSDP1, as the documentation of its function has it."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from .stage import Stage, behaviour


def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model = FSDP(layers, device_id=torch.device("cpu"), use_orig_params=True)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: FSDP, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(
        torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
    ).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def local(model: FSDP, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what this rank holds of all parameters and moments."""
    found = []
    for parameter in model.parameters():
        held = optimizer.state.get(parameter, {})
        found.append([parameter.detach().clone(), *(held[key] for key in sorted(held))])
    return found


@behaviour("load_sharded_optimizer_state_dict, for FSDP1", ranks=(2,), ways=("sync",))
def sharded_optimizer(stage: Stage) -> Any:
    model, optimizer = build(1)
    train(model, optimizer, 1)
    state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    stage.save(state, storage_writer=FileSystemWriter(stage.path()))
    model, optimizer = build(2)
    into = {"model": model.state_dict()}
    dcp.load_state_dict(into, FileSystemReader(stage.path()))
    model.load_state_dict(into["model"])
    found = load_sharded_optimizer_state_dict(
        model.state_dict(), "optimizer", FileSystemReader(stage.path())
    )
    flat = FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"])
    optimizer.load_state_dict(flat)
    resumed = local(model, optimizer)
    train(model, optimizer, 2)
    return sorted(found), flat["param_groups"], resumed, local(model, optimizer)
