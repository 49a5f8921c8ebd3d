"""The part of a model that PEFT trains, and what says which base it belongs to.

Knows PEFT's models by their attributes; imports no framework.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import MismatchError
from ..group.base import all_sum
from ..group.phase import find_group
from ..state.wrappers import canonical_name, unwrap

PART_ELEMENTS = 1 << 24  # of a tensor that are summed at once
SUM_LIMIT = 1 << 40  # the sum of as many as 2^23 ranks' sums takes 63 bits, as `all_sum` asks


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model is one of PEFT."""
    inner = unwrap(model)
    return hasattr(inner, "peft_config") and hasattr(inner, "base_model")


def adapter_of(model: nn.Module) -> nn.Module:
    """Return a module of the parameters and buffers that are no frozen part of the base.

    They are the model's own, under the same names: what is loaded into it is in the model.
    """
    result = nn.Module()
    for name, value in _state_of(model).items():
        if _is_frozen(model, name, value):
            continue
        *above, last = name.split(".")
        place = result
        for part in above:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        if isinstance(value, nn.Parameter):
            place.register_parameter(last, value)
        else:
            place.register_buffer(last, value)
    return result


def base_of(model: nn.Module) -> dict[str, str]:
    """Return what says which base an adapter was trained on: its name, and a digest of its values.

    The digest is the same however the base is sharded, and in each dtype that holds its values.
    """
    named = {n: v for n, v in _state_of(model).items() if _is_frozen(model, n, v)}
    ranks = find_group(None)
    sums = [_sum_of(value, ranks.rank) % SUM_LIMIT for value in named.values()]
    if ranks.world_size > 1:
        sums = all_sum(ranks, sums)
    digest = hashlib.blake2b(digest_size=16)
    for (name, value), total in zip(named.items(), sums, strict=True):
        shape = getattr(value, "ds_shape", value.shape)  # ZeRO-3 leaves an empty tensor
        digest.update(f"{name} {[*shape]} {total % SUM_LIMIT}\n".encode())
    config = getattr(unwrap(model), "config", None)
    return {"name": str(getattr(config, "_name_or_path", "")), "digest": digest.hexdigest()}


def check_base(model: nn.Module, saved: Mapping[str, Any], path: str) -> None:
    """Check that an adapter goes back onto the base that it was trained on.

    Raises:
        MismatchError: it does not.
    """
    wanted, found = saved.get("base.digest"), base_of(model)
    if wanted and wanted != found["digest"]:
        raise MismatchError(
            f"{path} holds an adapter of the base model {saved.get('base.name')!r}, digest "
            f"{wanted}; the base model here is {found['name']!r}, digest {found['digest']}. Load "
            "the same base. To put the adapter on this one all the same: "
            f'holdfast.load({path!r}, into={{"model": adapter_of(model)}}, include="model"), with '
            "adapter_of from holdfast.integrations.peft"
        )


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    state = unwrap(model).state_dict(keep_vars=True)
    tensors = ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))
    return {canonical_name(name): value for name, value in tensors}


def _is_frozen(model: nn.Module, name: str, value: torch.Tensor) -> bool:
    prefix = getattr(unwrap(model).base_model, "prefix", None)
    is_adapter = isinstance(prefix, str) and prefix in name
    return isinstance(value, nn.Parameter) and not value.requires_grad and not is_adapter


def _sum_of(value: torch.Tensor, rank: int) -> int:
    """Sum the bits of the elements that this rank answers for, so that all ranks' sums add up."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        place = mesh.get_coordinate()
        is_first = place is not None and all(
            at == 0 for at, how in zip(place, value.placements, strict=True) if how.is_replicate()
        )
        return _bits(value.to_local()) if is_first else 0
    if hasattr(value, "ds_tensor"):  # of ZeRO-3: this rank's run, whose end may be padding
        held: Any = value
        size = held.ds_tensor.numel()
        start = size * torch.distributed.get_rank(held.ds_process_group)
        return _bits(held.ds_tensor.view(-1)[: max(0, held.ds_numel - start)])
    return _bits(value) if rank == 0 else 0


def _bits(value: torch.Tensor) -> int:
    total, flat = 0, value.detach().reshape(-1)
    for at in range(0, flat.numel(), PART_ELEMENTS):
        part = flat[at : at + PART_ELEMENTS]
        wide = part.to(torch.float32) if part.is_floating_point() and part.itemsize < 4 else part
        whole = torch.view_as_real(wide) if wide.is_complex() else wide
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        total += int(whole.contiguous().view(kinds[whole.itemsize]).sum(dtype=torch.int64))
    return total
