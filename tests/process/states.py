"""Small states as training has them, what they hold, and whether a checkpoint holds the same."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast

State = dict[str, Any]
Content = dict[str, Any]  # tensors by name, and values

OPTIONS = holdfast.Options(pool_bytes=32 << 20)


class Schedule:
    """Has hooks, as schedulers have: a load calls them when it has filled the tensors."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        """Return what is saved."""
        return {"count": self.count}

    def load_state_dict(self, given: dict[str, int]) -> None:
        """Take over what was saved."""
        self.count = given["count"]


def make_state(seed: int, width: int = 8) -> State:
    """Return a module, an optimizer that has taken a step, and values."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": seed, "notes": ["a", seed]}
    state["schedule"] = Schedule(seed)
    train(state)
    return state


def train(state: State) -> None:
    """Take one step of training, which changes every tensor."""
    state["optimizer"].zero_grad()
    model = state["model"]
    model(torch.ones(2, model[0].in_features)).square().sum().backward()
    state["optimizer"].step()


def content_of(state: State) -> Content:
    """Return a copy of what a state holds."""
    held: Content = {"step": state["step"], "notes": list(state["notes"])}
    held["schedule"] = state["schedule"].count
    held |= {name: part.clone() for name, part in state["model"].state_dict().items()}
    slots = state["optimizer"].state_dict()["state"]
    for index, slot in slots.items():
        held |= {f"{index}.{name}": part.clone() for name, part in slot.items()}
    return held


def same(one: Content, other: Content) -> bool:
    """Return whether both hold the same bits."""
    return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def digest_of(content: Content) -> str:
    """Return a digest of every bit of it."""
    digest = hashlib.sha256()
    for name, value in sorted(content.items()):
        is_tensor = isinstance(value, torch.Tensor)
        told = [str(value.dtype), list(value.shape)] if is_tensor else value
        digest.update(f"{name} {told}".encode())
        if is_tensor:
            digest.update(np.ascontiguousarray(value.numpy()).data)
    return digest.hexdigest()[:16]


def load_content(path: Path, width: int = 8) -> Content:
    """Load a checkpoint, strictly, and return what it holds."""
    state = make_state(1 << 20, width)
    holdfast.load(path, into=state, options=OPTIONS)
    return content_of(state)


def is_committed(path: Path) -> bool:
    """Return whether a checkpoint is visible there."""
    return (path / "MANIFEST").exists()
