"""A state like a real one: a GPT's parameters and AdamW's moments, fp32. Knows no checkpoints."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

State = dict[str, dict[str, torch.Tensor]]  # room of the state → name → tensor

LAYERS = 12  # GPT-2 small
CONTEXT_TOKENS = 1024
COPIES = 3  # parameters, first moments, second moments
LAYER_SHARE = 0.7  # of the parameters; the embedding has the rest, as in small GPTs
WIDTH_STEP = 64  # one attention head


def make_state(size_bytes: int, seed: int) -> State:
    """Return a state of ``size_bytes``, to within a row of the embedding, with every page touched.

    Values look like those of training: weights of order 0.02, first moments much smaller, second
    moments positive. Each parameter has AdamW's scalar step too, for the sake of tiny tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        name: torch.empty(shape).normal_(0, 0.02, generator=generator)
        for name, shape in parameter_shapes(size_bytes // (4 * COPIES)).items()
    }
    exp_avg = {
        name: torch.empty_like(value).normal_(0, 1e-4, generator=generator)
        for name, value in parameters.items()
    }
    return {
        "model": parameters,
        "optimizer.exp_avg": exp_avg,
        "optimizer.exp_avg_sq": {name: value.square() for name, value in exp_avg.items()},
        "optimizer.step": {name: torch.tensor(1000.0) for name in parameters},
    }


def parameter_shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a GPT with about this many parameters, named as nanoGPT names them."""
    width = round(math.sqrt(LAYER_SHARE * parameters / (12 * LAYERS)) / WIDTH_STEP) * WIDTH_STEP
    width = max(WIDTH_STEP, width)
    shapes: dict[str, tuple[int, ...]] = {"transformer.wpe.weight": (CONTEXT_TOKENS, width)}
    for layer in range(LAYERS):
        for part, shape in _layer_shapes(width).items():
            shapes[f"transformer.h.{layer}.{part}"] = shape
    shapes |= {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}
    rest = parameters - sum(math.prod(shape) for shape in shapes.values())
    return {"transformer.wte.weight": (max(1, round(rest / width)), width)} | shapes


def _layer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (3 * width, width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
        "mlp.c_proj.bias": (width,),
    }


def flat(state: State) -> dict[str, torch.Tensor]:
    """Return the tensors under one name each, for formats without nesting."""
    return {f"{room}.{name}": tensor for room, name, tensor in _leaves(state)}


def state_bytes(state: State) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for _, _, tensor in _leaves(state))


def empty_like(state: State) -> State:
    """Return a state of the same shapes with other values in it."""
    other: State = {room: {} for room in state}
    for room, name, tensor in _leaves(state):
        other[room][name] = torch.empty_like(tensor)
    spoil(other)
    return other


def spoil(state: State) -> None:
    """Overwrite every element with a value that `make_state` never gives; touches every page."""
    for _, _, tensor in _leaves(state):
        tensor.fill_(-math.inf)


def fill(state: State, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy tensors or arrays of the same names and shapes into those of a state."""
    for room, name, tensor in _leaves(state):
        tensor.copy_(torch.as_tensor(found[room][name]))


def differences(found: State, expected: State) -> list[str]:
    """Return the names of tensors that are not equal bit by bit."""
    return [
        f"{room}.{name}"
        for room, name, tensor in _leaves(expected)
        if not torch.equal(found[room][name].view(torch.int32), tensor.view(torch.int32))
    ]


def _leaves(state: State) -> Iterator[tuple[str, str, torch.Tensor]]:
    for room, tensors in state.items():
        for name, tensor in tensors.items():
            yield room, name, tensor
