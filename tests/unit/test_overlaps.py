"""Targets of a load that share memory are refused before anything changes; what does not, is not.

Which views share an element is told by marking bytes, one by one, in a table that knows nothing of
ranges and strides.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import MismatchError
from holdfast.layout import Tensor
from holdfast.state.overlap import find_overlaps
from holdfast.state.source import Source
from holdfast.state.target import bind
from holdfast.state.tensors import LocalTensor, local_tensor

NewPath = Callable[[], Path]

BASE = torch.zeros(12, 10)
OVERLAPPING: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "rows that have one in common": (BASE[0:4], BASE[3:6]),
    "one within the other": (BASE, BASE[2, 3:5]),
    "the same as another shape": (BASE, BASE.view(-1)),
    "the same, transposed": (BASE, BASE.t()),
    "the same as another dtype": (BASE[0], BASE[0].view(torch.int32)),
    "a byte of a number": (BASE[0], BASE.view(torch.uint8).view(-1)[3:4]),
    "a row and a column": (BASE[2], BASE[:, 3]),
    "columns that have one in common": (BASE[:, 0:3], BASE[:, 2:5]),
    "every second and every third": (BASE.view(-1)[1::2], BASE.view(-1)[0::3]),
}
APART: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "rows": (BASE[0:3], BASE[3:6]),
    "columns": (BASE[:, 0], BASE[:, 1]),
    "blocks": (BASE[0:6, 0:5], BASE[3:9, 5:10]),
    "every second": (BASE.view(-1)[0::2], BASE.view(-1)[1::2]),
    "an empty one": (BASE[3:3], BASE),
    "two of their own": (BASE, torch.zeros(12, 10)),
    "a column and rows beside it": (BASE[:, 0], BASE[2:5, 1:]),
}


def saved_like(new_path: NewPath, *tensors: torch.Tensor) -> Path:
    """Save tensors of these shapes and dtypes, each with memory of its own, full of ones."""
    path = new_path()
    names = "abcdefgh"
    ones = {name: torch.ones_like(t.contiguous()) for name, t in zip(names, tensors, strict=False)}
    holdfast.save(ones, path)
    return path


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_targets_that_overlap_are_refused_by_both_names(new_path: NewPath, kind: str) -> None:
    BASE.zero_()
    a, b = OVERLAPPING[kind]
    path = saved_like(new_path, a, b)
    for into in ({"a": a, "b": b}, {"b": b, "a": a}):
        with pytest.raises(MismatchError, match=r"(a and b|b and a) overlap in memory") as told:
            holdfast.load(path, into=into)
        assert "1 differ" in str(told.value)
        assert "Nothing was loaded" in str(told.value)
        assert not BASE.any()


@pytest.mark.parametrize("kind", APART)
def test_targets_that_interleave_without_a_common_element_are_filled(
    new_path: NewPath, kind: str
) -> None:
    BASE.zero_()
    a, b = APART[kind]
    holdfast.load(saved_like(new_path, a, b), into={"a": a, "b": b})
    assert a.eq(1).all()
    assert b.eq(1).all()


def test_a_state_that_overlaps_is_saved(new_path: NewPath) -> None:
    path = new_path()
    base = torch.arange(12.0).view(3, 4)
    holdfast.save({"all": base, "row": base[1], "flat": base.view(-1)}, path)
    into = {"all": torch.zeros(3, 4), "row": torch.zeros(4), "flat": torch.zeros(12)}
    holdfast.load(path, into=into)
    assert torch.equal(into["row"], base[1])


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (torch.zeros(9).as_strided((3, 3), (1, 1)), "w is a tensor that overlaps itself"),
        (torch.zeros(9).as_strided((3, 2, 2), (2, 2, 1)), "w is a tensor that overlaps itself"),
        (torch.zeros(3).expand(3, 3), "w is an expanded tensor"),
    ],
)
@pytest.mark.parametrize("is_shard", [False, True])
def test_a_target_that_overlaps_itself_is_refused(
    new_path: NewPath, view: torch.Tensor, text: str, is_shard: bool
) -> None:
    path = new_path()
    holdfast.save({"w": torch.ones(view.shape)}, path)
    shard = holdfast.Shard(view, view.shape, offset=(0,) * view.ndim)
    with pytest.raises(MismatchError, match=text):
        holdfast.load(path, into={"w": shard if is_shard else view})
    assert not view.any()


def test_strides_that_look_as_if_they_overlap_and_do_not_are_filled(new_path: NewPath) -> None:
    path = new_path()
    odd = torch.zeros(8).as_strided((2, 3), (3, 2))  # elements 0 2 4 and 3 5 7
    holdfast.save({"w": torch.arange(6.0).view(2, 3)}, path)
    holdfast.load(path, into={"w": odd})
    assert odd.tolist() == [[0, 1, 2], [3, 4, 5]]


class Tangled(nn.Module):
    """A module with buffers that share memory in part."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(10)
        self.register_buffer("left", memory[:6])
        self.register_buffer("right", memory[4:])


def test_shards_buffers_and_states_of_optimizers_are_looked_at(new_path: NewPath) -> None:
    memory, path = torch.zeros(10), new_path()
    one, two = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
    optimizer = torch.optim.SGD([one, two], momentum=0.9)
    for weight in (one, two):
        optimizer.state[weight] = {"momentum_buffer": torch.ones(6)}
    module = Tangled()
    state = {
        "m": module,
        "o": optimizer,
        "s": [holdfast.Shard(torch.ones(6), (6,), start=0) for _ in range(2)],
    }
    holdfast.save(state, path)
    optimizer.state[one] = {"momentum_buffer": memory[:6]}
    optimizer.state[two] = {"momentum_buffer": memory[4:]}
    runs = torch.zeros(11)
    state["s"] = [holdfast.Shard(runs[5 * i : 5 * i + 6], (6,), start=0) for i in range(2)]
    with pytest.raises(MismatchError) as told:
        holdfast.load(path, into=state)
    for pair in (
        "m.left and m.right overlap",
        "o.state.0.momentum_buffer and o.state.1.momentum_buffer overlap",
        "s.0 and s.1 overlap",
    ):
        assert pair in str(told.value)
    assert not (memory.any() or runs.any() or module.left.any())


def test_a_tied_name_is_no_overlap_and_each_pair_is_named_once(new_path: NewPath) -> None:
    path, memory = new_path(), torch.zeros(8)
    kept = torch.ones(5)
    holdfast.save({"a": kept, "tied": kept, "b": torch.ones(5), "c": torch.ones(3)}, path)
    front = memory[:5]
    into = {"a": front, "tied": front, "b": memory[3:], "c": torch.zeros(3)}
    with pytest.raises(MismatchError, match=r"1 differ.*(a|tied) and b overlap"):
        holdfast.load(path, into=into)
    into["b"] = torch.zeros(5)
    holdfast.load(path, into=into)
    assert memory.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def local(name: str, data: torch.Tensor) -> LocalTensor:
    return local_tensor(data, (name,))


def test_random_views_overlap_exactly_where_marked_bytes_say_so() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        base = torch.zeros(64, dtype=torch.float32)
        views = []
        for _ in range(draw.randint(2, 5)):
            dtype = draw.choice([torch.float32, torch.int16, torch.uint8, torch.float64])
            source = base.view(dtype)
            shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
            strides = [draw.randint(1, 9) for _ in shape]
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            if last >= source.numel():
                continue
            at = draw.randint(0, source.numel() - last - 1)
            views.append(source.as_strided(shape, strides, at))
        marks = []
        for view in views:
            places = torch.arange(base.nbytes).view(-1, view.element_size())
            places = places.as_strided(
                (*view.shape, view.element_size()),
                (*(s * view.element_size() for s in view.stride()), 1),
                view.storage_offset() * view.element_size(),
            )
            marks.append(places.reshape(-1).tolist())
        expected = {
            f"v{i} and v{j}"
            for i in range(len(views))
            for j in range(i + 1, len(views))
            if set(marks[i]) & set(marks[j])
            and local("v", views[i]).tie != local("v", views[j]).tie
        }
        expected |= {f"v{i}" for i, m in enumerate(marks) if len(set(m)) < len(m)}
        targets = {(f"v{i}",): local(f"v{i}", view) for i, view in enumerate(views)}
        found = set()
        for fault in find_overlaps(targets):
            names = fault.split(" overlap")[0].split(" is ")[0].split(" and ")
            found.add(" and ".join(sorted(names)))
        assert found == expected, f"seed {seed}"


def test_thousands_of_columns_and_of_tensors_take_no_time() -> None:
    """Measured alone: 20,000 tensors take 14 ms, 4,000 columns of one matrix 0.11 s."""
    matrix = torch.zeros(50, 4000)
    columns = {(f"c{i}",): local(f"c{i}", matrix[:, i]) for i in range(4000)}
    many = {(f"t{i}",): local(f"t{i}", torch.zeros(16)) for i in range(20_000)}
    started = time.perf_counter()
    assert find_overlaps(columns) == []
    assert time.perf_counter() - started < 20
    started = time.perf_counter()
    assert find_overlaps(many) == []
    assert time.perf_counter() - started < 2
    columns["last",] = local("last", matrix[10:12, 5])
    assert len(find_overlaps(columns)) == 1


def test_what_a_load_makes_itself_overlaps_nothing() -> None:
    weight = nn.Parameter(torch.ones(3))
    moment: Any = ("o", "state", 0, "exp_avg")
    source = Source({moment: Tensor(moment, "f32", (3,))}, {})
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight] = {"exp_avg": torch.zeros(4).as_strided((3,), (0,))}
    target = bind({"o": optimizer}, source)
    assert target.conflicts == []
    assert target.tensors[moment].data.is_contiguous()
