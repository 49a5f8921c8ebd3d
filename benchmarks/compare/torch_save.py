"""torch.save + fsync, torch.load: one file, at its fastest settings (docs/benchmarks.md)."""

from pathlib import Path

import torch
from durable import sync_all
from training_state import State

from compare import Peer


def peers() -> list[Peer]:
    """One contender, without CRC-32: torch.load never checks it, and it costs up to half."""
    return [Peer("torch.save", "fsync, no CRC-32; mmap=True, copied into place", _save, _load)]


def _save(state: State, path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(before)
    sync_all(path)


def _load(path: Path, state: State) -> None:
    found = torch.load(path, mmap=True, weights_only=True)
    for room, tensors in state.items():
        for name, tensor in tensors.items():
            tensor.copy_(found[room][name])
