"""Layouts as Megatron has them, any to any: tensor x pipeline x data parallel, with ZeRO or not.

Ranks are simulated as threads that save and load together. Every pair of layouts comes from a
seeded generator; what each rank has loaded is compared bit for bit with the dense truth.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

from .test_shards import save
from .test_sharing import load_together

NewPath = Callable[[], Path]
State = dict[str, Any]
LAYERS, WIDTH, WORDS, EXPERTS = 3, 12, 37, 5
RANKS_MAX = 6
# Which dimension tensor parallel ranks cut; experts are cut by expert, over the same ranks.
CUT = {"embed": 0, "head": 0, "qkv": 0, "proj": 1, "up": 0, "up_bias": 0, "down": 1, "experts": 0}


@dataclass(frozen=True)
class Layout:
    """Numbers of ranks along each dimension, and what ZeRO cuts further: stage 0, 1 or 3."""

    tensor: int
    pipeline: int
    data: int
    zero: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data


def dense_state(seed: int) -> dict[str, torch.Tensor]:
    """Return parameters in bf16, and a first moment of each in f32."""
    width = WIDTH
    shapes: dict[str, tuple[int, ...]] = {"embed": (WORDS, width), "head": (WORDS, width)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.qkv": (3 * width, width), f"{layer}.proj": (width, width)}
        shapes |= {f"{layer}.up": (4 * width, width), f"{layer}.up_bias": (4 * width,)}
        shapes |= {f"{layer}.down": (width, 4 * width), f"{layer}.norm": (width,)}
        shapes[f"{layer}.experts"] = (EXPERTS, 2, width)
    chance = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    return {f"model/{name}": value.bfloat16() for name, value in made.items()} | {
        f"moments/{name}": value.square() for name, value in made.items()
    }


def stage_of(name: str, stages: int) -> int:
    part = name.partition("/")[2]
    if part in ("embed", "head"):
        return 0 if part == "embed" else stages - 1
    return int(part.partition(".")[0]) * stages // LAYERS


def portion(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return (first, length) of a part; the last ones may be shorter, or empty."""
    each = -(-length // parts)
    first = min(part * each, length)
    return first, min(each, length - first)


def state_of(dense: dict[str, torch.Tensor], layout: Layout, rank: int) -> State:
    """Return what one rank holds, in memory of its own."""
    tensor_rank, rest = rank % layout.tensor, rank // layout.tensor
    data_rank, stage = rest % layout.data, rest // layout.data
    state: State = {}
    for name, value in dense.items():
        if stage_of(name, layout.pipeline) != stage:
            continue
        offset, shape = [0] * value.ndim, list(value.shape)
        d = CUT.get(name.rpartition(".")[2].rpartition("/")[2])
        if d is not None:
            offset[d], shape[d] = portion(shape[d], layout.tensor, tensor_rank)
        part = value[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
        if layout.zero == 3 or (layout.zero == 1 and name.startswith("moments/")):
            first, count = portion(part.numel(), layout.data, data_rank)
            run, box = part.flatten()[first : first + count].clone(), (offset, shape)
            state[name] = holdfast.Shard(run, value.shape, start=first, within=box)
        elif d is not None:
            state[name] = holdfast.Shard(part.clone(), value.shape, offset=offset)
        else:
            state[name] = part.clone()
    return state


def pair(seed: int) -> tuple[Layout, Layout]:
    """Draw two layouts of at most `RANKS_MAX` ranks each."""
    chance, found = random.Random(seed), []
    while len(found) < 2:
        sizes = [chance.choice([1, 1, 2, 2, 3, 4]) for _ in range(3)]
        layout = Layout(*sizes, zero=chance.choice([0, 1, 3]))
        if layout.ranks <= RANKS_MAX:
            found.append(layout)
    return found[0], found[1]


def held(value: Any) -> torch.Tensor:
    return value.data if isinstance(value, holdfast.Shard) else value


@pytest.mark.parametrize("seed", range(60))
def test_what_one_layout_saved_another_loads(new_path: NewPath, seed: int) -> None:
    path, (writers, readers) = new_path(), pair(seed)
    dense = dense_state(seed)
    save([state_of(dense, writers, rank) for rank in range(writers.ranks)], path)
    for name, value in dense.items():
        assert torch.equal(holdfast.open(path).tensor(name), value), (writers, name)

    def blank(rank: int) -> State:
        state = state_of(dense, readers, rank)
        for value in state.values():
            held(value).fill_(-1)
        return state

    found = load_together(path, readers.ranks, blank)
    for rank, (state, report) in enumerate(found):
        assert isinstance(report, holdfast.LoadReport), (writers, readers, report)
        for name, value in state_of(dense, readers, rank).items():
            assert torch.equal(held(state[name]), held(value)), (writers, readers, rank, name)


def test_the_pairs_have_every_dimension_and_stage() -> None:
    layouts = [layout for seed in range(60) for layout in pair(seed)]
    assert len({*layouts}) >= 40
    for name in ("tensor", "pipeline", "data"):
        assert {1, 2, 3, 4} <= {getattr(layout, name) for layout in layouts}
    cut_twice = [la for la in layouts if la.zero and la.tensor > 1 and la.data > 1]
    assert {la.zero for la in cut_twice} == {1, 3}
