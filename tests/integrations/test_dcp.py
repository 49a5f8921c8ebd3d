"""The drop-in for DCP in one process: stock calls and planners, our checkpoints."""

import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import holdfast
from holdfast.errors import (
    AlreadyCommittedError,
    MismatchError,
    NotCommittedError,
    OptionError,
    StateError,
)
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter
from holdfast.options import Options

from .versions import as_dcp_tells

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP says with each call that it is alone
NewPath = Callable[[], Path]


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for _ in range(3):
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def odd_state() -> dict[str, Any]:
    return {
        "step": 7,
        "nested": {"list": [1, {"pair": (1, 2.5)}, [{"deep": None}]], "none": None},
        "tensors": [torch.arange(3), {"b": torch.ones(2, dtype=torch.bfloat16)}],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "bytes": b"\0\xff",
        "big": 1 << 70,
        "nan": float("inf"),
    }


def blank(value: Any) -> Any:
    """The same structure with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else None


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert found == expected


def cause_of(error: CheckpointException) -> BaseException:
    ((cause, _),) = error.failures.values()
    return cause


def test_what_dcp_saves_is_a_checkpoint_like_any_other(new_path: NewPath) -> None:
    path, state = new_path(), odd_state()
    dcp.save(state, storage_writer=HoldfastWriter(path))
    found = blank(state)
    holdfast.load(path, into=found)
    assert_same(found, state)
    with holdfast.open(path) as checkpoint:
        assert checkpoint.verify() == []
        assert checkpoint.names() == [
            "empty", "scalar", "tensors.0", "tensors.1.b"
        ]  # fmt: skip
        assert checkpoint.objects()["nested.list"] == state["nested"]["list"]
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "MANIFEST", "data"]


def test_what_was_saved_comes_back_through_dcp(new_path: NewPath) -> None:
    path, state = new_path(), odd_state()
    dcp.save(state, storage_writer=HoldfastWriter(path))
    found = blank(state)
    dcp.load(found, storage_reader=HoldfastReader(path))
    assert_same(found, state)


def test_a_model_and_its_optimizer_resume(new_path: NewPath) -> None:
    path, (model, optimizer) = new_path(), trained()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=HoldfastWriter(path))
    other = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    fresh = torch.optim.AdamW(other.parameters())
    weights, moments = get_state_dict(other, fresh)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=HoldfastReader(path))
    set_state_dict(
        other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert_same(other.state_dict(), model.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.125
    by_us = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    holdfast.load(path, into={"model": by_us}, partial=True)
    assert_same(by_us.state_dict(), model.state_dict())


def test_dcp_reads_what_holdfast_saved(new_path: NewPath) -> None:
    path, (model, optimizer) = new_path(), trained()
    holdfast.save({"model": model, "optimizer": optimizer, "step": 3}, path)
    other = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    fresh = torch.optim.AdamW(other.parameters())
    options = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(other, fresh, options=options)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(
        state,
        storage_reader=HoldfastReader(path),
        # holdfast keeps no list of the parameters of a group: their names are the keys.
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    assert state["step"] == 3
    assert_same(dict(state["model"]), dict(model.state_dict()))
    expected = get_state_dict(model, optimizer, options=options)[1]
    for name in expected:
        if not name.startswith("param_groups") or name.endswith((".lr", ".betas")):
            assert_same(state["optimizer"][name], expected[name])


def test_any_part_is_read_without_a_state(new_path: NewPath) -> None:
    path, state = new_path(), odd_state()
    dcp.save(state, storage_writer=HoldfastWriter(path))
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    dcp.load(found, storage_reader=HoldfastReader(path), planner=planner)
    assert found == {}, "DCP fills a copy of an empty dict"
    found = _load_state_dict_from_keys(storage_reader=HoldfastReader(path))
    assert_same(found, state)
    found = _load_state_dict_from_keys({"nested"}, storage_reader=HoldfastReader(path))
    assert_same(found, {"nested": state["nested"]})


def test_a_key_that_is_missing_is_left_out_when_that_was_asked_for(new_path: NewPath) -> None:
    path = new_path()
    dcp.save({"a": torch.ones(3)}, storage_writer=HoldfastWriter(path))
    found = {"a": torch.zeros(3), "b": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load(found, storage_reader=HoldfastReader(path))
    partial = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, storage_reader=HoldfastReader(path), planner=partial)
    assert_same(found, {"a": torch.ones(3), "b": torch.zeros(2)})


def test_names_that_are_not_nested_stay_whole(new_path: NewPath) -> None:
    path, state = new_path(), {"a.b": torch.ones(3), "a.c": {"d": 1}}
    whole = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=HoldfastWriter(path), planner=whole)
    found: dict[str, Any] = {"a.b": torch.zeros(3), "a.c": None}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(found, storage_reader=HoldfastReader(path), planner=planner)
    assert_same(found, state)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex128, torch.bool, torch.uint64])
def test_every_dtype_goes_through(new_path: NewPath, dtype: torch.dtype) -> None:
    path = new_path()
    state = {"w": torch.arange(5, dtype=torch.float32).to(dtype)}
    dcp.save(state, storage_writer=HoldfastWriter(path))
    found = {"w": torch.zeros(5, dtype=torch.float32).to(dtype)}
    dcp.load(found, storage_reader=HoldfastReader(path))
    assert_same(found, state)


def test_a_large_tensor_is_cut_into_files(new_path: NewPath) -> None:
    path, options = new_path(), Options(file_bytes=1 << 16, chunk_elements=1000)
    state = {"w": torch.randn(300, 301), "v": torch.randn(7)}
    dcp.save(state, storage_writer=HoldfastWriter(path, options=options))
    with holdfast.open(path) as checkpoint:
        assert len(checkpoint.file_names) > 3 and checkpoint.verify() == []
    found = blank(state)
    dcp.load(found, storage_reader=HoldfastReader(path))
    assert_same(found, state)


def test_a_url_names_a_directory(new_path: NewPath) -> None:
    path = new_path()
    dcp.save({"a": torch.ones(3)}, storage_writer=HoldfastWriter(f"holdfast://{path}"))
    found = {"a": torch.zeros(3)}
    reader = HoldfastReader(new_path())
    dcp.load(found, checkpoint_id=f"holdfast://{path}", storage_reader=reader)
    assert_same(found, {"a": torch.ones(3)})
    with pytest.raises(OptionError, match="s3://"):
        HoldfastWriter("s3://bucket/a")


class Custom:
    """A value that only a pickle can hold."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)


def test_values_that_need_a_pickle_are_refused_by_name(new_path: NewPath) -> None:
    path, state = new_path(), {"a": {"b": Custom(), "c": [Custom]}, "w": torch.ones(2)}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=HoldfastWriter(path))
    cause = cause_of(caught.value)
    assert isinstance(cause, StateError)
    assert "a.b" in str(cause) and "a.c" in str(cause) and "pickled=True" in str(cause)
    assert not path.exists(), "nothing is left"


def test_pickles_are_kept_and_handed_out_only_when_asked_for(new_path: NewPath) -> None:
    path, state = new_path(), {"a": Custom(), "w": torch.ones(2)}
    dcp.save(state, storage_writer=HoldfastWriter(path, pickled=True))
    found: dict[str, Any] = {"a": None, "w": torch.zeros(2)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(found, storage_reader=HoldfastReader(path))
    assert isinstance(cause_of(caught.value), OptionError)
    assert_same(found["w"], torch.zeros(2))
    weights = {"w": torch.zeros(2)}
    dcp.load(weights, storage_reader=HoldfastReader(path))
    assert_same(weights["w"], state["w"])
    dcp.load(found, storage_reader=HoldfastReader(path, pickled=True))
    assert found["a"] == Custom()
    with holdfast.open(path) as checkpoint:  # bytes, which nobody looks into
        assert type(checkpoint.objects()["a"]["dcp.pickled"]) is bytes


class Planner(DefaultSavePlanner):
    """Makes other bytes of values than DCP does."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, int):
            buffer = io.BytesIO()
            torch.save(object + 1, buffer)
            return buffer
        return super().transform_object(write_item, object)


def test_what_a_planner_makes_of_a_value_counts(new_path: NewPath) -> None:
    path = new_path()
    dcp.save({"a": 1, "b": "x"}, storage_writer=HoldfastWriter(path), planner=Planner())
    with holdfast.open(path) as checkpoint:
        assert checkpoint.objects() == {"a": 2, "b": "x"}


def test_a_place_without_a_checkpoint_is_told_as_such(new_path: NewPath) -> None:
    error = "does not exist; expected the directory"
    with pytest.raises(NotCommittedError, match=error):
        HoldfastReader(new_path()).read_metadata()
    with pytest.raises(CheckpointException, match=as_dcp_tells(error)):
        dcp.load({"a": torch.zeros(3)}, storage_reader=HoldfastReader(new_path()))


def test_a_size_that_differs_is_refused(new_path: NewPath) -> None:
    path = new_path()
    dcp.save({"a": torch.ones(3)}, storage_writer=HoldfastWriter(path))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"a": torch.zeros(4)}, storage_reader=HoldfastReader(path))


def test_a_dtype_is_converted_only_when_asked_for(new_path: NewPath) -> None:
    path = new_path()
    dcp.save({"a": torch.ones(3), "b": torch.ones(2)}, storage_writer=HoldfastWriter(path))
    found = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float16)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(found, storage_reader=HoldfastReader(path))
    assert isinstance(cause_of(caught.value), MismatchError)
    assert "b is f32 [2] there and f16 [2] here" in str(cause_of(caught.value))
    assert_same(found["a"], torch.zeros(3))
    dcp.load(found, storage_reader=HoldfastReader(path, cast=True))
    assert_same(found["b"], torch.ones(2, dtype=torch.float16))


def test_a_planner_with_a_cache_of_plans_saves_again_and_again(new_path: NewPath) -> None:
    paths = [new_path() for _ in range(3)]
    for number, path in enumerate(paths):
        state = {"w": torch.full((4,), number), "n": number}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=HoldfastWriter(path), planner=planner)
    for number, path in enumerate(paths):
        with holdfast.open(path) as checkpoint:
            assert checkpoint.verify() == []
            assert torch.equal(checkpoint.tensor("w"), torch.full((4,), number))
            assert checkpoint.objects() == {"n": number}


def test_use_without_collectives_is_refused(new_path: NewPath) -> None:
    with pytest.raises(OptionError, match="use_collectives"):
        dcp.save(
            {"a": torch.ones(2)},
            storage_writer=HoldfastWriter(new_path()),
            use_collectives=False,
        )


def test_a_checkpoint_is_never_written_over(new_path: NewPath) -> None:
    path, writer = new_path(), HoldfastWriter(new_path())
    dcp.save({"a": torch.ones(2)}, storage_writer=writer, checkpoint_id=path)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": torch.zeros(2)}, storage_writer=writer, checkpoint_id=path)
    assert isinstance(cause_of(caught.value), AlreadyCommittedError)
    with holdfast.open(path) as checkpoint:
        assert torch.equal(checkpoint.tensor("a"), torch.ones(2))


def test_one_writer_serves_two_threads_without_mixing_them(new_path: NewPath) -> None:
    paths, both = [new_path(), new_path()], threading.Barrier(2)

    class Meeting(DefaultSavePlanner):
        """Both threads have planned before either writes."""

        def finish_plan(self, new_plan: Any) -> Any:
            both.wait(10)
            return super().finish_plan(new_plan)

    writer = HoldfastWriter(paths[0])

    def save(number: int) -> None:
        state = {"w": torch.full((4,), number)}
        dcp.save(state, checkpoint_id=paths[number], storage_writer=writer, planner=Meeting())

    threads = [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, path in enumerate(paths):
        with holdfast.open(path) as checkpoint:
            assert torch.equal(checkpoint.tensor("w"), torch.full((4,), number))


def test_two_saves_to_one_path_at_once_commit_one_of_them_or_none(new_path: NewPath) -> None:
    path, both, outcomes = new_path(), threading.Barrier(2), []

    class Meeting(DefaultSavePlanner):
        """Both have planned before either writes."""

        def finish_plan(self, new_plan: Any) -> Any:
            both.wait(10)
            return super().finish_plan(new_plan)

    def save(number: int) -> None:
        state = {f"w{n}": torch.full((4,), number) for n in range(3)}
        try:
            dcp.save(state, storage_writer=HoldfastWriter(path), planner=Meeting())
            outcomes.append(number)
        except CheckpointException:
            pass

    threads = [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == int((path / "MANIFEST").exists()) <= 1
    if outcomes:
        with holdfast.open(path) as checkpoint:
            assert checkpoint.verify() == []
            found = {value for n in range(3) for value in checkpoint.tensor(f"w{n}").tolist()}
            assert found == set(outcomes)


def test_a_writer_goes_to_another_process(new_path: NewPath) -> None:
    path = new_path()
    writer = pickle.loads(pickle.dumps(HoldfastWriter(path, options=Options(queue_depth=4))))
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    assert writer.checkpoint_id == str(path)


def test_holdfast_does_not_import_dcp() -> None:
    code = "import sys, holdfast; holdfast.save; holdfast.Checkpointer; holdfast.load; print("
    code += "[m for m in sys.modules if m == 'torch.distributed.checkpoint.storage'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", "it would cost every program its import"


def test_an_empty_tensor_whose_shape_no_reader_takes_is_not_committed(new_path: NewPath) -> None:
    path = new_path()
    with pytest.raises(
        CheckpointException, match=r"tensor z has no elements, .* spans 2\^63 bytes"
    ):
        dcp.save({"z": torch.empty(1 << 61, 0)}, storage_writer=HoldfastWriter(path))
    assert not (path / "MANIFEST").exists()


def test_a_name_that_two_things_share_in_dcp_is_refused(new_path: NewPath) -> None:
    """A state may have the key ``a.b``, and b in a. DCP asks for both by the same name."""
    path = new_path()
    saved: dict[str, Any] = {"a.b": {"x": [1, 2]}, "a": {"b": {"x": [3, 4], "y": {"z": 9}}}}
    saved |= {"t.u": torch.zeros(2), "t": {"u": torch.ones(2)}}
    saved |= {"l.m": [{"q": 1}], "l": {"m": [{"q": 2}]}}
    holdfast.save(saved, path)
    for target in (
        {"a.b": {"x": 0}},
        {"a": {"b": {"x": 0}}},
        {"t.u": torch.zeros(2)},
        {"t": {"u": torch.zeros(2)}},
        {"l.m": 0},
        {"l": {"m": 0}},
    ):
        with pytest.raises(CheckpointException, match="Missing key"):
            dcp.load(target, storage_reader=HoldfastReader(path))
    other = {"a": {"b": {"y": {"z": 0}}}}
    dcp.load(other, storage_reader=HoldfastReader(path))
    assert other == {"a": {"b": {"y": {"z": 9}}}}


def test_a_key_with_a_backslash_is_no_name_of_another(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"a.x": 1, "a": {"x": 2}, "\\a": {"x": 3}, "w": torch.ones(2)}, path)
    target = {"\\a": {"x": 0}}
    dcp.load(target, storage_reader=HoldfastReader(path))
    assert target == {"\\a": {"x": 3}}
