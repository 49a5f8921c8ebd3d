"""Look at the demo's checkpoints: their size, whether two are equal, what a flipped bit does."""

import shutil
from pathlib import Path

import torch

import holdfast
from holdfast.errors import HoldfastError

from .demo_results import Flip
from .demo_train import build


def try_open(path: str) -> str | None:
    """Return the error of opening a checkpoint, or None when it opens."""
    try:
        with holdfast.open(path):
            return None
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"


def measure(path: str) -> tuple[int, int]:
    """Return the model's parameters, and the bytes of all tensors; tied ones count once."""
    with holdfast.open(path) as checkpoint:
        infos = [checkpoint.info(name) for name in checkpoint.names()]
    own = [info for info in infos if info.tied_to is None]
    weights = [info for info in own if info.name.startswith("model.")]
    parameters = sum(torch.Size(info.shape).numel() for info in weights)
    return parameters, sum(info.size_bytes for info in own)


def compare(first: str, second: str) -> tuple[int, int]:
    """Return how many tensors two checkpoints share, name and bits, and how many there are."""
    with holdfast.open(first) as one, holdfast.open(second) as other:
        names = set(one.names()) | set(other.names())
        common = sorted(set(one.names()) & set(other.names()))
        equal = sum(_same_bits(one.tensor(name), other.tensor(name)) for name in common)
    return equal, len(names)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def flip_one_bit(path: str, copy: Path, size: str) -> Flip:
    """Copy a checkpoint, flip the middle bit of its largest file, then load and verify the copy."""
    shutil.copytree(path, copy)
    with holdfast.open(copy) as checkpoint:
        _, name = max(zip(checkpoint.file_bytes, checkpoint.file_names, strict=True))
    position, bit = (copy / name).stat().st_size // 2, 4
    with (copy / name).open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))
    load_error = None
    try:
        model, optimizer = build(size)
        holdfast.load(copy, into={"model": model, "optimizer": optimizer, "step": 0})
    except HoldfastError as error:
        load_error = f"{type(error).__name__}: {error}"
    with holdfast.open(copy) as checkpoint:
        faults = [damage.what for damage in checkpoint.verify()]
    return Flip(name, position, bit, load_error, faults)
