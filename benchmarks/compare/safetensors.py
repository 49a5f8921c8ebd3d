"""safetensors + fsync: one file, its tensors copied into place one by one."""

from pathlib import Path

from durable import sync_all
from safetensors import safe_open
from safetensors.torch import save_file
from training_state import State, flat

from compare import Peer


def peers() -> list[Peer]:
    """One contender."""
    return [Peer("safetensors", "fsync; mmap, copied into place", _save, _load)]


def _save(state: State, path: Path) -> None:
    save_file(flat(state), path)
    sync_all(path)


def _load(path: Path, state: State) -> None:
    with safe_open(path, framework="pt") as file:
        for name, tensor in flat(state).items():
            tensor.copy_(file.get_tensor(name))
