"""Changes between the call of a lazy save and its copy that torch does not count: samples tell."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateError
from holdfast.testing.faults import faulty

from .test_save_async import SLOW, copies_held_back, snapshot

State = dict[str, Any]


def training() -> State:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.Flatten(), nn.Linear(64, 300), nn.Linear(300, 9))
    model[0].to(memory_format=torch.channels_last)  # of no row-major order
    model[3].to(torch.bfloat16)
    with torch.no_grad():
        model[2].weight[5] = torch.nan
        model[2].weight[6] = -0.0
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not model[0].weight.is_contiguous()
    return {"model": model, "optimizer": optimizer}


def clamps(state: State) -> None:
    state["model"][2].weight.data.clamp_(-0.01, 0.01)


def writes_by_numpy(state: State) -> None:
    state["model"][2].weight.detach().numpy()[:] = 1.0


def writes_rows_by_numpy(state: State) -> None:
    state["model"][2].weight.detach().numpy()[100:200] = 1.0


def writes_a_bias_by_numpy(state: State) -> None:
    state["model"][2].bias.detach().numpy()[17] = 1.0


def changes_a_moment(state: State) -> None:
    weight = state["model"][2].weight
    state["optimizer"].state[weight]["exp_avg"].data.mul_(0.5)


def changes_what_is_not_contiguous(state: State) -> None:
    state["model"][0].weight.data.add_(1)


def changes_small_floats(state: State) -> None:
    state["model"][3].weight.data.add_(1)


def frees_and_takes_again(state: State) -> None:
    memory = state["model"][2].weight.untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)
    memory.resize_(size)
    state["model"][2].weight.data.fill_(5)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (clamps, r"model\.2\.weight"),
        (writes_by_numpy, r"model\.2\.weight"),
        (writes_rows_by_numpy, r"model\.2\.weight"),
        (writes_a_bias_by_numpy, r"model\.2\.bias"),
        (changes_a_moment, r"optimizer\.state\.2\.weight\.exp_avg"),
        (changes_what_is_not_contiguous, r"model\.0\.weight"),
        (changes_small_floats, r"model\.3\.weight"),
        (frees_and_takes_again, r"model\.2\.weight"),
    ],
)
def test_a_change_that_torch_does_not_count_fails_the_save(
    tmp_path: Path, change: Callable[[State], None], name: str
) -> None:
    state = training()
    before = [tensor._version for tensor in state["model"].state_dict().values()]
    with copies_held_back() as release:
        handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
        change(state)
        assert before == [tensor._version for tensor in state["model"].state_dict().values()]
        release.set()
        with pytest.raises(StateError, match=f"{name} was changed before it was copied"):
            handle.wait_staged()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("steps", [True, False])
def test_after_a_step_or_after_waiting_anything_may_change_uncounted(
    tmp_path: Path, steps: bool
) -> None:
    state = training()
    expected = snapshot(state["model"])
    with faulty(SLOW):
        handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
        if steps:
            state["optimizer"].step()
        else:
            handle.wait_staged()
        assert not handle.done()
        for change in (clamps, writes_by_numpy, changes_a_moment, changes_small_floats):
            change(state)
        handle.result()
    saved = training()
    holdfast.load(tmp_path / "a", into=saved)
    for name, found in snapshot(saved["model"]).items():
        assert torch.equal(found.nan_to_num(7), expected[name].nan_to_num(7))


def test_what_nobody_changed_is_never_refused(tmp_path: Path) -> None:
    """NaNs, ties, views that overlap, any strides, other widths, elements in several chunks."""
    memory = torch.randn(90_000)
    memory[::7] = torch.nan
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
    weights = {
        "first": memory[:60_000],
        "second": memory[30_000:],
        "turned": memory.view(300, 300).t(),
        "part": memory.view(300, 300)[3:90, 7:205],
        "third": memory[::3],
        "point": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "row": torch.randn(1, 4097, 1),
        **{str(kind)[6:]: torch.randn(5_003, dtype=kind) for kind in kinds},
    }
    parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
    parameters["tied"] = parameters["turned"]
    optimizer = torch.optim.SGD(set(parameters.values()), lr=0.1)
    state = {"parameters": parameters, "optimizer": optimizer}
    options = holdfast.Options(chunk_elements=1_001)
    for number in range(10):
        path = tmp_path / str(number)
        holdfast.save_async(state, path, stage="lazy", options=options).result()
    with holdfast.open(path) as checkpoint:
        for name, weight in weights.items():
            found = checkpoint.tensor(f"parameters.{name}")
            assert torch.equal(found.nan_to_num(7), weight.nan_to_num(7))
