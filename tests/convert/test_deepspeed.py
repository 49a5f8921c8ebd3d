"""Checkpoints of DeepSpeed as sources, from files that it has written (make_deepspeed.py).

What is read of ranks' partitions is compared with what DeepSpeed's own converter made of them.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.convert.kinds import open_source
from holdfast.convert.zero_parts import RankState, stretches_of_groups
from holdfast.errors import CorruptError, OptionError

from .make_deepspeed import CASES, TAG, Net
from .test_torch_file import all_of
from .unpacked import unpacked

NewPath = Callable[[], Path]
PARAMETERS = [name for name, p in Net().named_parameters() if p.requires_grad]
FROZEN = ["frozen.weight", "frozen.bias"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("deepspeed", tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture
def case(written: Path, new_path: NewPath) -> Callable[[str], Path]:
    """A copy of one checkpoint, which may be changed."""

    def copied(name: str) -> Path:
        target = new_path()
        shutil.copytree(written / name, target)
        return target

    return copied


def by_deepspeed(directory: Path) -> dict[Any, torch.Tensor]:
    """What its converter has written of each parameter, flat."""
    found = {}
    for file in (directory / f"{TAG}_universal" / "zero").glob("*/*.pt"):
        name, key = file.parent.name, file.stem
        value = torch.load(file, weights_only=True)
        tensor = value["param"] if isinstance(value, dict) else value
        path = ("module", name) if key == "fp32" else ("optimizer", "state", name, key)
        found[path] = tensor.reshape(-1)
    return found


@pytest.mark.parametrize("name", CASES)
def test_partitions_of_all_ranks_are_whole_tensors(written: Path, name: str) -> None:
    expected = by_deepspeed(written / name)
    shapes = {path: p.shape for path, p in Net().state_dict().items()}
    with open_source(written / name / TAG) as source:
        assert source.kind == "deepspeed" and source.advice == ()
        found = all_of(source)
        assert expected.keys() <= found.keys()
        for path, tensor in expected.items():
            assert torch.equal(found[path].reshape(-1), tensor), path
        for parameter, shape in shapes.items():
            assert found["module", parameter].shape == shape
        for parameter in PARAMETERS:
            assert found["module", parameter].dtype == torch.float32
            assert found["optimizer", "state", parameter, "exp_avg"].shape == shapes[parameter]
            assert found["optimizer", "state", parameter, "step"].item() == 2
            options = source.values["optimizer", "param_groups", parameter]
            assert options["weight_decay"] == (0.1 if "weight" in parameter[-6:] else 0.0) or (
                parameter == "b.weight"
            )
        assert source.values["note",] == "x" and source.values["global_steps",] == 2


def test_frozen_weights_and_buffers_are_those_of_the_model(written: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    for name, (_, in_bf16, *_) in CASES.items():
        with open_source(written / name / TAG) as source:
            found = all_of(source)
        for parameter in FROZEN:
            expected = net.state_dict()[parameter]
            expected = expected.bfloat16() if in_bf16 else expected
            assert torch.equal(found["module", parameter], expected), name
        assert found["module", "count"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", CASES)
def test_a_universal_checkpoint_is_read_through_its_latest(written: Path, name: str) -> None:
    assert (written / name / "latest_universal").read_text() == f"{TAG}_universal"
    with open_source(written / name / TAG) as parts, open_source(written / name) as whole:
        ours, theirs = all_of(parts), all_of(whole)
        lost = {path for path in ours.keys() - theirs.keys() if path[-1] != "step"}
        assert not lost and not theirs.keys() - ours.keys()
        for path, tensor in theirs.items():
            assert torch.equal(tensor, ours[path]), path
        assert parts.values == whole.values


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_with_plain_torch(written: Path, name: str, new_path: NewPath) -> None:
    ours = new_path()
    holdfast.import_checkpoint(written / name / TAG, ours)
    net = Net()
    optimizer = torch.optim.AdamW(net.groups(), lr=1.0)
    holdfast.load(ours, into={"module": net, "optimizer": optimizer}, partial=True, cast=True)
    expected = by_deepspeed(written / name)
    assert optimizer.param_groups[0]["lr"] == 0.01
    for parameter, tensor in net.named_parameters():
        if tensor.requires_grad:
            assert torch.equal(tensor.detach().reshape(-1), expected["module", parameter])
            state = optimizer.state[tensor]["exp_avg"].reshape(-1)
            assert torch.equal(state, expected["optimizer", "state", parameter, "exp_avg"])
    net(torch.randint(0, 7, (2, 4))).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_of_a_rank_that_is_missing_is_named(case: Any, name: str, rank: int) -> None:
    directory = case(name) / TAG
    (lost,) = directory.glob(f"*zero_pp_rank_{rank}_*_optim_states.pt")
    lost.unlink()
    with pytest.raises(CorruptError, match=r"ranks; found|_optim_states\.pt is missing|1 of optim"):
        open_source(directory)


def test_the_last_file_of_a_model_that_is_missing_is_noticed(case: Any) -> None:
    directory = case("stage-3-parts") / TAG
    (directory / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptError, match="2 files of models and 3 of optimizers"):
        open_source(directory)
    for file in directory.glob("*_model_states.pt"):
        file.unlink()
    with pytest.raises(CorruptError, match="has no file"):
        open_source(directory, "deepspeed")


@pytest.mark.parametrize("name", ["stage-1", "stage-2", "stage-3"])
def test_a_file_of_another_rank_is_noticed(case: Any, name: str) -> None:
    directory = case(name) / TAG
    first, second = (next(directory.glob(f"*zero_pp_rank_{n}_*_optim_states.pt")) for n in (0, 1))
    shutil.copy(first, second)
    if name == "stage-3":  # whose ranks have equal parts, and note nothing
        open_source(directory).close()
        return
    with pytest.raises(CorruptError, match="Use files of one save"):
        open_source(directory)


def test_files_of_different_saves_are_noticed(case: Any) -> None:
    ours, other = case("stage-3") / TAG, case("stage-3-parts") / TAG
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / name, ours / f"bf16_{name}")
    with pytest.raises(CorruptError, match="saved by 3 ranks; found 2"):
        open_source(ours)


def test_a_latest_that_leads_elsewhere_is_refused(case: Any) -> None:
    directory = case("stage-1")
    for text in ("../x", "/etc", "", "..", "nothing", "\0", "x" * 5000):
        (directory / "latest_universal").write_text(text)
        with pytest.raises(CorruptError, match="latest_universal names"):
            open_source(directory)


def test_other_parallelism_is_refused_by_name(case: Any) -> None:
    directory = case("stage-1") / TAG
    model = directory / "mp_rank_00_model_states.pt"
    shutil.copy(model, directory / "mp_rank_01_model_states.pt")
    with pytest.raises(OptionError, match="tensor parallelism"):
        open_source(directory)
    (directory / "mp_rank_01_model_states.pt").rename(directory / "layer_00-model_states.pt")
    with pytest.raises(OptionError, match="pipeline"):
        open_source(directory)


def test_a_universal_parameter_that_is_missing_or_of_another_shape_is_named(case: Any) -> None:
    directory = case("stage-2") / f"{TAG}_universal"
    file = directory / "zero" / "a.weight" / "fp32.pt"
    torch.save({"param": torch.ones(44)}, file)
    with pytest.raises(CorruptError, match=r"\[44\]; expected \[9, 5\]"):
        open_source(directory)
    torch.save({"param": "x"}, file)
    with pytest.raises(CorruptError, match="holds no tensor"):
        open_source(directory)
    file.unlink()
    with pytest.raises(CorruptError, match=r"fp32\.pt is missing"):
        open_source(directory)


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "has no param_shapes": lambda root: root.update(param_shapes=3),
    "gives shapes in an unknown way": lambda root: root.update(param_shapes=[3]),
    "has no buffer_names": lambda root: root.pop("buffer_names"),
    "has no tensor": lambda root: root.update(buffer_names=["nothing"]),
    "has no module": lambda root: root.update(module=[]),
    "gives shapes": lambda root: root.update(frozen_param_shapes={"frozen.bias": 3}),
    "has no frozen": lambda root: root.update(frozen_param_fragments={}),
    "Use files of one save": lambda root: root["param_shapes"][0].update({"a.weight": (9, 6)}),
    "groups; expected 3": lambda root: root["param_shapes"].append({}),
}


@pytest.mark.parametrize("text", LIES)
def test_a_lie_in_the_file_of_the_model_is_a_typed_error(case: Any, text: str) -> None:
    directory = case("stage-2") / TAG
    file = directory / "mp_rank_00_model_states.pt"
    root = torch.load(file, weights_only=False)
    LIES[text](root)
    torch.save(root, file)
    with pytest.raises(CorruptError, match=text):
        open_source(directory)


def test_elements_that_two_parameters_share_are_noticed() -> None:
    archive: Any = SimpleNamespace(where="rank_0.pt")
    slices: list[Any] = [{"a": (0, 4), "b": (4, 2), "empty": (3, 0)}]
    groups = [{"a": (4,), "b": (2,), "empty": (0,)}]
    apart = RankState(archive, [], [], slices)
    assert stretches_of_groups([apart], groups)["b"] == [(0, 0, 4, 2)]
    slices[0]["b"] = (3, 2)
    with pytest.raises(CorruptError, match=r"rank_0\.pt gives the elements from 3 .* a and to b"):
        stretches_of_groups([apart], groups)


def test_what_was_saved_without_zero_is_the_state_of_plain_torch(new_path: NewPath) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.groups(), lr=0.5)
    net(torch.randint(0, 7, (2, 4))).sum().backward()
    optimizer.step()
    directory = new_path()
    directory.mkdir()
    root = {
        "module": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "buffer_names": ["count"],
        "param_shapes": None,
        "global_steps": 1,
    }
    torch.save(root, directory / "mp_rank_00_model_states.pt")
    with open_source(directory, "deepspeed") as source:
        found = all_of(source)
        assert source.values["global_steps",] == 1
    for name, tensor in net.state_dict().items():
        assert torch.equal(found["module", name], tensor)
    moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    assert moments
    for number, tensor in enumerate(moments):
        assert torch.equal(found["optimizer", "state", number, "exp_avg"], tensor)
    shutil.copy(
        directory / "mp_rank_00_model_states.pt",
        directory / "zero_pp_rank_1_mp_rank_00_model_states.pt",
    )
    with pytest.raises(CorruptError, match="has no files \\*_optim_states"):
        open_source(directory, "deepspeed")


def test_the_elastic_form_is_refused_by_name(case: Any, new_path: NewPath) -> None:
    directory = new_path()
    directory.mkdir()
    shutil.copy(case("stage-1") / TAG / "mp_rank_00_model_states.pt", directory)
    root = {
        "partition_count": 1,
        "single_partition_of_fp32_groups": [torch.ones(4)],
        "base_optimizer_state": [{"exp_avg": torch.ones(4)}],
    }
    file = directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": root}, file)
    with pytest.raises(OptionError, match="elastic form"):
        open_source(directory)
