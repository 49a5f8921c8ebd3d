"""Which elements of which parameters a rank of a DeepSpeed engine holds, by the model's names.

Knows engines and their optimizers; no files. ZeRO-1, 2 and 3, BF16_Optimizer, the two FP16 ones and
plain torch optimizers differ only in `pieces_of` and `spread`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from math import prod
from typing import Any

import torch

from ...errors import MismatchError, OptionError, StateError
from ...layout import Shape
from ...state.modules import group_options, group_tensors
from ...state.shard import Shard

_EXPERT = re.compile(r"^(deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)$")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a parameter's elements, in a flat tensor that an optimizer steps.

    Attributes:
        name: of the parameter, in the whole model.
        shape: of the whole parameter.
        start: elements of the parameter before the run.
        flat: what the optimizer steps: the master weights, and the key of its state.
        at: elements of ``flat`` before the run.
        count: elements of the run; 0: this rank holds none of them.
        group: the options of the parameter.
        is_whole: ``flat`` is the parameter itself, in its shape.
        is_copy: another pipeline stage gives the same parameter.
    """

    name: str
    shape: Shape
    start: int
    flat: torch.Tensor
    at: int
    count: int
    group: dict[str, Any]
    is_whole: bool = False
    is_copy: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor | Shard:
        """Return the run in a tensor that lies as ``flat`` does."""
        if self.is_whole:
            return tensor.detach()
        run = tensor.detach().view(-1).narrow(0, self.at, self.count)
        return Shard(run, self.shape, start=min(self.start, prod(self.shape)))


def check_engine(engine: Any) -> None:
    """Check that all that an engine trains can be described.

    Raises:
        OptionError: it cannot; the text says what to do.
    """
    grid, found = getattr(engine, "grid", None), ""  # of a pipeline
    cuts = engine.mp_world_size if grid is None else grid.get_slice_parallel_world_size()
    if cuts > 1:
        found = f"tensor parallelism over {cuts} ranks, whose cuts it does not name"
    elif engine.zero_nvme_offload_optimizer() or _swaps_parameters(engine):
        found = "offload to NVMe, whose state is in files of DeepSpeed"
    elif any(type(m).__name__ == "AutoEPMoELayer" for m in engine.module.modules()):
        found = "AutoEP layers"
    elif engine.zenflow or engine.super_offload():
        found = "ZenFlow or SuperOffload, which keep state of their own"
    if found:
        raise OptionError(
            f"the DeepSpeed engine uses {found}; holdfast cannot describe its state. Nothing was "
            "changed: save with DeepSpeed's own checkpoints, or train without it"
        )


def _swaps_parameters(engine: Any) -> bool:
    config = engine.zero_offload_param()
    return config is not None and str(config.device).endswith("nvme")


def names_of(engine: Any) -> dict[str, Any]:
    """Return the parameters by their names in the whole model; tied ones by each of theirs."""
    changes = _expert_numbers(engine)
    listed = engine.module.named_parameters(remove_duplicate=False)
    return {_renamed(name, changes): param for name, param in listed}


def buffers_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the buffers that are saved, by their names in the whole model."""
    changes, kept = _expert_numbers(engine), {*engine._get_buffer_names()}
    found = engine.module.named_buffers()
    return {_renamed(name, changes): buffer for name, buffer in found if name in kept}


def _expert_numbers(engine: Any) -> dict[str, int]:
    """Return the number of each MoE layer's first local expert, by the layer's prefix."""
    moe, groups = import_module("deepspeed.moe.layer"), import_module("deepspeed.utils.groups")
    return {
        f"{name}." if name else "": layer.num_local_experts
        * groups._get_expert_parallel_rank(layer.expert_group_name)
        for name, layer in engine.module.named_modules()
        if isinstance(layer, moe.MoE)
    }


def _renamed(name: str, firsts: Mapping[str, int]) -> str:
    for prefix, first in firsts.items():
        if name.startswith(prefix) and (found := _EXPERT.match(name[len(prefix) :])):
            return f"{prefix}{found[1]}{int(found[2]) + first}{found[3]}"
    return name


def pieces_of(engine: Any) -> list[Piece]:
    """Return what this rank holds of each parameter that the engine's optimizer steps."""
    optimizer = engine.optimizer
    inner = inner_of(engine)
    if inner is None:
        return []
    names: dict[int, str] = {}
    for name, param in names_of(engine).items():
        names.setdefault(id(param), name)
    is_whole = False
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        found = _of_stage_3(optimizer)
    elif hasattr(optimizer, "bit16_groups") or hasattr(optimizer, "bf16_groups"):
        found = _of_partitions(optimizer)
    elif hasattr(optimizer, "fp32_groups_flat"):
        found = _of_flat_copies(optimizer)
    else:
        is_whole = True
        groups = [group["params"] for group in inner.param_groups]
        found = _of_copies(getattr(optimizer, "fp16_groups", groups), groups)
    result = []
    for number, param, shape, start, flat, at, count in found:
        group = inner.param_groups[number]
        copy = bool(getattr(param, "ds_pipe_replicated", False))
        name = names[id(param)]
        result.append(Piece(name, shape, start, flat, at, count, group, is_whole, copy))
    return result


_Found = tuple[int, Any, Shape, int, torch.Tensor, int, int]  # group, param, and so on as in Piece


def _of_stage_3(optimizer: Any) -> Iterator[_Found]:
    """ZeRO-3: a rank has a run of each parameter; the last one's ends with padding."""
    for number, group in enumerate(optimizer.fp16_groups):
        flat, at = optimizer.fp32_partitioned_groups_flat[number], 0
        options = optimizer.sub_group_to_group_id[number]
        for param in group:
            size = param.partition_numel()
            start = size * torch.distributed.get_rank(param.ds_process_group)
            count = max(0, min(size, param.ds_numel - start))
            yield options, param, tuple(param.ds_shape), start, flat, at, count
            at += size


def _of_partitions(optimizer: Any) -> Iterator[_Found]:
    """ZeRO-1, 2, BF16_Optimizer: a rank has a run of all parameters of a group, end to end."""
    is_bf16 = hasattr(optimizer, "bf16_groups")
    groups = optimizer.bf16_groups if is_bf16 else optimizer.bit16_groups
    if is_bf16:
        flats = optimizer.fp32_groups_flat_partition
    else:
        flats = optimizer.single_partition_of_fp32_groups
    for number, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        for param in group:
            shape, found = tuple(param.shape), param._hp_mapping
            if found is None:
                yield number, param, shape, 0, flat, 0, 0
            else:
                inside, there = found.lp_fragment_address, found.hp_fragment_address
                yield number, param, shape, inside.start, flat, there.start, there.numel


def _of_flat_copies(optimizer: Any) -> Iterator[_Found]:
    """FP16_Optimizer: a float copy of all parameters of a group, end to end, on every rank."""
    for number, group in enumerate(optimizer.fp16_groups):
        flat, at = optimizer.fp32_groups_flat[number], 0
        for param in group:
            yield number, param, tuple(param.shape), 0, flat, at, param.numel()
            at += param.numel()


def _of_copies(groups: Any, copies: Any) -> Iterator[_Found]:
    """FP16_UnfusedOptimizer: a float copy of each parameter. Without it: the parameter itself."""
    for number, (group, held) in enumerate(zip(groups, copies, strict=True)):
        for param, copy in zip(group, held, strict=True):
            yield number, param, tuple(param.shape), 0, copy, 0, param.numel()


def inner_of(engine: Any) -> Any:
    """Return the torch optimizer within an engine's, or None where there is none."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if hasattr(inner, "state") else None


def others_of(engine: Any, pieces: list[Piece]) -> dict[str, torch.Tensor | Shard]:
    """Return the parameters that the optimizer does not step: frozen ones."""
    stepped, result = {piece.name for piece in pieces}, dict[str, torch.Tensor | Shard]()
    named = names_of(engine)
    first = {id(param): name for name, param in reversed(named.items())}
    for name, param in named.items():
        if first[id(param)] in stepped:
            continue
        if not hasattr(param, "ds_tensor"):
            result[name] = param.detach()
            continue
        size, whole = param.ds_tensor.numel(), param.ds_numel
        start = min(whole, size * torch.distributed.get_rank(param.ds_process_group))
        run = param.ds_tensor.detach().view(-1)[: max(0, min(size, whole - start))]
        result[name] = Shard(run, tuple(param.ds_shape), start=start)
    return result


def ties_of(engine: Any) -> Iterator[tuple[str, str]]:
    """Return (further name, first name) of tied parameters."""
    first: dict[int, str] = {}
    for name, param in names_of(engine).items():
        if first.setdefault(id(param), name) != name:
            yield name, first[id(param)]


def moments_of(piece: Piece, inner: Any) -> dict[str, Any]:
    """Return an optimizer's state of one parameter: runs, and numbers as 0-d tensors.

    Raises:
        StateError: a tensor of the state does not lie as the weights do.
    """
    result: dict[str, Any] = {}
    held = inner.state.get(piece.flat, {})
    if "step" not in held and "step" in piece.group:  # FusedAdam counts for a group
        held = {**held, "step": piece.group["step"]}
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            if value.shape == piece.flat.shape:
                result[key] = piece.of(value)
            elif piece.is_whole:
                result[key] = value
            else:
                raise StateError(
                    f"optimizer.state.{piece.name}.{key} has the shape {list(value.shape)} for a "
                    f"flat partition of {piece.flat.numel()} elements, so its parts cannot be told "
                    f"apart. Use an optimizer that works element by element, such as AdamW"
                )
        elif isinstance(value, (int, float, torch.Tensor)):
            number = float(value)  # as torch counts
            result[key] = torch.tensor(number, dtype=torch.float32, device="cpu")
    return result


def options_of(piece: Piece) -> dict[str, Any]:
    """Return the options of a parameter; numbers in tensors as numbers."""
    tensors = {key: value.item() for key, value in group_tensors(piece.group).items()}
    found = {**group_options(piece.group), **tensors}
    return {key: value for key, value in found.items() if key not in ("step", "name")}


def targets_of(
    piece: Piece, inner: Any, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """Return where a parameter's saved state goes; state that is missing is created.

    Args:
        shapes, dtypes: of the saved state, by its keys.
    """
    held, result = inner.state[piece.flat], dict[str, Any]()
    for key, shape in shapes.items():
        if shape == () and (key == "step" or piece.shape != ()):
            result[key] = torch.zeros((), dtype=dtypes[key], device="cpu")
            continue
        like = piece.flat if shape == piece.shape else piece.flat.new_empty(shape)
        if like is not piece.flat and not piece.is_whole:
            raise MismatchError(
                f"optimizer.state.{piece.name}.{key} is saved in the shape {list(shape)}; under "
                f"ZeRO it has to have that of the parameter, {list(piece.shape)}. Build the model "
                "with the sizes that it was saved with"
            )
        there = held.get(key)
        fits = isinstance(there, torch.Tensor) and there.shape == like.shape
        if there is None or not fits or there.dtype != dtypes[key]:
            held[key] = torch.zeros_like(like, dtype=dtypes[key], requires_grad=False)
        result[key] = piece.of(held[key]) if like is piece.flat else held[key]
    return result


def put_numbers(pieces: list[Piece], inner: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Give an optimizer the numbers that were loaded: steps, in the form in which it counts.

    Raises:
        MismatchError: parameters of one flat tensor have different ones.
    """
    by_flat: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_flat.setdefault(id(piece.flat), []).append(piece)
    for together in by_flat.values():
        numbers = [
            {key: v.item() for key, v in found[p.name].items() if _is_number(v)} for p in together
        ]
        for (one, here), (other, there) in pairwise(zip(together, numbers, strict=True)):
            if here != there:
                raise MismatchError(
                    f"the optimizer has one state for {one.name} and {other.name}, but they are "
                    f"saved with {here} and {there}. Give them parameter groups of their own, or "
                    "load without the optimizer's state: load_optimizer_states=False"
                )
        for key, value in numbers[0].items():
            _put_number(together[0], inner, key, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _put_number(piece: Piece, inner: Any, key: str, value: float) -> None:
    held = inner.state[piece.flat]
    if key == "step" and type(inner).__name__ == "FusedAdam":
        piece.group["step"] = int(value)
    elif isinstance(there := held.get(key), torch.Tensor):
        there.fill_(value)
    elif key in held or not type(inner).__module__.startswith("torch."):
        held[key] = int(value) if float(value).is_integer() else value
    else:
        on_device = piece.group.get("capturable") or piece.group.get("fused")
        device = piece.flat.device if on_device else torch.device("cpu")
        held[key] = torch.tensor(value, dtype=torch.float32, device=device)


def put_options(pieces: list[Piece], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the groups of parameters the options that were loaded.

    Raises:
        MismatchError: parameters of one group were saved with different options.
    """
    first: dict[int, str] = {}
    for piece in pieces:
        name = first.setdefault(id(piece.group), piece.name)
        if found[name] != found[piece.name]:
            raise MismatchError(
                f"{name} and {piece.name} are in one parameter group, but they were saved with "
                f"different options: {found[name]} and {found[piece.name]}. Give them groups of "
                "their own"
            )
        for key, value in found[piece.name].items():
            there = piece.group.get(key)
            if isinstance(there, torch.Tensor):
                there.fill_(value)
            else:
                piece.group[key] = value


@torch.no_grad()
def spread(engine: Any) -> None:
    """Let the weights of the module follow the master weights that were loaded."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        masters = optimizer.fp32_partitioned_groups_flat
        for number, (low, high) in enumerate(
            zip(optimizer.fp16_partitioned_groups_flat, masters, strict=True)
        ):
            if high.numel():
                low.data.copy_(high.data)
            optimizer._unflatten_partitioned_parameters(number)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups") or hasattr(optimizer, "fp32_groups_flat"):
        for number, group in enumerate(optimizer.fp16_groups):
            if hasattr(optimizer, "fp32_groups"):
                highs = optimizer.fp32_groups[number]
            else:
                sizes = [param.numel() for param in group]
                highs = optimizer.fp32_groups_flat[number].split(sizes)
            for low, high in zip(group, highs, strict=True):
                low.data.copy_(high.view_as(low))
