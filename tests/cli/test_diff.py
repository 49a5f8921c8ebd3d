"""`holdfast diff`: what differs, and by how much."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.tools import diff as diff_module

from .conftest import Command, data_files, flip_bit

NewPath = Callable[[], Path]


def save(path: Path, state: dict[Any, Any], **options: Any) -> Path:
    holdfast.save(state, path, **options)
    return path


@pytest.fixture
def pair(new_path: NewPath) -> tuple[Path, Path]:
    """Two checkpoints that differ in one of each kind."""
    a = {
        "model": {
            "w": torch.arange(12.0).reshape(3, 4),
            "same": torch.ones(5),
            "old": torch.ones(1),
        },
        "grown": torch.zeros(2, 3),
        "cast": torch.zeros(4),
        "kind": torch.zeros(()),
        "step": 10,
        "seed": (1, float("nan")),
    }
    b = {
        "model": {"w": a["model"]["w"].clone(), "same": torch.ones(5), "new": torch.ones(1)},
        "grown": torch.zeros(3, 3),
        "cast": torch.zeros(4, dtype=torch.bfloat16),
        "kind": 0,
        "step": 20,
        "seed": (1, float("nan")),
    }
    b["model"]["w"][1, 2] += 0.5
    b["model"]["w"][2, 0] -= 0.25
    return save(new_path(), a, step=10), save(new_path(), b, step=20)


def test_include_and_exclude_choose_what_is_compared(
    pair: tuple[Path, Path], holdfast_command: Command
) -> None:
    answer = holdfast_command("diff", *pair, "--include", "model", "--exclude", "*.w", "--json")
    document = answer.document
    assert (document["only_in_a"], document["only_in_b"]) == (["model.old"], ["model.new"])
    assert [entry["name"] for entry in document["tensors"]] == ["model.same"]
    assert (document["changed"], document["objects"]) == ([], [])
    assert holdfast_command("diff", *pair, "--include", "model.same").code == 0
    answer = holdfast_command("diff", *pair, "--include", "nothing")
    assert answer.code == 2 and "has nothing that 'nothing' means" in answer.err


def test_a_tolerance_lets_tensors_differ_that_much(
    pair: tuple[Path, Path], holdfast_command: Command
) -> None:
    compared = ("diff", *pair, "--include", "model.w")
    assert holdfast_command(*compared).code == 1
    assert holdfast_command(*compared, "--tolerance", "0.4").code == 1
    answer = holdfast_command(*compared, "--tolerance", "0.5")
    assert answer.code == 0 and "the same: 1 tensor and 0 objects" in answer.out
    (found,) = holdfast_command(*compared, "--tolerance", "0.5", "--json").document["tensors"]
    assert (found["same"], found["differing"], found["max_abs"]) == (True, 2, 0.5)
    assert holdfast_command(*compared, "--tolerance", "-1").code == 2
    assert holdfast_command(*compared, "--tolerance", "nan").code == 2


def test_no_tolerance_makes_a_nan_the_same_as_a_number(
    new_path: NewPath, holdfast_command: Command
) -> None:
    a = save(new_path(), {"w": torch.tensor([1.0, 2.0])})
    b = save(new_path(), {"w": torch.tensor([1.0, float("nan")])})
    assert holdfast_command("diff", a, b, "--tolerance", "1e9").code == 1


def test_json_says_what_differs(pair: tuple[Path, Path], holdfast_command: Command) -> None:
    answer = holdfast_command("diff", *pair, "--json")
    document = answer.document
    assert (answer.code, answer.err, document["same"]) == (1, "", False)
    assert document["a"] == {"path": str(pair[0]), "step": 10}
    assert document["only_in_a"] == ["model.old"] and document["only_in_b"] == ["model.new"]
    assert document["changed"] == [
        {
            "name": "grown",
            "a": {"kind": "tensor", "dtype": "f32", "shape": [2, 3]},
            "b": {"kind": "tensor", "dtype": "f32", "shape": [3, 3]},
        },
        {
            "name": "cast",
            "a": {"kind": "tensor", "dtype": "f32", "shape": [4]},
            "b": {"kind": "tensor", "dtype": "bf16", "shape": [4]},
        },
        {
            "name": "kind",
            "a": {"kind": "tensor", "dtype": "f32", "shape": []},
            "b": {"kind": "object", "dtype": None, "shape": None},
        },
    ]
    assert document["tensors"] == [
        {
            **{"name": "model.w", "dtype": "f32", "shape": [3, 4], "elements": 12},
            **{"differing": 2, "not_finite": 0, "max_abs": 0.5, "mean_abs": 0.0625},
            "same": False,
        },
        {
            **{"name": "model.same", "dtype": "f32", "shape": [5], "elements": 5},
            **{"differing": 0, "not_finite": 0, "max_abs": 0.0, "mean_abs": 0.0},
            "same": True,
        },
    ]
    assert document["objects"] == [{"name": "step", "a": 10, "b": 20}]
    assert document["summary"] == {
        **{"tensors_compared": 2, "tensors_differing": 1},
        **{"objects_compared": 2, "objects_differing": 1},
        **{"changed": 3, "only_in_a": 1, "only_in_b": 1, "max_abs": 0.5},
    }


def test_the_text_says_it_too(pair: tuple[Path, Path], holdfast_command: Command) -> None:
    answer = holdfast_command("diff", *pair)
    lines = answer.out.splitlines()
    assert answer.code == 1
    assert lines[0] == f"A  {pair[0]}  (step 10)" and lines[1] == f"B  {pair[1]}  (step 20)"
    rows = {tuple(line.split("  ")[0:1]): " ".join(line.split()) for line in lines[3:]}
    assert rows[("model.old",)] == "model.old only in A"
    assert rows[("model.new",)] == "model.new only in B"
    assert rows[("cast",)] == "cast changed f32 [4] → bf16 [4]"
    assert rows[("kind",)] == "kind changed f32 [] → object"
    assert rows[("model.w",)] == "model.w differs max 0.5 mean 0.0625 2 of 12"
    assert rows[("step",)] == "step differs 10 → 20"
    assert lines[-1] == (
        "1 of 2 tensors and 1 of 2 objects differ, 3 changed in form, 1 only in A, 1 only in B"
    )


def test_the_same_state_saved_twice(new_path: NewPath, holdfast_command: Command) -> None:
    state = {"w": torch.tensor([float("nan"), 1.0]), "x": [1, {2: "a", 1: "b"}]}
    a, b = save(new_path(), state), save(new_path(), state)
    answer = holdfast_command("diff", a, b)
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "the same: 1 tensor and 1 object"
    assert holdfast_command("diff", a, a, "--json").document["same"]


def test_figures_of_many_shards_and_slabs_are_those_of_numpy(
    new_path: NewPath, holdfast_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((2, 40, 30, 7)).astype(np.float32)
    z = rng.integers(-100, 100, (2, 77))
    options = holdfast.Options(chunk_elements=100)
    a, b = (
        save(new_path(), {"x": torch.from_numpy(m), "z": torch.from_numpy(n)}, options=options)
        for m, n in ((x, z[0]), (y, z[1]))
    )
    monkeypatch.setattr(diff_module, "SLAB_BYTES", 1000)
    found = holdfast_command("diff", a, b, "--json").document["tensors"]
    wide = np.abs(x.astype(np.float64) - y.astype(np.float64)), np.abs(z[0] - z[1])
    for entry, expected in zip(found, wide, strict=True):
        assert entry["elements"] == expected.size
        assert entry["differing"] == np.count_nonzero(expected)
        assert entry["max_abs"] == expected.max()
        assert entry["mean_abs"] == pytest.approx(expected.mean(), rel=1e-12)


def test_what_is_not_finite_is_counted_apart(new_path: NewPath, holdfast_command: Command) -> None:
    a = save(new_path(), {"w": torch.tensor([1.0, 2.0, 3.0])})
    b = save(new_path(), {"w": torch.tensor([float("nan"), float("inf"), 3.5])})
    answer = holdfast_command("diff", a, b)
    assert "max 0.5  mean 0.5  all 3, 2 not finite" in answer.out
    (entry,) = holdfast_command("diff", a, b, "--json").document["tensors"]
    assert (entry["differing"], entry["not_finite"]) == (3, 2)


@pytest.mark.parametrize(
    ("left", "right", "code"),
    [
        (1, 1, 0),
        (1, 1.0, 1),
        (1, True, 1),
        (0.0, -0.0, 1),
        (float("nan"), float("nan"), 0),
        ([1, 2], (1, 2), 1),
        ([{2: 0, 1: 1}], [{1: 1, 2: 0}], 0),
        ([{"a": 0, "b": 1}], [{"b": 1, "a": 0}], 0),
        (b"x", "x", 1),
    ],
)
def test_objects_are_compared_by_value_and_type(
    new_path: NewPath, holdfast_command: Command, left: object, right: object, code: int
) -> None:
    a, b = save(new_path(), {"x": left}), save(new_path(), {"x": right})
    assert holdfast_command("diff", a, b).code == code


def test_tied_names_are_compared_and_read_once(
    new_path: NewPath, holdfast_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for value in (1.0, 2.0):
        weight = torch.full((4,), value)
        paths.append(save(new_path(), {"embed": weight, "head": weight}))
    read: list[str] = []
    original = holdfast.Checkpoint.tensors

    def counted(self: Any, names: Any) -> Any:
        names = list(names)
        read.extend(names)
        return original(self, names)

    monkeypatch.setattr(holdfast.Checkpoint, "tensors", counted)
    found = holdfast_command("diff", *paths, "--json").document["tensors"]
    assert [(entry["name"], entry["max_abs"]) for entry in found] == [("embed", 1.0), ("head", 1.0)]
    assert read == ["embed", "embed"]


def test_names_mean_the_same_keys_on_both_sides(
    new_path: NewPath, holdfast_command: Command
) -> None:
    # Alone, the key "a.b" is shown as it is; beside {"a": {"b"}} it is shown escaped.
    a = save(new_path(), {"a.b": torch.tensor([1.0])})
    b = save(new_path(), {"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([9.0])}})
    document = holdfast_command("diff", a, b, "--json").document
    assert [(entry["name"], entry["differing"]) for entry in document["tensors"]] == [("a\\.b", 0)]
    assert document["only_in_b"] == ["a.b"]


def test_many_differences_fit_one_screen(new_path: NewPath, holdfast_command: Command) -> None:
    paths = []
    for value in (1.0, 2.0):
        layers = {
            f"layers.{i}.{name}": torch.full((2,), value * (i + 1))
            for i in range(100)
            for name in ("up", "down")
        }
        paths.append(save(new_path(), {"model": layers}))
    lines = holdfast_command("diff", *paths).out.splitlines()
    assert len(lines) < 40
    (up,) = [line.split() for line in lines if ".up" in line]
    # Distances are 1 to 100: the largest, and the mean of all.
    assert " ".join(up) == "model.layers.0…99.up (x100) differs max 100 mean 50.5 all 200"
    assert len(holdfast_command("diff", *paths, "--all").out.splitlines()) == 2 + 1 + 200 + 2


def test_a_damaged_side_is_neither_same_nor_different(
    pair: tuple[Path, Path], holdfast_command: Command
) -> None:
    (file,) = data_files(pair[1])
    data = file.read_bytes()
    flip_bit(file, data.index(torch.ones(5).numpy().tobytes()))
    answer = holdfast_command("diff", *pair)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("holdfast: ") and "model.same" in answer.err


def test_a_side_that_is_no_checkpoint(pair: tuple[Path, Path], holdfast_command: Command) -> None:
    answer = holdfast_command("diff", pair[0], pair[0].parent / "nowhere")
    assert (answer.code, answer.out) == (2, "") and "nowhere does not exist" in answer.err
