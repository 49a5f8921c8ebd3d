"""Data and random numbers on real ranks, whose number changes; evaluation beside training."""

import itertools
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast import Checkpointer, DataState, Keep, Options, RandomState
from holdfast.errors import HoldfastError, NotCommittedError

from .ranks import run_ranks

SMALL = Options(pool_bytes=32 << 20)
SIZE, EVERYTHING = 101, 1000


def loop_of(data: DataState, loader: str) -> Any:
    if loader == "own":
        return ([index] for index in data.indices())
    options = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": list}
    return data.read(StatefulDataLoader(range(SIZE), 2, sampler=data.sampler(), **options))  # type: ignore


def read_part(rank: int, run: str, step: int, loader: str, takes: list[int]) -> list[int]:
    """Go on with the run, read so many batches, and save."""
    data = DataState(SIZE, seed=7, epochs=1)
    with Checkpointer(run, options=SMALL) as checkpointer:
        checkpointer.restore({"data": data})
        seen = [*itertools.islice(loop_of(data, loader), takes[rank])]
        checkpointer.save(step, {"data": data})
    return [sample for batch in seen for sample in batch]


@pytest.mark.parametrize("loader", ["own", "stateful"])
def test_every_sample_comes_once_over_4_then_2_then_3_ranks(tmp_path: Path, loader: str) -> None:
    run = str(tmp_path / "run")
    seen: Counter[int] = Counter()
    # Not in step: the ranks leave holes in what was read, which the next ones have to fill.
    for step, takes in enumerate([[3, 6, 2, 4], [5, 9], [EVERYTHING] * 3], 1):
        parts = run_ranks(len(takes), read_part, run, step, loader, takes)
        seen.update(sample for part in parts for sample in part)
        if step < 3:
            assert sum(seen.values()) == len(seen) < SIZE, "the epoch is not over yet"
    assert seen == Counter(range(SIZE))


def train(rank: int, run: str, first: int, last: int) -> tuple[list[Any], list[float]]:
    """Train a net with dropout, a step on the mean of all ranks' gradients; save the last step."""
    torch.manual_seed(100 + rank + 10 * first), random.seed(rank + first), np.random.seed(first)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, 0.25)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    data = DataState(SIZE, seed=1)
    state = {"net": net, "optimizer": optimizer, "data": data, "random": RandomState()}
    seen = []
    with Checkpointer(run, options=SMALL) as checkpointer:
        checkpointer.restore(state) if first > 1 else None
        batches = loop_of(data, "stateful")
        for step in range(first, last + 1):
            batch = next(batches)
            seen.append((batch, random.random(), np.random.rand(), torch.rand(1).item()))
            inputs = torch.tensor([[float(sample)] * 4 for sample in batch])
            optimizer.zero_grad()
            net(inputs).mean().backward()
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if step in (3, last):
                checkpointer.save(step, state)
    return seen, [value for p in net.parameters() for value in p.flatten().tolist()]


def test_as_many_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    whole = run_ranks(2, train, str(tmp_path / "whole"), 1, 6)
    run_ranks(2, train, str(tmp_path / "run"), 1, 3)
    resumed = run_ranks(2, train, str(tmp_path / "run"), 4, 6)
    for (seen, weights), (expected, expected_weights) in zip(resumed, whole, strict=True):
        assert seen == expected[3:] and weights == expected_weights
    assert resumed[0][0] != resumed[1][0], "each rank has its own"


def save_random(rank: int, path: str) -> None:
    torch.manual_seed(rank)
    holdfast.save({"random": RandomState()}, path, options=SMALL)


def load_random(rank: int, path: str) -> list[float]:
    holdfast.load(path, into={"random": RandomState()}, options=SMALL)
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def test_other_ranks_draw_by_the_rule(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    run_ranks(2, save_random, path)
    drawn = run_ranks(3, load_random, path)
    assert drawn == run_ranks(3, load_random, path)
    assert len({number for numbers in drawn for number in numbers}) == 9


def save_groups(rank: int, path: str, ahead: int) -> list[int]:
    """Two data-parallel ranks, of two tensor-parallel ones each, which read the same."""
    data = DataState(SIZE, rank=rank // 2, world_size=2)
    seen = [*itertools.islice(data.indices(), 3 + (ahead if rank == 3 else 0))]
    holdfast.save({"data": data}, path, options=SMALL)
    return seen


def test_ranks_that_read_the_same_are_one_reader(tmp_path: Path) -> None:
    first, second, third, fourth = run_ranks(4, save_groups, str(tmp_path / "a"), 0)
    assert first == second != third == fourth
    names = holdfast.open(tmp_path / "a").objects()
    assert {name.split(".")[2] for name in names if name.startswith("data.readers.")} == {"0", "1"}


def refuse_groups(rank: int, path: str) -> str:
    try:
        save_groups(rank, path, 1)
    except HoldfastError as error:
        return str(error)
    return "saved"


def test_ranks_that_should_read_the_same_and_do_not_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(4, refuse_groups, str(tmp_path / "a")):
        assert "data.readers.1.taken is 4 on rank 3, 3 before" in told


class OwnLoader:
    """A loader that splits and merges by itself: common values, and its own part by number."""

    def __init__(self) -> None:
        self.number, self.everyone = dist.get_rank(), dist.get_world_size()
        self.files = [f"{n}.bin" for n in range(12)][self.number :: self.everyone]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 3, "readers": {str(self.number): self.files}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        every = sorted(file for files in state["readers"].values() for file in files)
        self.files = every[self.number :: self.everyone]


def own_part(rank: int, path: str, reads: int) -> list[str]:
    loader = OwnLoader()
    if Path(path).exists():
        holdfast.load(path, into={"data": loader}, options=SMALL)
    seen, loader.files = loader.files[:reads], loader.files[reads:]
    if not Path(path).exists():
        dist.barrier()
        holdfast.save({"data": loader}, path, options=SMALL)
    return seen


def test_a_loader_of_ones_own_merges_the_parts_of_all_readers(tmp_path: Path) -> None:
    parts = run_ranks(2, own_part, str(tmp_path / "a"), 2)
    parts += run_ranks(3, own_part, str(tmp_path / "a"), 100)
    assert sorted(file for part in parts for file in part) == sorted(f"{n}.bin" for n in range(12))


SHAPE = (512, 64)


def beside(rank: int, run: str, done: str) -> tuple[list[Any], int]:
    """Rank 2 trains alone and keeps one step; ranks 0 and 1 evaluate, half of the weights each."""
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        step, model = 0, torch.nn.Linear(*reversed(SHAPE), bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        keep = Keep.latest(1)
        with Checkpointer(run, every=1, keep=keep, group="alone", options=SMALL) as checkpointer:
            while not Path(done).exists():
                step += 1
                torch.nn.init.constant_(model.weight, step)
                time.sleep(0.2)  # a step takes longer than a load, but not every load
                checkpointer.step(step, {"model": model, "optimizer": optimizer})
        return checkpointer.steps(), step
    checkpointer, seen = Checkpointer(run, group=mesh.get_group(), options=SMALL), list[Any]()
    while len(set(seen)) < 10:
        part = DTensor.from_local(torch.zeros(SHAPE[0] // 2, SHAPE[1]), mesh, [Shard(0)])
        step = checkpointer.restore({"model": {"weight": part}}, partial=True)
        if step is not None:
            assert part.to_local().eq(step).all()
            seen.append(step)
        for known in checkpointer.steps()[-1:]:
            try:
                with holdfast.open(checkpointer.path(known)) as checkpoint:
                    assert checkpoint.tensor("model.weight", ((5, 0), (2, 64))).eq(known).all()
            except NotCommittedError:
                pass  # said so, and nothing else
    dist.barrier(mesh.get_group())
    Path(done).touch()
    return seen, 0


def test_evaluation_goes_on_while_training_writes_and_retires(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second, (kept, last) = run_ranks(3, beside, str(run), str(tmp_path / "done"))
    assert first == second and first[0] == sorted(first[0])
    assert kept == [last] and last > 10
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["verb"] for row in rows} == {"save"}, "evaluation writes nothing to the run"
