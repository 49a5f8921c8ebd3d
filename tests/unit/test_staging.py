"""Copies under way when staging fails: nothing writes into the memory afterwards."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from holdfast.engine import staging
from holdfast.engine.device_copies import DeviceCopies
from holdfast.engine.origin import LiveTensors
from holdfast.engine.staging import LazyCopies, StagingPlan, copy_now
from holdfast.layout import Box, Shard, Tensor
from holdfast.plan.shard_table import table_of
from holdfast.state.tensors import LocalTensor

BYTES = 64
DEVICES = {"a": "meta", "b": "cpu"}  # "meta" stands for a device


def held() -> StagingPlan:
    """Hold 16 floats on a device, and as many in host memory."""
    tensors = [Tensor((name,), "f32", (16,)) for name in DEVICES]
    box = Box((0,), (16,))
    values = [torch.ones(16, device=kind) for kind in DEVICES.values()]
    leaves = {
        tensor.path: LocalTensor(tensor, value, ((value, box),), None, plain=True)
        for tensor, value in zip(tensors, values, strict=True)
    }
    shards = table_of([Shard(tensor, box) for tensor in tensors], tensors)
    memory = torch.empty(2 * BYTES, dtype=torch.uint8)
    offsets = np.array([0, BYTES], np.uint64)
    return StagingPlan(LiveTensors(shards, leaves, 16), offsets, memory, np.arange(2))


def fails(*_: Any, **__: Any) -> None:
    raise MemoryError("no more")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return what counts how often copies from devices are waited for."""
    found: list[int] = []
    monkeypatch.setattr(DeviceCopies, "wait", lambda self: found.append(1))
    return found


@pytest.mark.parametrize("where", [(staging, "copy_from_host"), (StagingPlan, "gather")])
def test_when_the_first_copies_fail_those_from_devices_have_ended(
    where: tuple[object, str], waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagingPlan, "gather", lambda *_, **__: None)
    monkeypatch.setattr(*where, fails)
    with pytest.raises(MemoryError):
        copy_now(held())
    assert waits


def test_when_a_later_copy_fails_those_from_devices_have_ended(
    waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagingPlan, "gather", lambda *_, **__: None)
    copies = LazyCopies(held())
    waits.clear()
    monkeypatch.setattr(staging, "copy_held", fails)
    with pytest.raises(MemoryError):
        copies.finish(cast(Any, None), cast(Any, None))
    assert waits
