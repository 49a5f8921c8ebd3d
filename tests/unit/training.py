"""A small net and its steps, deterministic: what tests of modules and optimizers train."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(module: nn.Module, optimizer: Optimizer, steps: range, scheduler: Any = None) -> None:
    """Take the steps of these numbers; the data of a step depends on its number only."""

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = module(batch).pow(2).mean()
        value.backward()
        return value

    for step in steps:
        batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        optimizer.step(loss)
        if scheduler is not None:
            scheduler.step(1.0) if hasattr(scheduler, "patience") else scheduler.step()


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal: types, bits of tensors, values."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype:
            return False
        return one.shape == other.shape and one.equal(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
