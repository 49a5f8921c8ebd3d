"""Orbax: numpy arrays over the memory of the tensors, in one key-value store (OCDBT)."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported

import numpy
from durable import sync_all
from orbax import checkpoint
from training_state import State, fill

from compare import Peer


def peers() -> list[Peer]:
    """One contender."""
    return [Peer("Orbax", "OCDBT, zarr3, no compression, fsync; copied into place", _save, _load)]


def _checkpointer() -> checkpoint.Checkpointer:
    handler = checkpoint.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
    return checkpoint.Checkpointer(handler)


def _save(state: State, path: Path) -> None:
    arrays = {
        room: {name: value.numpy() for name, value in found.items()}
        for room, found in state.items()
    }
    with _checkpointer() as checkpointer:
        checkpointer.save(path.absolute(), arrays)
    sync_all(path)


def _load(path: Path, state: State) -> None:
    as_numpy = checkpoint.RestoreArgs(restore_type=numpy.ndarray)
    arguments = {room: dict.fromkeys(tensors, as_numpy) for room, tensors in state.items()}
    with _checkpointer() as checkpointer:
        fill(state, checkpointer.restore(path.absolute(), restore_args=arguments))
