"""Copies under way when staging fails: nothing writes into the memory afterwards."""

from typing import Any

import pytest
import torch

from holdfast.engine import stage
from holdfast.engine.stage import DeviceCopies, Held, Staging
from holdfast.layout import Box, Shard, Tensor, chunks_of

BYTES = 64


def held(name: str, device: str) -> Held:
    """Hold 16 floats; "meta" stands for a device."""
    tensor = Tensor((name,), "f32", (16,))
    shard = Shard(tensor, Box((0,), (16,)))
    elements = torch.ones(16, device=device)
    return Held(shard, elements, tuple(chunks_of(shard, 16)), (0,), elements._version, BYTES)


def fails(*_: Any, **__: Any) -> None:
    raise MemoryError("no more")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return what counts how often copies from devices are waited for."""
    found: list[int] = []
    monkeypatch.setattr(DeviceCopies, "wait", lambda self: found.append(1))
    return found


@pytest.mark.parametrize("where", ["copy_from_host", "_copy_chunks"])
def test_when_the_first_copies_fail_those_from_devices_have_ended(
    where: str, waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_copy_chunks", lambda *_, **__: None)
    monkeypatch.setattr(stage, where, fails)
    with pytest.raises(MemoryError):
        Staging([held("a", "meta"), held("b", "cpu")], set(), torch.empty(BYTES, dtype=torch.uint8))
    assert waits


def test_when_a_later_copy_fails_those_from_devices_have_ended(
    waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_copy_chunks", lambda *_, **__: None)
    items = [held("a", "meta"), held("b", "cpu")]
    copies = Staging(items, {("a",), ("b",)}, torch.empty(BYTES, dtype=torch.uint8))
    waits.clear()
    monkeypatch.setattr(stage, "copy_held", fails)
    with pytest.raises(MemoryError):
        copies.finish()
    assert waits
