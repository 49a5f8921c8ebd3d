"""Every sample once to an epoch, on any number of readers, through any kind of loader."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from format.simulated_ranks import run_ranks
from holdfast import DataState
from holdfast.errors import MismatchError, OptionError, StateError

NewPath = Callable[[], Path]
checked = settings(max_examples=150, deadline=None, derandomize=True)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What a checkpoint holds of several ranks: equal where they share it, and each one's own."""
    common = [{k: v for k, v in part.items() if k != "readers"} for part in parts]
    assert all(one == common[0] for one in common)
    numbers = [number for part in parts for number in part["readers"]]
    assert len(set(numbers)) == len(numbers)
    return common[0] | {"readers": {n: v for part in parts for n, v in part["readers"].items()}}


def ranks_of(world_size: int, state: dict[str, Any] | None, **options: Any) -> list[DataState]:
    found = [DataState(**options, rank=r, world_size=world_size) for r in range(world_size)]
    for data in found if state else []:
        data.load_state_dict(state or {})
    return found


PHASES = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),  # for each rank, how many it takes
    max_size=5,
)


@checked
@given(PHASES, st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_every_sample_comes_once_to_an_epoch_however_readers_change(
    phases: list[list[int]], size: int, epochs: int, shuffle: bool
) -> None:
    options = {"size": size, "epochs": epochs, "shuffle": shuffle, "seed": 5}
    seen: Counter[int] = Counter()
    state = None
    for counts in [*phases, [size * epochs] * 3]:
        ranks = ranks_of(len(counts), state, **options)
        for data, count in zip(ranks, counts, strict=True):
            seen.update(itertools.islice(data.indices(), count))
        state = joined([data.state_dict() for data in ranks])
    assert seen == Counter({sample: epochs for sample in range(size)})


@pytest.mark.parametrize("shuffle", [True, False])
def test_readers_in_step_read_the_same_batches_however_many_they_are(shuffle: bool) -> None:
    """A step's samples, of all ranks together, do not depend on the number of ranks."""

    def steps(sizes: list[int]) -> list[set[int]]:
        state, result = None, []
        for world_size in sizes:
            ranks = ranks_of(world_size, state, size=100, seed=3, shuffle=shuffle)
            loops = [data.indices() for data in ranks]
            for _ in range(2):
                taken = [[*itertools.islice(loop, 12 // world_size)] for loop in loops]
                result.append({sample for part in taken for sample in part})
            state = joined([data.state_dict() for data in ranks])
        return result

    assert steps([1, 1, 1]) == steps([4, 2, 3])
    assert steps([1, 1, 1])[0] == set(range(12)) or shuffle


def test_what_is_held_is_handed_on_once() -> None:
    ranks = ranks_of(4, None, size=50)
    for number, data in enumerate(ranks):
        data.held += [[number, n] for n in range(number)]
    for world_size in (2, 3, 1):
        ranks = ranks_of(world_size, joined([d.state_dict() for d in ranks]), size=50)
        held = [item for data in ranks for item in data.held]
        assert sorted(held) == [[number, n] for number in range(4) for n in range(number)]
        assert max(len(d.held) for d in ranks) - min(len(d.held) for d in ranks) <= 1


class Packed(IterableDataset):  # type: ignore[type-arg]
    """Documents of one to three words, cut into pairs; what is left of them is held."""

    def __init__(self, data: DataState) -> None:
        self.data = data

    def __iter__(self) -> Iterator[list[list[int]]]:
        for document in self.data.indices():
            self.data.held += [[document, word] for word in range(1 + document % 3)]
            while len(self.data.held) >= 2:
                pair, self.data.held = self.data.held[:2], self.data.held[2:]
                yield pair

    def state_dict(self) -> dict[str, Any]:
        return self.data.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What a worker starts from is the DataState of the process that started it."""


def words(batches: list[Any]) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for batch in batches for pair in batch for a, b in pair]


def loader_of(kind: str, data: DataState, workers: int) -> Any:
    make = StatefulDataLoader if kind.startswith("stateful") else DataLoader
    if kind.endswith("streams"):
        dataset, options = Packed(data), {}
    else:
        dataset, options = torch.arange(100) * 10, {"sampler": data.sampler()}  # type: ignore
    return make(dataset, batch_size=3, num_workers=workers, collate_fn=list, **options)  # type: ignore


KINDS = [
    ("stateful", 0),
    ("stateful", 2),
    ("torch", 0),
    ("torch", 2),
    ("stateful streams", 0),
    ("stateful streams", 2),
    ("stateful streams", 3),
    ("torch streams", 0),
]


@pytest.mark.parametrize(("kind", "workers"), KINDS)
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_resumed_loader_gives_the_batches_that_would_have_come(
    new_path: NewPath, kind: str, workers: int, after: int
) -> None:
    torch.manual_seed(1)
    data = DataState(100, seed=2)
    batches = data.read(loader_of(kind, data, workers))
    first = [*itertools.islice(batches, after)]
    path = new_path()
    holdfast.save({"data": data, "random": holdfast.RandomState()}, path)
    expected = [*itertools.islice(batches, 7)], torch.rand(3).tolist()
    batches.close()

    torch.manual_seed(9)
    resumed = DataState(100)
    holdfast.load(path, into={"data": resumed, "random": holdfast.RandomState()})
    found = [*itertools.islice(resumed.read(loader_of(kind, resumed, workers)), 7)]
    assert (found, torch.rand(3).tolist()) == expected
    assert len(first) == after and len(found) == 7


@pytest.mark.parametrize("kind", ["stateful", "stateful streams"])
def test_no_sample_is_lost_when_workers_and_ranks_change(kind: str) -> None:
    seen: list[Any] = []
    state = None
    for world_size, workers, steps in [(2, 2, 3), (3, 0, 2), (1, 3, 4), (2, 1, 1000)]:
        ranks = ranks_of(world_size, state, size=100, epochs=1, seed=4)
        loops = [data.read(loader_of(kind, data, workers)) for data in ranks]
        for loop in loops:
            seen += itertools.islice(loop, steps)
        state = joined([data.state_dict() for data in ranks])
    if kind == "stateful":
        assert sorted(int(sample) for batch in seen for sample in batch) == [*range(0, 1000, 10)]
        return
    left = [tuple(word) for reader in state["readers"].values() for word in reader["held"]]
    wanted = [(document, word) for document in range(100) for word in range(1 + document % 3)]
    assert sorted([*words(seen), *left]) == wanted and len(left) <= 2


def test_samples_fetched_ahead_are_not_counted() -> None:
    data = DataState(100)
    loop = data.read(loader_of("stateful", data, 2))
    next(loop)
    assert data.state_dict()["readers"]["0"]["taken"] == 3
    assert data.position == 3


def test_skipped_positions_come_to_nobody_and_stay_skipped() -> None:
    ranks = ranks_of(2, None, size=40, shuffle=False, epochs=2)
    seen = [sample for data in ranks for sample in itertools.islice(data.indices(), 5)]
    for data in ranks:
        data.skip(20, 30)
        data.skip(45, 47)
        data.skip(0, 3)  # taken already
    state = joined([data.state_dict() for data in ranks])
    ranks = ranks_of(3, state, size=40, shuffle=False, epochs=2)
    seen += [sample for data in ranks for sample in data.indices()]
    wanted = [p % 40 for p in range(80) if not (20 <= p < 30 or 45 <= p < 47)]
    assert sorted(seen) == sorted(wanted)


def test_a_loader_skips_what_it_had_not_given_out() -> None:
    data = DataState(100, shuffle=False)
    loader = loader_of("stateful", data, 2)
    first = next(data.read(loader))
    data.skip(3, 6)
    following = next(data.read(loader))
    assert [int(n) for n in [*first, *following]] == [0, 10, 20, 60, 70, 80]
    assert data.position == 9 and data.epoch == 0


def test_a_loop_ends_when_the_state_is_restored_under_it() -> None:
    data = DataState(100)
    for change in (
        lambda: data.load_state_dict(data.state_dict()),
        lambda: next(data.indices()),
        lambda: data.skip(5, 6),
    ):
        for loop in (data.indices(), data.read(loader_of("stateful", data, 0))):
            next(loop)
            change()
            with pytest.raises(StateError, match="start a new one"):
                next(loop)


def test_tensors_can_be_held(new_path: NewPath) -> None:
    path, data = new_path(), DataState(10)
    data.held = [torch.arange(3), torch.arange(4)]
    holdfast.save({"data": data}, path)
    other = DataState(10, rank=0, world_size=1)
    holdfast.load(path, into={"data": other})
    assert [item.tolist() for item in other.held] == [[0, 1, 2], [0, 1, 2, 3]]


def test_what_does_not_fit_is_refused() -> None:
    state = DataState(10).state_dict()
    with pytest.raises(MismatchError, match="10 samples, and this data has 11"):
        DataState(11).load_state_dict(state)
    with pytest.raises(MismatchError, match=r"parts of \[1\] are missing"):
        DataState(10).load_state_dict(state | {"ranks": 2})
    data = DataState(10)
    next(data.indices())
    with pytest.raises(StateError, match="To change these numbers, save a checkpoint"):
        next(data.read(loader_of("stateful streams", data, 2)))


@pytest.mark.parametrize(
    "arguments",
    [{"size": 0}, {"size": 2.5}, {"epochs": 0}, {"seed": "a"}, {"rank": 1}, {"world_size": 2}],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(arguments))):
        DataState(**{"size": 3, **arguments})


@pytest.mark.parametrize("span", [(-1, 3), (4, 3), (0, 1 << 60), (0.5, 2)])
def test_positions_that_cannot_be_are_not_skipped(span: tuple[Any, Any]) -> None:
    with pytest.raises(OptionError, match="expected integers, 0 <= start <= stop"):
        DataState(3).skip(*span)


class Unsaved(Packed):
    state_dict = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (lambda data: DataLoader(range(9)), "sampler=data.sampler"),  # type: ignore[arg-type]
        (lambda data: DataLoader(range(9), sampler=DataState(9).sampler()), "data.sampler"),  # type: ignore[arg-type]
        (lambda data: DataLoader(Packed(data), num_workers=2), "use torchdata's"),
        (
            lambda data: StatefulDataLoader(
                Packed(data), num_workers=2, snapshot_every_n_steps=2, collate_fn=list
            ),
            "snapshot_every_n_steps=1",
        ),
    ],
)
def test_a_loader_that_cannot_be_counted_is_refused(wrong: Any, advice: str) -> None:
    data = DataState(9)
    with pytest.raises(OptionError, match=advice):
        next(data.read(wrong(data)))


@pytest.mark.parametrize(("kind", "workers"), [("torch", 0), ("torch streams", 1)])
def test_a_loader_that_is_not_read_through_the_state_is_refused(kind: str, workers: int) -> None:
    for place in ({}, {"rank": 0, "world_size": 1}):
        data = DataState(100, **place)
        with pytest.raises(StateError, match=r"iterate over data\.read"):
            next(iter(loader_of(kind, data, workers)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_with_an_order_of_its_own_resumes_as_it_is(
    new_path: NewPath, workers: int
) -> None:
    """Without a DataState: bit for bit on as many readers, and refused on any other number."""

    def loader() -> Any:
        return StatefulDataLoader(range(50), 3, shuffle=True, num_workers=workers)  # type: ignore

    path, first = new_path(), loader()
    batches = iter(first)
    [*itertools.islice(batches, 4)]
    holdfast.save({"loader": {"0": first}}, path)
    expected = [batch.tolist() for batch in batches]
    again = loader()
    holdfast.load(path, into={"loader": {"0": again}})
    assert [batch.tolist() for batch in again] == expected
    with pytest.raises(MismatchError, match=r"loader\.1"):
        holdfast.load(path, into={"loader": {"0": loader(), "1": loader()}})


def test_what_has_a_part_for_each_rank_says_how_many_ranks_can_load_it(new_path: NewPath) -> None:
    """A world size that cannot be is refused with the one that can."""
    path = new_path()
    states = [{"w": torch.ones(2), "loader": {str(r): {"seen": torch.ones(1)}}} for r in (0, 1)]
    run_ranks(2, lambda group: holdfast.save(states[group.rank], path, group=group))
    told = r"loader has one part per rank: 2 ranks saved it, and 1 load it"
    with pytest.raises(MismatchError, match=told):
        holdfast.load(path, into=states[0])
    holdfast.load(path, into={"w": torch.zeros(2)}, partial=True)
