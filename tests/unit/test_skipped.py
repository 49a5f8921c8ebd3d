"""What ``strict=False`` leaves out because it does not fit; `restore` takes what `load` takes."""

import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer
from holdfast.errors import MismatchError, OptionError

NewPath = Callable[[], Path]


class Mode(Enum):
    """A value of a class of the program."""

    TRAIN = 1


def trained(classes: int, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Return a net with a head for so many classes, and its optimizer after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, classes))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def step_again(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 4)).sum().backward()
    state["optimizer"].step()


def test_a_head_of_another_size_is_left_out_with_its_optimizer_state(new_path: NewPath) -> None:
    saved, into = trained(3), trained(5, seed=1)
    step_again(saved)
    holdfast.save(saved, path := new_path())
    head = into["model"][1].weight.detach().clone()
    moment = into["optimizer"].state[into["model"][1].weight]["exp_avg"].clone()
    report = holdfast.load(path, into=into, strict=False)
    names = {f"model.1.{name}" for name in ("weight", "bias")}
    states = ("step", "exp_avg", "exp_avg_sq")
    names |= {f"optimizer.state.1.{n}.{s}" for n in ("weight", "bias") for s in states}
    assert set(report.skipped) == names
    text = "model.1.bias is f32 [3] in the checkpoint and f32 [5] in the target"
    assert report.skipped["model.1.bias"] == text
    assert "another shape" in report.skipped["optimizer.state.1.bias.exp_avg"]
    assert (report.missing, report.unexpected) == ((), ())
    first, other = into["model"][0].weight, saved["model"][0].weight
    assert first.equal(other)
    exp_avg = saved["optimizer"].state[other]["exp_avg"]
    assert into["optimizer"].state[first]["exp_avg"].equal(exp_avg)
    assert into["model"][1].weight.equal(head)
    assert into["optimizer"].state[into["model"][1].weight]["exp_avg"].equal(moment)
    assert into["optimizer"].state[into["model"][1].weight]["step"] == 1, "which would fit"
    assert into["optimizer"].state[first]["step"] == 2
    step_again(into)


def test_state_of_a_parameter_that_no_module_names_is_left_out_too(new_path: NewPath) -> None:
    holdfast.save({"optimizer": trained(3)["optimizer"]}, path := new_path())
    into = trained(5, seed=1)
    with pytest.raises(MismatchError, match="its parameter"):
        holdfast.load(path, into={"optimizer": into["optimizer"]})
    report = holdfast.load(path, into={"optimizer": into["optimizer"]}, strict=False)
    assert {name.split(".")[2] for name in report.skipped} == {"2", "3"}
    step_again(into)


def test_a_value_and_a_tensor_of_one_name_are_left_out(new_path: NewPath) -> None:
    holdfast.save({"a": torch.ones(2), "b": 3, "c": 4}, path := new_path())
    into = {"a": 5, "b": torch.zeros(2), "c": 0}
    report = holdfast.load(path, into=into, strict=False)
    assert set(report.skipped) == {"a", "b"}
    assert (report.missing, report.unexpected) == ((), ())
    assert into["a"] == 5
    assert into["b"].tolist() == [0, 0]
    assert into["c"] == 4


def test_a_dtype_is_no_reason_to_leave_out(new_path: NewPath) -> None:
    holdfast.save({"a": torch.ones(2), "z": torch.tensor([1j])}, path := new_path())
    half = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(MismatchError, match="Give cast=True"):
        holdfast.load(path, into=half, strict=False)
    assert holdfast.load(path, into=half, strict=False, cast=True).skipped == {}
    assert half["a"].tolist() == [1, 1]
    with pytest.raises(MismatchError) as refused:
        holdfast.load(path, into={"z": torch.zeros(1)}, strict=False, cast=True)
    assert "Give" not in str(refused.value), "no argument makes a complex number real"


ADVICE = [
    ({"a": torch.zeros(3)}, {"partial": True}, "strict=False"),
    ({"a": torch.zeros(2).int()}, {"partial": True}, "cast=True"),
    ({"a": torch.zeros(2)}, {}, "partial=True"),
    ({"a": torch.zeros(2), "b": torch.zeros(2), "c": 1}, {}, "strict=False"),
]


@pytest.mark.parametrize(("into", "given", "argument"), ADVICE)
def test_the_advice_of_an_error_can_be_followed(
    new_path: NewPath, into: dict[str, Any], given: dict[str, Any], argument: str
) -> None:
    with Checkpointer(new_path()) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(2), "b": torch.ones(2)})
        with pytest.raises(MismatchError, match=re.escape(argument)) as refused:
            checkpointer.restore(into, **given)
        assert str(refused.value).count("=True") + str(refused.value).count("=False") == 1
        name, _, value = argument.partition("=")
        assert checkpointer.restore(into, **given | {name: value == "True"}) == 1


def test_restore_converts_skips_and_reports(new_path: NewPath) -> None:
    with Checkpointer(new_path()) as checkpointer:
        assert checkpointer.report is None
        checkpointer.save(7, {"a": torch.ones(2), "b": torch.ones(2), "mode": Mode.TRAIN})
        into = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(3), "mode": None}
        types = iter([Mode])
        assert checkpointer.restore(into, strict=False, cast=True, types=types) == 7
        assert into["a"].tolist() == [1, 1]
        assert into["mode"] is Mode.TRAIN
        report = checkpointer.report
        assert report is not None
        assert set(report.skipped) == {"b"}
        assert (report.step, report.path, report.seconds > 0) == (7, checkpointer.path(7), True)
        with pytest.raises(OptionError, match="types"):
            checkpointer.restore(into, types=[3])
        assert checkpointer.report is None


def test_types_hold_for_each_step_that_is_tried(new_path: NewPath) -> None:
    with Checkpointer(run := new_path()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(40), "mode": Mode.TRAIN})
        (file,) = (run / "step-00000002" / "data").rglob("*.hf")
        content = bytearray(file.read_bytes())
        content[64] ^= 1
        file.write_bytes(content)
        into = {"w": torch.zeros(40), "mode": None}
        assert checkpointer.restore(into, types=iter([Mode])) == 1
        assert into["mode"] is Mode.TRAIN
