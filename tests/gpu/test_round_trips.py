"""Every dtype, layout, codec and way to save, from a device and back to it, bit for bit."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.state.tensors import DTYPE_NAMES

from .gpu import DEVICE, needs_device, same

pytestmark = needs_device
WAYS = ("save", "eager", "lazy")


def save(state: Mapping[str, Any], path: Path, way: str, codec: str = "raw") -> None:
    if way == "save":
        holdfast.save(state, path, codec=codec)
    else:
        holdfast.save_async(state, path, stage=way, codec=codec).result()  # type: ignore[arg-type]


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random bits, NaNs with all payloads among them."""
    return _of_bytes(dtype, shape, 2 if dtype is torch.bool else 256, DEVICE)


def _of_bytes(dtype: torch.dtype, shape: Sequence[int], end: int, device: str) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, end, (count,), dtype=torch.uint8, device=device).view(dtype).view(shape)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    whole = bits(dtype, 37, 64)
    return {
        "plain": whole,
        "vector": bits(dtype, 100_003),
        "none": bits(dtype, 0, 8),
        "turned": bits(dtype, 33, 48).t(),
        "part": bits(dtype, 64, 64)[3:50, 5:9],
        "steps": bits(dtype, 64, 64)[::2, ::3],
        "scalar": bits(dtype, 1)[0],
    }


def zeros_like(state: Mapping[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {name: _of_bytes(t.dtype, t.shape, 1, device) for name, t in state.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
def test_every_dtype_comes_back(dtype: torch.dtype, way: str, tmp_path: Path) -> None:
    state = layouts(dtype)
    save(state, tmp_path / "a", way)
    for device in dict.fromkeys((DEVICE, "cpu")):
        target = zeros_like(state, device)
        holdfast.load(tmp_path / "a", into=target)
        differing = [name for name, value in state.items() if not same(target[name], value)]
        assert differing == [], device


@pytest.mark.parametrize("codec", ["lossless", "delta", "compact:high"])
@pytest.mark.parametrize("way", WAYS)
def test_encoded_checkpoints_come_back(codec: str, way: str, tmp_path: Path) -> None:
    state = {f"x{n}": torch.randn(300, 700, device=DEVICE) for n in range(12)}
    save(state, tmp_path / "step-00000001", way, codec)  # the first is exact under every codec
    target = zeros_like(state, DEVICE)
    holdfast.load(tmp_path / "step-00000001", into=target)
    assert all(same(target[name], value) for name, value in state.items())
    if codec == "delta":
        moved = {name: value * 1.001 for name, value in state.items()}
        save(moved, tmp_path / "step-00000002", way, codec)
        holdfast.load(tmp_path / "step-00000002", into=target)
        assert all(same(target[name], value) for name, value in moved.items())


@pytest.mark.parametrize("way", WAYS)
def test_views_of_other_values_come_back(way: str, tmp_path: Path) -> None:
    values = torch.randn(50, 60, dtype=torch.complex64, device=DEVICE)
    state = {
        "conj": values.conj(),
        "turned": values.t().conj(),
        "imag": values.conj().imag,
        "real": values.real,
    }
    save(state, tmp_path / "a", way)
    target = {
        name: torch.zeros(value.shape, dtype=value.dtype, device=DEVICE)
        for name, value in state.items()
    }
    holdfast.load(tmp_path / "a", into=target)
    assert [name for name, value in state.items() if not same(target[name], value)] == []
    views = {"conj": torch.zeros(50, 60, dtype=torch.complex64, device=DEVICE).conj()}
    views["turned"] = torch.zeros(50, 60, dtype=torch.complex64, device=DEVICE).t().conj()
    views["imag"] = torch.zeros(50, 60, dtype=torch.complex64, device=DEVICE).conj().imag
    holdfast.load(tmp_path / "a", into={**target, **views})
    assert [name for name, value in views.items() if not same(value, state[name])] == []


def test_a_load_fills_targets_in_any_strides(tmp_path: Path) -> None:
    state = {"a": torch.randn(700, 900, device=DEVICE), "b": torch.randn(30, 40, device=DEVICE)}
    holdfast.save(state, tmp_path / "a")
    target = {
        "a": torch.zeros(900, 700, device=DEVICE).t(),
        "b": torch.zeros(60, 80, device=DEVICE)[::2, ::2],
    }
    holdfast.load(tmp_path / "a", into=target)
    assert all(same(target[name], value) for name, value in state.items())


def test_a_load_converts_on_the_way(tmp_path: Path) -> None:
    state = {"a": torch.randn(700, 900, device=DEVICE)}
    holdfast.save(state, tmp_path / "a")
    target = {"a": torch.zeros(700, 900, dtype=torch.bfloat16, device=DEVICE)}
    holdfast.load(tmp_path / "a", into=target, cast=True)
    assert same(target["a"], state["a"].bfloat16())


def many_chunks() -> dict[str, torch.Tensor]:
    """Return tensors larger than a chunk (16 MiB), and of rows that no chunk ends with."""
    return {
        "f32": torch.randn(5001, 3003, device=DEVICE),
        "bf16": torch.randn(5001, 3003, device=DEVICE).bfloat16(),
        "turned": torch.randn(3003, 5001, device=DEVICE).t(),
    }


def many_tensors() -> dict[str, torch.Tensor]:
    return {f"x{n}": torch.randn(n % 97, device=DEVICE) for n in range(3000)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [many_chunks, many_tensors])
def test_large_and_many_tensors_come_back(
    make: Callable[[], dict[str, torch.Tensor]], way: str, tmp_path: Path
) -> None:
    state = make()
    save(state, tmp_path / "a", way)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    holdfast.load(tmp_path / "a", into=target)
    assert all(same(target[name], value) for name, value in state.items())


def test_a_model_on_no_device_is_made_on_this_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 400, device=DEVICE)
    holdfast.save({"model": model}, tmp_path / "a")
    other = torch.nn.Linear(300, 400, device="meta")
    holdfast.load(tmp_path / "a", into={"model": other}, assign=DEVICE)
    assert other.weight.device.type == DEVICE and same(other.weight, model.weight)
    assert same(other.bias, model.bias)


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 400)  # in host memory
    torch.set_default_device(DEVICE)
    try:
        here = torch.nn.Linear(200, 100)
        state = {"model": model, "here": here}
        for way in WAYS:
            save(state, tmp_path / way, way, "lossless" if way == "eager" else "raw")
            with holdfast.open(tmp_path / way) as checkpoint:
                assert checkpoint.verify() == []
                assert same(checkpoint.tensor("here.weight"), here.weight)
            before = here.weight.detach().clone()
            with torch.no_grad():
                here.weight.zero_()
            holdfast.load(tmp_path / way, into=state)
            assert same(here.weight, before) and model.weight.device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_the_random_state_of_the_device_comes_back(tmp_path: Path) -> None:
    random = holdfast.RandomState()
    torch.randn(10, device=DEVICE)
    holdfast.save({"random": random}, tmp_path / "a")
    first = torch.randn(100, device=DEVICE)
    torch.randn(50, device=DEVICE)
    holdfast.load(tmp_path / "a", into={"random": random})
    assert same(torch.randn(100, device=DEVICE), first)
