"""`holdfast.Shard`: boxes and flat ranges of any cut, saved by N ranks and loaded by M others."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format.simulated_ranks import ThreadGroup, cut, run_ranks
from holdfast.layout import Box

NewPath = Callable[[], Path]
State = dict[str, Any]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool]


def save(states: Sequence[State], path: Path, **keywords: Any) -> None:
    def work(group: ThreadGroup) -> None:
        holdfast.save(states[group.rank], path, group=group, **keywords)  # type: ignore[arg-type]

    run_ranks(len(states), work)


def load(path: Path, states: Sequence[State]) -> list[holdfast.LoadReport]:
    """Load one rank after the other: what they read for each other is told in test_sharing."""
    return [holdfast.load(path, into=state, group="alone") for state in states]


def by_boxes(dense: torch.Tensor, ranks: int, chance: random.Random) -> list[holdfast.Shard]:
    """One box a rank, at random; those that get none hold an empty one."""
    shape = tuple(dense.shape)
    boxes = [Box(*box) for box in cut(chance, (0,) * len(shape), shape, ranks)]
    if not dense.numel():
        boxes = []
    chance.shuffle(boxes)
    held = [holdfast.Shard(dense[box.slices()].clone(), shape, offset=box.offset) for box in boxes]
    empty = dense.flatten()[:0].clone()
    return held + [holdfast.Shard(empty, shape, offset=(0,) * len(shape))] * (ranks - len(held))


def by_ranges(dense: torch.Tensor, ranks: int, chance: random.Random) -> list[holdfast.Shard]:
    """One run of elements a rank, at random, some of them empty."""
    ends = sorted(chance.randint(0, dense.numel()) for _ in range(ranks - 1))
    runs = list(zip([0, *ends], [*ends, dense.numel()], strict=True))
    chance.shuffle(runs)
    flat = dense.flatten()
    return [holdfast.Shard(flat[a:b].clone(), dense.shape, start=a) for a, b in runs]


def flattened(dense: State, ranks: int) -> list[State]:
    """As ZeRO cuts: all tensors behind each other in one, which is cut evenly."""
    total = sum(tensor.numel() for tensor in dense.values())
    length = -(-total // ranks)
    states: list[State] = []
    for rank in range(ranks):
        state, position = {}, 0
        for name, tensor in dense.items():
            first = min(max(rank * length - position, 0), tensor.numel())
            end = min(max((rank + 1) * length - position, 0), tensor.numel())
            run = tensor.flatten()[first:end].clone()
            state[name] = holdfast.Shard(run, tensor.shape, start=first)
            position += tensor.numel()
        states.append(state)
    return states


def blank(states: Sequence[State]) -> Sequence[State]:
    for state in states:
        for value in state.values():
            held = value.data if isinstance(value, holdfast.Shard) else value
            held.copy_(torch.zeros_like(held))
    return states


def joined(states: Sequence[State], name: str, like: torch.Tensor) -> torch.Tensor:
    """Put the ranks' shards together, without a line of holdfast."""
    found = torch.zeros_like(like)
    for state in states:
        shard = state[name]
        if not shard.data.numel():
            continue
        if shard.start is not None:
            found.view(-1)[shard.start : shard.start + shard.data.numel()] = shard.data
        else:
            ends = (a + n for a, n in zip(shard.offset, shard.data.shape, strict=True))
            found[tuple(map(slice, shard.offset, ends))] = shard.data
    return found


def random_tensor(chance: random.Random) -> torch.Tensor:
    shape = [chance.choice([1, 2, 3, 5, 7, 11]) for _ in range(chance.randint(0, 4))]
    if shape and chance.random() < 0.1:
        shape[chance.randrange(len(shape))] = 0
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    numbers = torch.randint(0, 120, shape, generator=generator)
    return numbers.to(chance.choice(DTYPES))


LAYOUTS = [by_boxes, by_ranges]


def states_of(dense: State, ranks: int, chance: random.Random) -> list[State]:
    """Lay every tensor out in one way or the other."""
    states: list[State] = [{} for _ in range(ranks)]
    for name, tensor in dense.items():
        for state, shard in zip(states, chance.choice(LAYOUTS)(tensor, ranks, chance), strict=True):
            state[name] = shard
    return states


@pytest.mark.parametrize("writers", range(1, 9))
def test_any_boxes_and_ranges_load_as_any_others(new_path: NewPath, writers: int) -> None:
    for readers in range(1, 9):
        chance = random.Random(100 * writers + readers)
        dense = {f"w{i}": random_tensor(chance) for i in range(6)}
        path = new_path()
        options = holdfast.Options(chunk_elements=chance.choice([3, 16, 1 << 20]))
        save(states_of(dense, writers, chance), path, options=options)
        with holdfast.open(path) as checkpoint:
            for name, tensor in dense.items():
                assert torch.equal(checkpoint.tensor(name), tensor), (writers, readers, name)
        into = blank(states_of(dense, readers, chance))
        reports = load(path, into)
        for name, tensor in dense.items():
            assert torch.equal(joined(into, name, tensor), tensor), (writers, readers, name)
        total = sum(tensor.nbytes for tensor in dense.values())
        assert sum(report.bytes_needed for report in reports) == total
