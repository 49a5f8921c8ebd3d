"""States that are a function of a number, and loads that compare every bit with it."""

import hashlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import holdfast

# Small blocks and chunks: a small checkpoint makes many writes, so many places to fail. One write
# in flight: every run makes the same log.
OPTIONS = holdfast.Options(
    io="buffered", pool_bytes=32 << 20, block_bytes=4096, chunk_elements=1024, queue_depth=1
)


State = dict[str, Any]


class WrongContentError(Exception):
    """A load reported success and gave something else than was saved."""


def make_state(number: int) -> dict[str, Any]:
    """Return the state of a number: tensors of several dtypes and shapes, and values."""
    weight, moment, bias, small = (part.clone() for part in _parts(number))
    return {
        "model": {
            "weight": weight.view(torch.float32).reshape(30, 100),
            "bias": bias.view(torch.bfloat16),
            "small": small.view(torch.bfloat16),
            "empty": torch.zeros(0, 4),
        },
        "optimizer": {"moment": moment.view(torch.float64), "count": torch.tensor(number)},
        "loop": {"number": number, "rates": [0.5, float(number)], "name": f"state {number}"},
    }


@lru_cache(maxsize=64)
def _parts(number: int) -> list[torch.Tensor]:
    torch_rng = torch.Generator().manual_seed(number)
    bits = [torch.randint(0, 256, (size,), generator=torch_rng) for size in (12000, 8000, 6000, 6)]
    return [part.to(torch.uint8) for part in bits]


def make_near_state(number: int) -> State:
    """Return a state that differs a little from that of the number before, as training's do."""
    state, same = make_state(number), torch.Generator().manual_seed(0)
    master = torch.randn(2000, generator=same)
    moved = torch.randn(2000, generator=torch.Generator().manual_seed(number))
    state["master"] = {"weight": master + 1e-4 * moved}
    state["model"]["weight"] = state["master"]["weight"].bfloat16()
    state["model"]["frozen"] = torch.randn(1000, generator=same)
    return state


def load_number(
    path: Path,
    options: holdfast.Options = OPTIONS,
    make: Callable[[int], State] = make_state,
    **load_options: Any,
) -> int:
    """Load a checkpoint in full, compare every bit, and return the number it is a function of.

    Raises:
        WrongContentError: what was loaded is no state that ``make`` makes.
    """
    found = make(-1)  # no element and no value is that of a saved state
    holdfast.load(path, into=found, options=options, **load_options)
    return number_in(found, path, make)


def number_in(found: State, path: object, make: Callable[[int], State] = make_state) -> int:
    """Compare every bit of what was loaded, and return the number it is a function of.

    Raises:
        WrongContentError: it is no state that ``make`` makes.
    """
    number = found["loop"]["number"]
    if type(number) is not int or not _same(found, _expected(make, number)):
        raise WrongContentError(f"{path} says it is state {number}, but differs from it")
    return number


@lru_cache(maxsize=64)
def _expected(make: Callable[[int], State], number: int) -> State:
    return make(number)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return _bits(left) == _bits(right) and left.shape == right.shape
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)


def _bits(tensor: torch.Tensor) -> bytes:
    # NaNs differ from themselves; their bits do not.
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(state: dict[str, Any]) -> str:
    """Return a digest of all that a state holds."""
    found = hashlib.blake2b(digest_size=16)
    for name, part in _leaves(state):
        found.update(name.encode() + b"\0")
        found.update(_bits(part) if isinstance(part, torch.Tensor) else repr(part).encode())
    return found.hexdigest()


def _leaves(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, part in state.items():
        if isinstance(part, dict):
            yield from _leaves(part, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", part
