"""torch.save + fsync, torch.load: one file, at its fastest settings (docs/benchmarks/method.md)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from durable import sync_all
from training_state import State, fill

from compare import Peer


def peers() -> list[Peer]:
    """One contender, without CRC-32: torch.load never checks it, and it costs up to half."""
    return [Peer("torch.save", "fsync, no CRC-32; mmap=True, copied into place", _save, _load)]


def _save(state: State, path: Path) -> None:
    with without_crc32():
        torch.save(state, path)
    sync_all(path)


@contextmanager
def without_crc32() -> Iterator[None]:
    """Let torch.save leave out what torch.load never checks."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _load(path: Path, state: State) -> None:
    fill(state, torch.load(path, mmap=True, weights_only=True))
