"""`holdfast.Shard`: boxes and flat ranges of any cut, saved by N ranks and loaded by M others."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format.simulated_ranks import ThreadGroup, cut, run_ranks
from holdfast.errors import MismatchError, StateError
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


def shard(
    *numbers: float, of: Sequence[int], dtype: torch.dtype = torch.float32, **where: Any
) -> holdfast.Shard:
    return holdfast.Shard(torch.tensor(numbers, dtype=dtype), of, **where)


GRID = torch.arange(12.0).view(3, 4)
BAD: dict[str, tuple[list[State], str]] = {
    "a gap between runs": (
        [{"w": shard(0, 1, 2, of=(3, 4), start=0)}, {"w": shard(*range(8), of=(3, 4), start=4)}],
        r"w f32 \[3, 4\]: the boxes of ranks 0, 1 cover 11 of 12 elements, "
        r"no rank holds \[0:1, 3:4\]",
    ),
    "runs that overlap": (
        [{"w": shard(*range(6), of=(3, 4), start=0)}, {"w": shard(*range(8), of=(3, 4), start=4)}],
        r"\[1:2, 0:2\] of rank 0 and \[1:3, 0:4\] of rank 1 overlap",
    ),
    "a box over a run": (
        [
            {"w": shard(*range(6), of=(3, 4), start=0)},
            {"w": holdfast.Shard(GRID[1:], (3, 4), offset=(1, 0))},
        ],
        r"w .*\[1:2, 0:2\] of rank 0 and \[1:3, 0:4\] of rank 1 overlap",
    ),
    "a whole tensor over a shard": (
        [{"w": GRID}, {"w": holdfast.Shard(GRID[1:], (3, 4), offset=(1, 0))}],
        r"\[0:3, 0:4\] of rank 0 and \[1:3, 0:4\] of rank 1 overlap",
    ),
    "nothing held": (
        [{"w": shard(of=(3, 4), start=0)}] * 2,
        r"w f32 \[3, 4\]: no rank holds any of its 12 elements",
    ),
    "several at once": (
        [{"v": shard(0, of=(2,), start=0), "w": shard(0, of=(2,), start=1)}] * 2,
        r"v f32 .*no rank holds \[1:2\]; w f32 .*no rank holds \[0:1\]",
    ),
    "another shape on another rank": (
        [{"w": shard(0, 1, of=(4,), start=0)}, {"w": shard(2, 3, of=(2, 2), start=2)}],
        r"w is f32 \[2, 2\] on rank 1, f32 \[4\] on rank 0",
    ),
    "another dtype on another rank": (
        [
            {"w": shard(0, 1, of=(4,), start=0)},
            {"w": shard(2, 3, of=(4,), start=2, dtype=torch.bool)},
        ],
        r"w is bool \[4\] on rank 1, f32 \[4\] on rank 0",
    ),
    "a tensor here and a value there": (
        [{"a": {"w": shard(0, of=(1,), start=0)}}, {"a": {"w": 7}}],
        r"a\.w is a tensor on rank 0 and a value on rank 1",
    ),
    "a tensor here and a dict of values there": (
        [{"w": shard(0, of=(1,), start=0)}, {"w": {"lr": 7}}],
        r"w is a tensor on rank 0 and a container on rank 1",
    ),
    "neither offset nor start": ([{"w": shard(0, of=(1,))}], r"w is a Shard with neither offset="),
    "a box of a run without its start": (
        [{"w": shard(0, of=(3, 4), offset=(0, 0), within=((0, 0), (1, 1)))}],
        r"within=\(\(0, 0\), \(1, 1\)\); expected \(offset, shape\) of a box, and start=",
    ),
    "a run that leaves its box": (
        [{"w": shard(*range(5), of=(3, 4), start=2, within=((0, 2), (3, 2)))}],
        r"at start 2 within \(\(0, 2\), \(3, 2\)\), which does not fit its tensor",
    ),
    "a run in a box outside": (
        [{"w": shard(0, of=(3, 4), start=0, within=((0, 3), (3, 2)))}],
        r"at start 0 within \(\(0, 3\), \(3, 2\)\), which does not fit its tensor",
    ),
    "both": ([{"w": shard(0, of=(1,), offset=(0,), start=0)}], r"w is a Shard with both offset="),
    "a run that leaves the tensor": (
        [{"w": shard(0, 1, of=(3,), start=2)}],
        r"w is a Shard with data of shape \[2\] at start 2, which does not fit .* of shape \[3\]",
    ),
    "a negative start": ([{"w": shard(0, of=(3,), start=-1)}], r"at start -1, which does not fit"),
    "a box that leaves the tensor": (
        [{"w": holdfast.Shard(GRID, (3, 4), offset=(0, 1))}],
        r"at offset \(0, 1\), which does not fit .*; expected 2-dimensional data within it",
    ),
    "a box of fewer dimensions": (
        [{"w": shard(0, of=(3, 4), offset=(0, 1))}],
        r"data of shape \[1\] at offset \(0, 1\)",
    ),
    "a run of two dimensions": (
        [{"w": holdfast.Shard(GRID, (3, 4), start=0)}],
        r"data of shape \[3, 4\] at start 0.*expected 1-dimensional data",
    ),
    "no integers": (
        [{"w": shard(0, of=(3.0,), start=0)}],
        r"start 0 of a tensor of shape \[3.0\]; expected integers",
    ),
    "no tensor": ([{"w": holdfast.Shard([1.0], (1,), start=0)}], r"whose data is a list"),  # type: ignore[arg-type]
    "an endless tensor": ([{"w": shard(0, of=(1 << 60,), start=0)}], r"fewer than 2\^59 elements"),
}


@pytest.mark.parametrize("what", BAD)
def test_shards_that_cannot_be_are_refused_before_anything_is_written(
    new_path: NewPath, what: str
) -> None:
    states, text = BAD[what]
    path = new_path()
    with pytest.raises(StateError, match=text):
        save(states, path)
    assert not path.exists()


def test_shards_are_cast_only_when_asked_and_fit_only_their_own_shape(new_path: NewPath) -> None:
    path, dense = new_path(), torch.arange(12.0).view(3, 4)
    save(flattened({"w": dense}, 3), path)
    run = torch.zeros(5, dtype=torch.float64)
    into = {"w": holdfast.Shard(run, (3, 4), start=3)}
    with pytest.raises(
        MismatchError, match=r"w is f32 \[3, 4\] in the checkpoint and f64 \[3, 4\] in"
    ):
        holdfast.load(path, into=into)
    holdfast.load(path, into=into, cast=True)
    assert run.tolist() == [3, 4, 5, 6, 7]
    with pytest.raises(MismatchError, match=r"w is f32 \[3, 4\] in the .* f32 \[4, 3\] in the"):
        holdfast.load(path, into={"w": holdfast.Shard(run.float(), (4, 3), start=0)})
    expanded = holdfast.Shard(torch.zeros(1).expand(4), (3, 4), start=0)
    with pytest.raises(MismatchError, match=r"w is an expanded tensor"):
        holdfast.load(path, into={"w": expanded})


def test_runs_in_strides_lie_in_their_tensor_as_any_others(new_path: NewPath) -> None:
    path, dense = new_path(), torch.arange(30.0).view(5, 6)
    columns = torch.zeros(30, 2)
    columns[:, 1] = dense.flatten()
    halves = [holdfast.Shard(columns[:17, 1], (5, 6), start=0)]
    halves += [holdfast.Shard(columns[17:, 1].clone().requires_grad_(), (5, 6), start=17)]
    save([{"w": half} for half in halves], path)
    assert torch.equal(holdfast.open(path).tensor("w"), dense)
    columns.zero_()
    load(path, [{"w": half} for half in halves])
    assert torch.equal(columns[:17, 1], dense.flatten()[:17])


def test_shards_of_one_memory_are_tied(new_path: NewPath) -> None:
    path, run = new_path(), torch.arange(4.0)
    other = holdfast.Shard(run, (2, 4), start=4)
    states = [
        {"a": holdfast.Shard(r, (2, 4), start=s), "b": holdfast.Shard(r, (2, 4), start=s)}
        for r, s in ((run.clone(), 0), (run, 4))
    ]
    save(states, path)
    assert holdfast.open(path).info("b").tied_to == "a"
    states[0]["b"] = holdfast.Shard(run.clone(), (2, 4), start=0)
    untied = new_path()
    save([states[0], {"a": other, "b": other}], untied)
    assert holdfast.open(untied).info("b").tied_to is None


class Partitioned:
    """An optimizer of another framework: its state are shards, of which it knows the layout."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.run = torch.full((-(-30 // ranks),), float(rank))[
            : max(0, 30 - rank * -(-30 // ranks))
        ]
        self.start = rank * -(-30 // ranks)
        self.loaded: Any = None

    def state_dict(self) -> State:
        return {"exp_avg": {"w": holdfast.Shard(self.run, (5, 6), start=self.start)}, "step": 3}

    def load_state_dict(self, state: State) -> None:
        self.loaded = state


def test_an_object_that_saves_itself_may_give_shards(new_path: NewPath) -> None:
    path = new_path()
    save([{"o": Partitioned(rank, 4)} for rank in range(4)], path)
    dense = holdfast.open(path).tensor("o.exp_avg.w")
    readers = [Partitioned(rank, 3) for rank in range(3)]
    load(path, [{"o": reader} for reader in readers])
    assert torch.equal(torch.cat([reader.run for reader in readers]), dense.flatten())
    assert readers[1].loaded["exp_avg"]["w"].data is readers[1].run
    assert readers[1].loaded["step"] == 3


@pytest.mark.parametrize("how", ["eager", "lazy"])
def test_shards_are_saved_in_the_background_too(new_path: NewPath, how: Any) -> None:
    path, dense = new_path(), torch.arange(1000.0).view(10, 100)
    state = {"w": holdfast.Shard(dense.flatten().clone(), dense.shape, start=0)}
    holdfast.save_async(state, path, stage=how).result()
    assert torch.equal(holdfast.open(path).tensor("w"), dense)
