"""States of small tensors, as training has them: plain ones, AdamW's, an adapter's. No checkpoints.

Each is made twice by `small.py`: the one that is saved, and the target that loads fill.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from training_state import State, parameter_shapes

KB, MB = 1000, 1_000_000
ADAMW_BYTES = 13 * MB  # with GPT-2's 12 layers: 148 parameters, 592 tensors
LORA_LAYERS, LORA_WIDTH, LORA_RANK = 32, 4096, 8  # of the query and value maps of a 7B Llama
RANKS, TENSORS_OF_RANK = 8, 500

PLAIN = {  # name → (tensors, bytes of each)
    "10x4KB": (10, 4096),
    "300x4KB": (300, 4096),
    "3000x4KB": (3000, 4096),
    "20000x400B": (20_000, 400),
    "100x1MB": (100, 1 << 20),
    "300x430KB": (300, 430_000),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One state.

    Attributes:
        given: what holdfast is given: tensors, or a model and its optimizer.
        tensors: returns the same tensors as nested dicts, for formats that know nothing else. A
            program has to ask for them too, so the clock runs when it is called. They leave out the
            settings of an optimizer, which holdfast saves.
    """

    given: dict[str, Any]
    tensors: Callable[[], State]


def samples() -> Mapping[str, Callable[[int], Sample]]:
    """Return what makes each state from a seed, by name."""
    found: dict[str, Callable[[int], Sample]] = {
        name: lambda seed, sizes=sizes: plain(*sizes, seed) for name, sizes in PLAIN.items()
    }
    return found | {"AdamW-13MB": adamw, "LoRA": lora}


def plain(count: int, size_bytes: int, seed: int, prefix: str = "layer") -> Sample:
    """Return ``count`` tensors of f32, all values different."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, size_bytes // 4, generator=generator)
    return _of({"t": {f"{prefix}.{i}.weight": row.clone() for i, row in enumerate(values)}})


def adamw(seed: int) -> Sample:
    """Return a model and its AdamW after one step."""
    torch.manual_seed(seed)
    model = _module(parameter_shapes(ADAMW_BYTES // 12))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def tensors() -> State:
        moments = optimizer.state_dict()["state"]
        flat = {f"{i}.{key}": value for i, of in moments.items() for key, value in of.items()}
        return {"model": dict(model.state_dict()), "optimizer": flat}

    return Sample({"model": model, "optimizer": optimizer}, tensors)


def lora(seed: int) -> Sample:
    """Return an adapter's state in bf16, under the names that PEFT gives its tensors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"lora_A": (LORA_RANK, LORA_WIDTH), "lora_B": (LORA_WIDTH, LORA_RANK)}
    found = {
        f"base_model.model.model.layers.{layer}.self_attn.{where}.{part}.weight": torch.randn(
            shape, generator=generator
        ).bfloat16()
        for layer in range(LORA_LAYERS)
        for where in ("q_proj", "v_proj")
        for part, shape in shapes.items()
    }
    return _of({"adapter": found})


def of_rank(rank: int, seed: int) -> Sample:
    """Return the tensors that one of `RANKS` ranks holds, and no other."""
    return plain(TENSORS_OF_RANK, 4096, seed + rank, prefix=f"stage.{rank}")


def spoil(state: State) -> None:
    """Overwrite every element with a value that no state has."""
    for tensor in _leaves(state):
        tensor.fill_(-torch.inf)


def same(one: State, other: State) -> bool:
    """Return whether two states have the same names, shapes, dtypes and bits."""
    if {room: list(t) for room, t in one.items()} != {room: list(t) for room, t in other.items()}:
        return False
    pairs = zip(_leaves(one), _leaves(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def measure(state: State) -> tuple[int, int]:
    """Return the number of tensors, and their bytes."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in _leaves(state)]
    return len(sizes), sum(sizes)


def _of(state: State) -> Sample:
    return Sample(state, lambda: state)


def _leaves(state: State) -> list[Tensor]:
    return [tensor for room in state.values() for tensor in room.values()]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _module(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Return modules within modules that hold parameters of these dotted names."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        here = root
        for part in path:
            if not hasattr(here, part):
                here.add_module(part, nn.Module())
            here = getattr(here, part)
        here.register_parameter(last, nn.Parameter(torch.randn(shape) * 0.02))
    return root
