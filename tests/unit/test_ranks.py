"""What several ranks hold together: merged, deduplicated, and refused where they disagree."""

import errno
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from format.simulated_ranks import Piece, cut, pieces, run_ranks, save_pieces
from holdfast.errors import HoldfastError, PeerError, StateError, StoreError
from holdfast.layout import Box, Tensor, first_gap, tiling_fault, whole
from holdfast.options import SLOT_BYTES
from holdfast.plan.local_states import (
    LocalState,
    Values,
    decode_local_states,
    decode_object,
    encode_local_state,
    encode_object,
    local_state_of,
)
from holdfast.plan.save_plan import SavePlan, plan_save

from .training import same

NewPath = Callable[[], Path]
WHOLE = torch.arange(60, dtype=torch.float32).reshape(5, 12)


def test_boxes_of_several_ranks_come_back_as_one_tensor(new_path: NewPath) -> None:
    path = new_path()
    boxes = [((0, 0), (5, 5)), ((0, 5), (2, 7)), ((2, 5), (3, 7))]
    save_pieces(path, [{("w",): piece} for piece in pieces(WHOLE, boxes)])
    checkpoint = holdfast.open(path)
    assert (checkpoint.world_size, len(checkpoint.file_names)) == (3, 3)
    assert checkpoint.info("w").shards == tuple(boxes)
    assert same(checkpoint.tensor("w"), WHOLE)
    assert same(checkpoint.tensor("w", ((1, 3), (3, 6))), WHOLE[1:4, 3:9])
    assert checkpoint.verify() == []


def test_what_all_ranks_hold_is_written_once_and_in_equal_shares(new_path: NewPath) -> None:
    path = new_path()
    state = {(f"t{i}",): torch.full((1000,), float(i)) for i in range(8)}
    save_pieces(path, [state | {("v",): 1}] * 4)
    checkpoint = holdfast.open(path)
    assert all(len(checkpoint.info(name).shards) == 1 for name in checkpoint.names())
    assert len(checkpoint.file_bytes) == 4
    assert max(checkpoint.file_bytes) - min(checkpoint.file_bytes) < 64
    assert checkpoint.objects() == {"v": 1}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_is_cut_comes_back_whatever_its_strides(new_path: NewPath, ranks: int) -> None:
    path = new_path()
    cube = torch.arange(2 * 3 * 5000, dtype=torch.float64).reshape(2, 3, 5000)
    views = {"cube": cube, "turned": cube.permute(2, 0, 1), "gaps": cube[:, 1:, ::2]}
    save_pieces(path, [{(name,): view for name, view in views.items()}] * ranks)
    checkpoint = holdfast.open(path)
    assert checkpoint.verify() == []
    assert sum(len(checkpoint.info(name).shards) for name in views) > len(views), "cut"
    assert all(same(checkpoint.tensor(name), view) for name, view in views.items())
    assert max(checkpoint.file_bytes) <= 1.05 * sum(checkpoint.file_bytes) / ranks


def test_ranks_without_elements_write_no_file(new_path: NewPath) -> None:
    path = new_path()
    empty = Piece((5, 12), (0, 0), WHOLE[:0])
    save_pieces(path, [{("w",): empty}, {("w",): WHOLE}, {("w",): empty}])
    assert [name[-10:] for name in holdfast.open(path).file_names] == ["00001-0.hf"]
    assert same(holdfast.open(path).tensor("w"), WHOLE)


def test_every_rank_loads_a_share_of_the_checks_and_all_of_what_it_needs(new_path: NewPath) -> None:
    path = new_path()
    save_pieces(path, [{("w",): p} for p in pieces(WHOLE, [((0, 0), (2, 12)), ((2, 0), (3, 12))])])

    def load(group: Any) -> torch.Tensor:
        target = torch.zeros(5, 12)
        own = holdfast.Options(pool_bytes=(2 + group.rank) * SLOT_BYTES)  # ranks share no pool
        holdfast.load(path, into={"w": target}, group=group, options=own)
        return target

    for found in run_ranks(3, load):
        assert same(found, WHOLE)
    (second,) = list((path / "data").rglob("00001-0.hf"))
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    with pytest.raises(holdfast.errors.CorruptError, match=r"00001-0\.hf: trailer"):
        run_ranks(3, load)


@pytest.mark.parametrize(
    ("boxes", "text"),
    [
        (
            [((0, 0), (3, 12)), ((2, 0), (3, 12))],
            r"w f32 \[5, 12\]: \[0:3, 0:12\] of rank 0 and \[2:5, 0:12\] of rank 1 overlap",
        ),
        (
            [((0, 0), (2, 12)), ((3, 0), (2, 12))],
            r"of ranks 0, 1 cover 48 of 60 elements, no rank holds \[2:3, 0:12\]",
        ),
        ([((0, 0), (5, 12)), ((0, 0), (5, 11))], r"\[0:5, 0:12\] of rank 0 and .* overlap"),
    ],
)
def test_boxes_that_make_no_whole_tensor_are_not_committed(
    new_path: NewPath, boxes: list[Any], text: str
) -> None:
    path = new_path()
    with pytest.raises(StateError, match=text):
        save_pieces(path, [{("w",): piece} for piece in pieces(WHOLE, boxes)])
    assert not path.exists()


DISAGREEMENTS: list[tuple[Any, Any, str]] = [
    (torch.zeros(2), torch.zeros(3), r"w is f32 \[3\] on rank 1, f32 \[2\] on rank 0"),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int8), r"w is i8 \[2\] on rank 1, f32"),
    (1, 2, r"w is 2 on rank 1, 1 before"),
    (1, True, r"w is True on rank 1, 1 before"),
    (1, torch.zeros(2), r"w is a value on rank 0 and a tensor on rank 1"),
]


@pytest.mark.parametrize(("first", "second", "text"), DISAGREEMENTS)
def test_ranks_that_disagree_are_told_so(
    new_path: NewPath, first: Any, second: Any, text: str
) -> None:
    path = new_path()
    with pytest.raises(StateError, match=text):
        save_pieces(path, [{("w",): first}, {("w",): second}])
    assert not path.exists()


def test_a_value_on_one_rank_and_a_container_on_another_are_no_state(new_path: NewPath) -> None:
    with pytest.raises(StateError, match="reader is a value on rank 0 and a container on rank 1"):
        save_pieces(new_path(), [{("reader",): None}, {("reader", "at"): 5}])


def test_equal_values_agree_even_when_they_are_no_numbers(new_path: NewPath) -> None:
    path = new_path()
    save_pieces(path, [{("v",): float("nan"), ("a",): 1}, {("v",): float("nan"), ("b",): 2}])
    assert set(holdfast.open(path).objects()) == {"v", "a", "b"}


def small(values: list[float] | list[int], dtype: torch.dtype) -> dict[str, Any]:
    return {"buffer": torch.tensor(values, dtype=dtype), "w": torch.arange(20.0)}


def test_statistics_that_differ_are_those_of_the_first_rank(new_path: NewPath) -> None:
    path = new_path()
    states = [small([1.0, 2.0], torch.float32), small([3.0, 4.0], torch.float32)]
    run_ranks(2, lambda group: holdfast.save(states[group.rank], path, group=group))
    assert holdfast.open(path).tensor("buffer").tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_counters_that_differ_are_refused(new_path: NewPath, dtype: torch.dtype) -> None:
    states = [small([0, 1], dtype), small([1, 1], dtype)]
    path = new_path()
    with pytest.raises(StateError, match="of buffer; expected equal values for a replicated"):
        run_ranks(2, lambda group: holdfast.save(states[group.rank], path, group=group))
    assert not path.exists()


def test_replicas_of_every_dtype_and_stride_can_be_compared(new_path: NewPath) -> None:
    from holdfast.state.tensors import DTYPE_NAMES

    base = {str(d): torch.zeros(6 * d.itemsize, dtype=torch.uint8).view(d) for d in DTYPE_NAMES}
    state = {name: tensor.view(2, 3) for name, tensor in base.items()}
    state |= {f"{name}, turned": tensor.t() for name, tensor in state.items()}
    state |= {f"{name}, a column": tensor[:1, 1:2] for name, tensor in state.items()}
    path = new_path()
    run_ranks(2, lambda group: holdfast.save(state, path, group=group))
    assert len(holdfast.open(path).names()) == len(state)
    assert holdfast.open(path).verify() == []


def test_a_rank_that_fails_fails_all_and_leaves_nothing(new_path: NewPath) -> None:
    path = new_path()
    errors: dict[int, BaseException] = {}

    def save(group: Any) -> None:
        state = {"w": torch.zeros(3), "x": object() if group.rank == 1 else 1}
        try:
            holdfast.save(state, path, group=group)
        except BaseException as error:
            errors[group.rank] = error

    run_ranks(3, save)
    assert isinstance(errors[1], StateError)
    for rank in (0, 2):
        error = errors[rank]
        assert isinstance(error, PeerError)
        assert (error.rank, error.cause.split(":")[0]) == (1, "StateError")
    assert not path.exists()


@pytest.mark.parametrize("first_fails", [True, False])
def test_a_rank_whose_directory_was_removed_names_the_one_that_failed(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, first_fails: bool
) -> None:
    """The coordinator removes what all have written, as soon as it knows that nobody commits."""
    path, write = new_path(), holdfast.saving.save.write_shards  # type: ignore[attr-defined]
    errors: dict[int, BaseException] = {}

    def failing(store: Any, lease: Any, plan: Any, *others: Any) -> Any:
        error = StoreError("no such directory" if plan.rank else "the disk is broken")
        error.errno = errno.ENOENT if plan.rank else errno.EIO
        if plan.rank or first_fails:
            raise error
        return write(store, lease, plan, *others)

    def save(group: Any) -> None:
        try:
            holdfast.save({"w": torch.arange(4000.0)}, path, group=group)
        except HoldfastError as error:
            errors[group.rank] = error

    monkeypatch.setattr("holdfast.saving.save.write_shards", failing)
    run_ranks(2, save)
    mine = errors[1]
    if first_fails:
        assert isinstance(mine, PeerError)
        assert mine.cause.startswith("StoreError: the disk is broken")
        assert "the disk is broken" in str(errors[0])
    else:
        assert str(mine) == "no such directory"
        assert isinstance(errors[0], PeerError) and errors[0].rank == 1


def test_a_request_survives_the_wire() -> None:
    tensor = Tensor(("a", 1, ("list", 2)), "bf16", (2**40, 3))
    value = {("o", -1): encode_object((1, b"x", {None: 2}), ("o", -1))}
    held = [(tensor, (Box((2**39, 0), (2**38, 3)), Box((1, 1), (1, 2)))), (tensor, ())]
    mesh = {"shape": [2], "names": ["dp"]}
    ties: dict[Any, Any] = {("b",): ("a", 1, ("list", 2))}
    values = Values({("b",): bytes(range(16))}, value)
    local_state = local_state_of(held, ties, mesh, values, "hôst")
    other = replace(local_state, node="another")
    third = local_state_of([], {}, None, Values({}, {}), "")
    sent = [local_state, other, third]
    found = decode_local_states([encode_local_state(local_state) for local_state in sent])
    assert found == sent
    assert found[0].names is found[1].names and found[0].boxes is found[1].boxes, "decoded once"
    assert found[0].counts.tolist() == [2, 0]
    assert found[0].numbers.tolist() == [2**39, 0, 2**38, 3, 1, 1, 1, 2]
    assert decode_object(found[1].values.objects["o", -1]) == (1, b"x", {None: 2})


def test_a_tie_on_one_rank_only_is_no_tie() -> None:
    def local_state(ties: dict[Any, Any]) -> LocalState:
        names = [(name,) for name in ("a", "b", "c")]
        held = [(Tensor(n, "f32", (2,)), [whole((2,))]) for n in names]
        return local_state_of(held, ties, None, Values({}, {}), "node")

    def plan(*local_states: LocalState) -> SavePlan:
        return plan_save(list(local_states), 1 << 38, 1 << 20, "rank")

    both = plan(local_state({("b",): ("a",)}), local_state({("b",): ("a",)}))
    assert both.ties == ((("b",), 0),)
    one = plan(local_state({("b",): ("a",)}), local_state({}))
    assert one.ties == ()
    assert [t.path for t in one.tensors] == [("a",), ("b",), ("c",)]


def test_tilings_are_told_from_overlaps_and_holes() -> None:
    grid = [Box((i, j), (2, 3)) for i in (0, 2) for j in (0, 3, 6)]
    assert tiling_fault((4, 9), grid) is None
    missing = tiling_fault((4, 9), grid[:-1])
    assert missing == "its shards cover 30 of 36 elements, none of those in [2:4, 6:9]"
    assert "overlap" in (tiling_fault((4, 9), [*grid[:-1], Box((1, 6), (2, 3))]) or "")
    assert tiling_fault((), [Box((), ())]) is None
    assert "its shards cover 0 of 1 elements" in (tiling_fault((), []) or "")
    assert tiling_fault((0, 3), []) is None
    assert "overlap" in (tiling_fault((), [Box((), ())] * 2) or "")
    assert "leaves the tensor" in (tiling_fault((4, 9), [Box((0, 0), (4, 10))]) or "")


def test_random_boxes_tile_when_counting_says_so() -> None:
    chance = random.Random(0)
    verdicts = Counter[bool]()
    for _ in range(3000):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randrange(4)))
        boxes = cut(chance, (0,) * len(shape), shape, chance.randint(1, 6))
        tiles = [Box(offset, extent) for offset, extent in boxes]
        for _ in range(chance.choice([0, 0, 1, 2])):
            box = chance.choice(tiles)
            moved = [max(0, a + chance.choice([-1, 0, 0, 1])) for a in box.offset]
            ends = [n - a for a, n in zip(moved, shape, strict=True)]
            extent = tuple(max(1, min(n, e)) for n, e in zip(box.shape, ends, strict=True))
            tiles[tiles.index(box)] = Box(tuple(moved), extent)
        counted = np.zeros(shape, int)
        inside = True
        for tile in tiles:
            inside &= all(
                a + n <= s for a, n, s in zip(tile.offset, tile.shape, shape, strict=True)
            )
            counted[tile.slices()] += 1
        expected = inside and bool((counted == 1).all())
        assert (tiling_fault(shape, tiles) is None) == expected, (shape, tiles)
        gap = first_gap(shape, tiles) if inside else None
        assert not inside or (gap is None) == bool((counted > 0).all()), (shape, tiles)
        assert gap is None or (gap.elements > 0 and not counted[gap.slices()].any()), (shape, tiles)
        verdicts[expected] += 1
    assert min(verdicts.values()) > 300


def test_many_boxes_are_checked_in_linear_time() -> None:
    """Comparing each with those beside it took 18 s for this grid."""
    grid = [Box((i, j), (1, 1)) for i in range(150) for j in range(150)]
    started = time.perf_counter()
    assert tiling_fault((150, 150), grid) is None
    assert "its 22500 shards overlap" in (tiling_fault((150, 150), [*grid[1:], grid[-1]]) or "")
    assert time.perf_counter() - started < 2.0
