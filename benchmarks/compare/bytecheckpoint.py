"""ByteCheckpoint + fsync, as it saves the model of a DDP job of one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from durable import sync_all
from torch import distributed
from training_state import State, flat

from compare import Peer

# It reads them when it is imported.
os.environ.setdefault("BYTECHECKPOINT_STORE_WORKER_COUNT", "4")
os.environ.setdefault("BYTECHECKPOINT_LOAD_WORKER_COUNT", "2")
os.environ.setdefault("BYTECHECKPOINT_LOGGING_LEVEL", "ERROR")

from bytecheckpoint import DDPCheckpointer


class Model:
    """What it asks of a model."""

    def __init__(self, state: State) -> None:
        self._tensors = flat(state)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors, which it fills in place when it loads."""
        return self._tensors

    def load_state_dict(self, found: dict[str, torch.Tensor]) -> None:
        """Do nothing: they are the same tensors."""


def peers() -> list[Peer]:
    """One contender."""
    return [
        Peer("ByteCheckpoint", "4 writer threads, fsync; fast_loading, 2 threads", _save, _load)
    ]


def _save(state: State, path: Path) -> None:
    with _group():
        DDPCheckpointer.save(str(path), {"model": Model(state)})
    sync_all(path)


def _load(path: Path, state: State) -> None:
    with _group():
        DDPCheckpointer.load(str(path), {"model": Model(state)}, fast_loading=True)


@contextmanager
def _group() -> Iterator[None]:
    """Make the process group that it needs, and that nobody else here is to meet."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
