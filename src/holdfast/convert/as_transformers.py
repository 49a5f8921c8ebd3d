"""The names and the parts that `save_pretrained` of the installed transformers writes.

In memory, transformers has the weights of all experts in one tensor, say; its files have them one
by one. What it does to save is done here to tensors without memory, and what comes out tells which
box of which tensor each part is. Knows no files but the configuration.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..layout import Box, Shape
from ..state.tensors import TORCH_DTYPES
from .beside import CONFIG
from .to_safetensors import Written

logger = logging.getLogger("holdfast")


def as_saved(tensors: Sequence[Written], beside: tuple[str, list[str]]) -> Sequence[Written]:
    """Return tensors as `save_pretrained` would write them; as they are where nobody can tell.

    That is where there is no configuration, transformers is not installed, or it would compute
    something: transformers loads the names that it has in memory too.

    Args:
        beside: a directory and the names of its files, as `files_beside` returns them.
    """
    place, names = beside
    if CONFIG not in names:
        return tensors
    try:
        transformers = import_module("transformers")
        loading = import_module("transformers.core_model_loading")
    except ImportError:
        return tensors
    try:
        return _reverted(transformers, loading, tensors, place)
    except Exception as error:  # of a library, about a model that it may not know
        logger.warning(
            "names are as in memory: transformers cannot tell how it saves this model: %s", error
        )
        return tensors


def _reverted(
    transformers: ModuleType, loading: ModuleType, tensors: Sequence[Written], place: str
) -> Sequence[Written]:
    config = transformers.AutoConfig.from_pretrained(
        place, local_files_only=True, trust_remote_code=False
    )
    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if kind is None:
        return tensors
    with torch.device("meta"):
        model = kind(config)
    ignored = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    kept = {written.piece.name: written for written in tensors if written.piece.name not in ignored}
    empty = {
        name: torch.empty(written.shape, dtype=TORCH_DTYPES[written.piece.dtype], device="meta")
        for name, written in kept.items()
    }
    with _Views(), torch.no_grad():  # type: ignore[no-untyped-call]
        found: Mapping[str, Any] = loading.revert_weight_conversion(model, dict(empty))
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    parts = []
    for name, view in found.items():
        owner = owners.get(view.untyped_storage()._cdata)
        box = box_of_view(view, kept[owner].shape) if owner is not None else None
        if owner is None or box is None:
            logger.warning("names are as in memory: %s would have to be computed", name)
            return tensors
        piece = replace(kept[owner].piece, name=name, box=box)
        parts.append(Written(piece, tuple(view.shape)))
    if sum(part.piece.size_bytes for part in parts) != sum(
        written.piece.size_bytes for written in kept.values()
    ):
        logger.warning("names are as in memory: transformers would not save every element once")
        return tensors
    return parts


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a copy be a view of what it is a copy of."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is torch.ops.aten.clone.default:
            return args[0].detach()  # type: ignore[no-any-return]
        return func(*args, **(kwargs or {}))  # type: ignore[no-any-return]


def box_of_view(view: torch.Tensor, shape: Shape) -> Box | None:
    """Return which box of a row-major tensor a view of it is; None: its elements are no box."""
    strides, index, rest = list[int](), list[int](), view.storage_offset()
    step = 1
    for count in reversed(shape):
        strides.insert(0, step)
        step *= count
    if not view.numel():
        return None
    for stride in strides:
        index.append(rest // stride)
        rest %= stride
    extent, d = [1] * len(shape), 0
    for count, stride in zip(view.shape, view.stride(), strict=True):
        if count == 1:
            continue
        while d < len(shape) and (strides[d] != stride or shape[d] == 1):
            d += 1
        if d == len(shape) or index[d] + count > shape[d]:
            return None
        extent[d] = count
        d += 1
    return Box(tuple(index), tuple(extent))
