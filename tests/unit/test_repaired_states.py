"""Optimizer state of a repaired checkpoint: of each parameter whole, or as it was."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import MismatchError

from .training import same

NewPath = Callable[[], Path]
State = dict[str, Any]
BIAS = "optimizer.state.bias."


def training(lr: float = 0.1, amsgrad: bool = False) -> State:
    model = nn.Linear(4, 4)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=lr, amsgrad=amsgrad),
    }


def train(state: State, steps: int = 1) -> State:
    for _ in range(steps):
        state["model"](torch.rand(2, 4)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    return state


def damage(path: Path, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        for file in path.glob("data/*/*.hf"):
            content = file.read_bytes()
            if (at := content.find(tensor.detach().numpy().tobytes())) >= 0:
                file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
                break
        else:
            raise AssertionError("no file has the tensor")


def moments(state: State, name: str) -> State:
    found: State = state["optimizer"].state.get(dict(state["model"].named_parameters())[name], {})
    return {key: value.clone() for key, value in found.items()}


def repaired(new_path: NewPath, saved: State, *keys: str, of: str = "bias") -> Path:
    """Save, lose some of a parameter's state, and repair."""
    path, there = new_path(), new_path()
    holdfast.save(saved, path)
    damage(path, *(moments(saved, of)[key] for key in keys))
    assert sorted(holdfast.repair(path, to=there).lost) == sorted(
        f"optimizer.state.{of}.{key}" for key in keys
    )
    return there


@pytest.mark.parametrize("keys", [("exp_avg",), ("exp_avg", "exp_avg_sq")])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_that_lost_a_moment_stays_as_it_was_and_is_named(
    new_path: NewPath, keys: tuple[str, ...], steps: int
) -> None:
    saved = train(training(), 3)
    path = repaired(new_path, saved, *keys)
    state = train(training(), steps)
    before = moments(state, "bias")
    with pytest.raises(MismatchError, match=f"(?s)missing in the checkpoint: {BIAS}exp_avg"):
        holdfast.load(path, into=state)
    report = holdfast.load(path, into=state, strict=False)
    assert report.missing == tuple(BIAS + key for key in keys)
    assert report.unexpected == ("repaired by holdfast",)
    assert same(moments(state, "bias"), before)
    assert same(moments(state, "weight"), moments(saved, "weight"))
    assert torch.equal(state["model"].bias, saved["model"].bias)
    train(state)  # AdamW raises a KeyError with half a state


def test_a_lost_step_counter_counts_as_well(new_path: NewPath) -> None:
    saved, path, there = train(training(), 3), new_path(), new_path()
    saved["optimizer"].state[saved["model"].bias]["step"].fill_(1.2345e30)  # found by its bytes
    holdfast.save(saved, path)
    damage(path, moments(saved, "bias")["step"])
    holdfast.repair(path, to=there)
    state = training()
    assert holdfast.load(there, into=state, strict=False).missing == (f"{BIAS}step",)
    assert moments(state, "bias") == {} and moments(state, "weight")
    train(state)


def test_a_repair_of_a_repaired_checkpoint_still_names_what_the_first_one_lost(
    new_path: NewPath,
) -> None:
    saved = train(training(), 3)
    once, twice = repaired(new_path, saved, "exp_avg"), new_path()
    damage(once, moments(saved, "weight")["exp_avg_sq"])
    holdfast.repair(once, to=twice)
    state = training()
    assert holdfast.load(twice, into=state, strict=False).missing == (
        f"{BIAS}exp_avg",
        "optimizer.state.weight.exp_avg_sq",
    )
    assert not state["optimizer"].state
    train(state)


def test_state_that_was_lost_with_manifest_is_missed_where_the_target_has_it(
    new_path: NewPath,
) -> None:
    """Values are in no footer: the state of the target shows which there were."""
    path, saved = new_path(), train(training(), 3)
    for of in saved["optimizer"].state.values():
        of["note"] = 7
    holdfast.save(saved, path)
    (path / "MANIFEST").unlink()
    for file in path.glob("data/*/*.hf"):
        os.utime(file, (1e9, 1e9))
    holdfast.repair(path, write=True)
    state = train(training())
    for of in state["optimizer"].state.values():
        of["note"] = 6
    before = [dict(of) for of in state["optimizer"].state.values()]
    report = holdfast.load(path, into=state, strict=False)
    assert {f"{BIAS}note", "optimizer.state.weight.note"} <= set(report.missing)
    assert [dict(of) for of in state["optimizer"].state.values()] == before


@pytest.mark.parametrize("steps", [0, 1])
def test_a_numbered_state_that_lost_a_moment_stays_as_it_was(new_path: NewPath, steps: int) -> None:
    """An optimizer with hooks takes its state by numbers, through load_state_dict."""
    path, there, saved = new_path(), new_path(), train(training(), 3)
    saved["optimizer"].register_state_dict_post_hook(lambda _, state: state)
    holdfast.save(saved, path)
    damage(path, moments(saved, "bias")["exp_avg"])
    holdfast.repair(path, to=there)
    state = train(training(), steps)
    state["optimizer"].register_state_dict_post_hook(lambda _, state: state)
    before = moments(state, "bias")
    report = holdfast.load(there, into=state, strict=False)
    assert report.missing == ("optimizer.state.1.exp_avg",)
    assert same(moments(state, "bias"), before)
    assert same(moments(state, "weight"), moments(saved, "weight"))
    train(state)


class Average:
    """An object with a state of its own, which it cannot take in part."""

    def __init__(self, start: float) -> None:
        self.sum, self.square = torch.full((9,), start), torch.full((9,), start + 0.5)

    def state_dict(self) -> State:
        return {"sum": self.sum, "square": self.square}

    def load_state_dict(self, state: State) -> None:
        self.sum, self.square = state["sum"], state["square"]


def test_an_object_that_lost_a_part_stays_as_it_was(new_path: NewPath) -> None:
    path, there = new_path(), new_path()
    holdfast.save({"average": Average(1.25), "w": torch.ones(3)}, path)
    damage(path, torch.full((9,), 1.75))
    holdfast.repair(path, to=there)
    state = {"average": Average(2), "w": torch.zeros(3)}
    report = holdfast.load(there, into=state, strict=False)
    assert report.missing == ("average.square",) and state["w"].tolist() == [1, 1, 1]
    assert state["average"].sum[0] == 2 and state["average"].square[0] == 2.5


def test_an_object_whose_values_are_lost_with_the_manifest_stays_as_it_was(
    new_path: NewPath,
) -> None:
    """A MANIFEST that is rebuilt from data files has tensors alone."""
    path, state = new_path(), {"model": nn.Linear(4, 4), "random": holdfast.RandomState(), "n": 1}
    holdfast.save(state, path)
    (path / "MANIFEST").unlink()
    for file in path.glob("data/*/*.hf"):
        os.utime(file, (0, 0))
    holdfast.repair(path, write=True)
    weight = state["model"].weight.detach().clone()
    nn.init.zeros_(state["model"].weight)
    before = torch.get_rng_state()
    report = holdfast.load(path, into=state, strict=False)
    assert torch.equal(state["model"].weight, weight) and torch.equal(torch.get_rng_state(), before)
    assert "n" in report.missing and "random.world_size" in report.missing


def test_an_object_that_has_lost_nothing_is_filled(new_path: NewPath) -> None:
    saved = train(training(), 3) | {"random": holdfast.RandomState()}
    drawn = torch.get_rng_state()
    path = repaired(new_path, saved, "exp_avg")
    torch.rand(3)
    report = holdfast.load(path, into=saved, strict=False)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not [name for name in report.missing if name.startswith("random")]
