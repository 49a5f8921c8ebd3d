"""Names as transformers saves them, by a module that stands in for it; boxes of views."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.convert.as_transformers import box_of_view
from holdfast.layout import Box, boxes_of_range

NewPath = Callable[[], Path]
STATE = {
    "mlp.gate_up": torch.randn(3, 8, 5).bfloat16(),
    "norm": torch.ones(7),
    "skip": torch.ones(1),
}


def saved_apart(model: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers does to save experts that are one tensor in memory."""
    result = {}
    for name, tensor in state.items():
        if name != "mlp.gate_up":
            result[f"model.{name}"] = tensor
            continue
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            for number, one in enumerate(half.contiguous().chunk(3)):
                result[f"model.experts.{number}.{part}"] = one.squeeze(0)
    return result


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module called transformers."""

    class Model(torch.nn.Module):
        _keys_to_ignore_on_save = ("skip",)

        def __init__(self, config: object) -> None:
            super().__init__()
            assert torch.empty(1).is_meta, "a model of any size has no memory here"

    config = SimpleNamespace(architectures=["Model"])
    loader = SimpleNamespace(from_pretrained=lambda place, **_: config)
    module = SimpleNamespace(AutoConfig=loader, Model=Model)
    loading = SimpleNamespace(revert_weight_conversion=saved_apart)
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", loading)
    return loading


@pytest.fixture
def places(new_path: NewPath) -> tuple[Path, Path, Path]:
    """A checkpoint, a directory with a configuration, and a target."""
    source, beside, target = new_path(), new_path(), new_path()
    holdfast.save(STATE, source)
    beside.mkdir()
    (beside / "config.json").write_text(json.dumps({"architectures": ["Model"]}))
    return source, beside, target


def export(places: tuple[Path, Path, Path], **given: Any) -> dict[str, torch.Tensor]:
    source, beside, target = places
    holdfast.export_checkpoint(source, target, files_from=beside, **given)
    return safetensors.torch.load_file(target / "model.safetensors")


def test_parts_of_tensors_have_the_names_and_elements_of_transformers(
    stand_in: Any, places: tuple[Path, Path, Path]
) -> None:
    found = export(places)
    expected = saved_apart(None, {name: STATE[name] for name in ("mlp.gate_up", "norm")})
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_parts_are_converted_too(stand_in: Any, places: tuple[Path, Path, Path]) -> None:
    found = export(places, dtype="f32")
    assert torch.equal(found["model.experts.2.up"], STATE["mlp.gate_up"][2, 4:].float())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda model, state: {"sum": state["norm"] + 1},
        lambda model, state: {"turned": state["mlp.gate_up"].transpose(0, 1)},
        lambda model, state: {"norm": state["norm"]},
        lambda model, state: 1 / 0,
    ],
    ids=["computed", "transposed", "incomplete", "an error"],
)
def test_names_stay_where_transformers_would_compute(
    wrong: Any, stand_in: Any, places: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.revert_weight_conversion = wrong
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert export(places).keys() == STATE.keys()
    assert "names are as in memory" in caplog.text


def test_without_transformers_names_stay(
    places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert export(places).keys() == STATE.keys()


def test_a_view_is_a_box_or_is_not() -> None:
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    for view, box in (
        (whole, Box((0, 0, 0), (4, 6, 5))),
        (whole[1], Box((1, 0, 0), (1, 6, 5))),
        (whole[:, 2:4], Box((0, 2, 0), (4, 2, 5))),
        (whole[2, 3:, 4], Box((2, 3, 4), (1, 3, 1))),
        (whole[3, 5, 4], Box((3, 5, 4), (1, 1, 1))),
        (whole[:, None, 1], Box((0, 1, 0), (4, 1, 5))),
        (whole.transpose(0, 1), None),
        (whole[::2], None),
        (whole.view(24, 5)[5:7], None),
        (whole[:0], None),
    ):
        assert box_of_view(view, (4, 6, 5)) == box
        if box is not None:
            assert torch.equal(whole[box.slices()].reshape(-1), view.reshape(-1))
    assert box_of_view(torch.tensor(3), ()) == Box((), ())
    assert list(boxes_of_range((), 0, 1)) == [(0, Box((), ()))]
