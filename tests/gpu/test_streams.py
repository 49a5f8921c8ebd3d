"""Saves and loads beside work that a device has not done yet: the stream of the caller counts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateError

from .gpu import DEVICE, busy, needs_cuda, needs_device, new_stream, same

pytestmark = needs_device
CODECS = ("raw", "lossless", "compact:high")


def training() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer, {"model": model, "optimizer": optimizer}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(64, 512, device=DEVICE)).square().mean().backward()
    optimizer.step()


def exact(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    found = {f"model.{name}": value.detach().clone() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer.state.{name}.{key}"] = optimizer.state[parameter][key].clone()
    return found


def differing(path: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    with holdfast.open(path) as checkpoint:
        assert checkpoint.verify() == []
        return [
            name for name, value in expected.items() if not same(checkpoint.tensor(name), value)
        ]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("way", ["save", "eager", "lazy"])
def test_what_the_stream_is_still_computing_is_waited_for(
    way: str, codec: str, tmp_path: Path
) -> None:
    values = torch.zeros(1 << 20, device=DEVICE)
    state = {f"x{n}": values.clone() for n in range(8)}
    with new_stream():
        busy()
        for n, tensor in enumerate(state.values()):
            tensor.fill_(n + 1)
        if way == "save":
            holdfast.save(state, tmp_path / "a", codec=codec)
        else:
            holdfast.save_async(state, tmp_path / "a", stage=way, codec=codec).result()  # type: ignore[arg-type]
    with holdfast.open(tmp_path / "a") as checkpoint:
        for n in range(8):
            assert bool((checkpoint.tensor(f"x{n}") == n + 1).all()), n


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_load_comes_after_what_the_stream_still_reads(codec: str, tmp_path: Path) -> None:
    holdfast.save({"x": torch.ones(1 << 22, device=DEVICE)}, tmp_path / "a", codec=codec)
    target = torch.full((1 << 22,), 5.0, device=DEVICE)
    with new_stream():
        busy()
        before = target * 2
        holdfast.load(tmp_path / "a", into={"x": target})
        after = target * 2
        assert bool((before == 10).all()), "the load overtook a kernel that reads its target"
        assert bool((after == 2).all())


def test_an_eager_copy_is_done_when_the_call_returns(tmp_path: Path) -> None:
    _, _, state = training()
    expected = exact(state)
    with new_stream():
        handle = holdfast.save_async(state, tmp_path / "a")
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.zero_()
        handle.result()
    assert differing(tmp_path / "a", expected) == []


@pytest.mark.parametrize("codec", CODECS[:2])
def test_a_lazy_copy_is_of_the_call_though_steps_follow(codec: str, tmp_path: Path) -> None:
    model, optimizer, state = training()
    for trial in range(20):
        expected = exact(state)
        with new_stream():
            handle = holdfast.save_async(state, tmp_path / str(trial), stage="lazy", codec=codec)
            for _ in range(3):
                step(model, optimizer)
            handle.result()
        assert differing(tmp_path / str(trial), expected) == []
        torch.cuda.synchronize() if DEVICE == "cuda" else None


def test_a_lazy_save_sees_a_counted_change(tmp_path: Path) -> None:
    model, _, state = training()
    busy()
    handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(StateError, match=r"wait_staged"):
        handle.result()


@needs_cuda
def test_a_lazy_copy_overlaps_with_the_computation(tmp_path: Path) -> None:
    """The call comes back while the stream is still busy with what came before it."""
    _, _, state = training()
    holdfast.save_async(state, tmp_path / "first", stage="lazy").result()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    busy()
    done.record()
    handle = holdfast.save_async(state, tmp_path / "a", stage="lazy")
    came_back_first = not done.query()
    handle.result()
    assert came_back_first


@needs_cuda
def test_tensors_of_several_streams(tmp_path: Path) -> None:
    """Each made on a stream of its own; the caller's stream waits for them, as torch asks."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    state = {}
    for n, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            busy()
            state[f"x{n}"] = torch.full((1 << 20,), float(n), device=DEVICE)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    holdfast.save_async(state, tmp_path / "a").result()
    with holdfast.open(tmp_path / "a") as checkpoint:
        for n in range(4):
            assert bool((checkpoint.tensor(f"x{n}") == n).all())
