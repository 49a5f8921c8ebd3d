"""An open checkpoint by names: as a mapping, in part, on a device and of another dtype."""

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError, MismatchError, OptionError, ReplacedError, StateError

from .training import same

WEIGHT = torch.arange(6.0).reshape(2, 3)


def a_state() -> dict[str, Any]:
    return {
        "model": {"w": WEIGHT.clone(), "b": torch.ones(3), "n": torch.tensor(7)},
        "layers": [{"b": torch.zeros(2)}, {"b": torch.ones(2)}, {"b": torch.full((2,), 2.0)}],
        "odd.name": torch.tensor([1 + 2j]),
        "epoch": 3,
        "history": [0.5, 0.25],
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> holdfast.Checkpoint:
    state = a_state()
    state["tied"] = state["model"]["w"]
    holdfast.save(state, tmp_path / "a")
    return holdfast.open(tmp_path / "a")


def test_a_checkpoint_is_a_mapping_of_names(checkpoint: holdfast.Checkpoint) -> None:
    assert isinstance(checkpoint, Mapping)
    names = [*checkpoint.names(), *checkpoint.objects()]
    assert [*checkpoint] == [*checkpoint.keys()] == names
    assert len(checkpoint) == len(names) == 10
    assert torch.equal(checkpoint["model.w"], WEIGHT)
    assert torch.equal(checkpoint["tied"], WEIGHT)
    assert (checkpoint["epoch"], checkpoint["history"]) == (3, [0.5, 0.25])
    assert "model.w" in checkpoint
    assert "epoch" in checkpoint
    assert "model" not in checkpoint
    assert 3 not in checkpoint
    assert checkpoint.get("epoch") == 3
    assert (checkpoint.get("none"), checkpoint.get("none", 5)) == (None, 5)
    assert dict(checkpoint).keys() == {*names}
    assert [name for name, value in checkpoint.items() if value is None] == []
    assert checkpoint == checkpoint
    assert checkpoint != holdfast.open(checkpoint.location)
    assert {checkpoint: 1}[checkpoint] == 1


def test_a_name_that_is_not_there_is_answered_with_similar_ones(
    checkpoint: holdfast.Checkpoint,
) -> None:
    with pytest.raises(MismatchError, match=r"has no tensor 'model.q'; expected one of model"):
        checkpoint["model.q"]
    with pytest.raises(OptionError, match="name is 3"):
        checkpoint[3]  # type: ignore[index]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), "bnwtielho"),
        ("model", (), "bnw"),
        (["model"], "model.n", "bw"),
        ("model.?", (), "bnw"),
        (("epoch", "model.w"), (), "we"),
        ("*", ["layers", "odd*", "history", "tied"], "bnwe"),
        ((), "[!m]*", "bnw"),
    ],
)
def test_a_part_is_read_by_patterns(
    checkpoint: holdfast.Checkpoint, include: Any, exclude: Any, expected: str
) -> None:
    state = a_state() | {"tied": WEIGHT}
    parts = {"b": "b", "n": "n", "w": "w"}
    wanted: dict[str, Any] = {
        "model": {key: state["model"][key] for letter, key in parts.items() if letter in expected}
    }
    others = {"t": "tied", "i": "odd.name", "e": "epoch", "l": "layers", "h": "history"}
    wanted |= {key: state[key] for letter, key in others.items() if letter in expected}
    assert same(checkpoint.state(include=include, exclude=exclude), wanted)


def test_a_list_in_part_keeps_its_positions(checkpoint: holdfast.Checkpoint) -> None:
    layers = a_state()["layers"]
    assert same(checkpoint.state(include="layers"), {"layers": layers})
    two = checkpoint.state(include=["layers.0", "layers.2"])
    assert same(two, {"layers": {0: layers[0], 2: layers[2]}})
    assert checkpoint.state(include="layers", exclude="layers.*") == {}


def test_a_tie_of_what_is_left_out_is_read(checkpoint: holdfast.Checkpoint) -> None:
    assert same(checkpoint.state(include="tied"), {"tied": WEIGHT})
    both = checkpoint.state(include=["tied", "model.w"])
    assert both["tied"] is both["model"]["w"]


@pytest.mark.parametrize("pattern", ["mode", "model.x*", "model.w.x", "W", "[", "tied."])
def test_a_pattern_that_means_nothing_is_refused(
    checkpoint: holdfast.Checkpoint, pattern: str
) -> None:
    for given in ({"include": pattern}, {"exclude": [pattern]}):
        with pytest.raises(MismatchError, match=r"has nothing that .* means; it has names such as"):
            checkpoint.state(**given)


@pytest.mark.parametrize("pattern", [5, None, b"model", [""], "", ["model", 5]])
def test_what_is_no_pattern_is_refused(checkpoint: holdfast.Checkpoint, pattern: Any) -> None:
    with pytest.raises(OptionError, match=r"include is .*; expected a name or pattern"):
        checkpoint.state(include=pattern)


def test_a_name_with_signs_of_patterns_means_itself(tmp_path: Path) -> None:
    state = {"a[b]": torch.ones(1), "a": {"*": torch.zeros(1), "c": torch.ones(2)}}
    holdfast.save(state, tmp_path / "a")
    checkpoint = holdfast.open(tmp_path / "a")
    for name in checkpoint:
        assert len(checkpoint.state(include=name)) >= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.complex64])
def test_a_tensor_is_converted_as_torch_does(
    checkpoint: holdfast.Checkpoint, dtype: torch.dtype
) -> None:
    found = checkpoint.tensor("model.w", dtype=dtype)
    assert found.dtype == dtype
    assert torch.equal(found, WEIGHT.to(dtype))
    part = checkpoint.tensor("model.w", ([1, 0], [1, 2]), dtype=dtype)
    assert torch.equal(part, WEIGHT[1:, :2].to(dtype))


def test_what_a_tensor_cannot_be_is_refused(checkpoint: holdfast.Checkpoint) -> None:
    assert checkpoint.tensor("odd.name", dtype=torch.complex64).dtype == torch.complex64
    with pytest.raises(MismatchError, match=r"odd.name is c64, which is not converted to f32"):
        checkpoint.tensor("odd.name", dtype=torch.float32)
    for dtype in ("f32", torch.quint8, 5):
        with pytest.raises(OptionError, match=r"dtype is .*; expected one such as"):
            checkpoint.tensor("model.w", dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cuda"])
def test_tensors_are_read_to_a_device(checkpoint: holdfast.Checkpoint, device: Any) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is none")
    kind = torch.device(device).type
    assert checkpoint.tensor("model.w", device=device).device.type == kind
    assert checkpoint.tensors(["model.b"], device=device)["model.b"].device.type == kind
    assert checkpoint.state(device=device)["layers"][1]["b"].device.type == kind


@pytest.mark.parametrize("device", ["nowhere", "cuda:77", 7.5, None, object()])
def test_what_is_no_device_here_is_refused(checkpoint: holdfast.Checkpoint, device: Any) -> None:
    if device is None:
        assert checkpoint.tensor("model.w", device=device).device.type == "cpu"
        return
    with pytest.raises(OptionError, match=r"device is .*, where no tensor can be made"):
        checkpoint.tensor("model.w", device=device)


def test_an_open_checkpoint_is_no_state(checkpoint: holdfast.Checkpoint, tmp_path: Path) -> None:
    for state in (checkpoint, {"all": checkpoint}):
        with pytest.raises(StateError, match="is an open checkpoint; give what state"):
            holdfast.save(state, tmp_path / "b")
        with pytest.raises(HoldfastError, match="is an open checkpoint; give what state"):
            holdfast.load(checkpoint.location, into=state)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda opened: pickle.loads(pickle.dumps(opened))]
)
def test_a_checkpoint_is_copied_and_sent_to_other_processes(
    checkpoint: holdfast.Checkpoint, again: Callable[[Any], Any]
) -> None:
    other = again(checkpoint)
    assert (other.save_id, [*other]) == (checkpoint.save_id, [*checkpoint])
    assert torch.equal(other["model.w"], WEIGHT)


def test_what_stands_there_when_it_arrives_is_what_was_sent(
    checkpoint: holdfast.Checkpoint,
) -> None:
    sent = pickle.dumps(checkpoint)
    holdfast.save({"w": WEIGHT}, checkpoint.location, replace=True)
    with pytest.raises(ReplacedError, match=r"holds the save \w{8} now; expected"):
        pickle.loads(sent)
