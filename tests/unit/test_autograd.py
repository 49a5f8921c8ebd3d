"""A load is a change in place, and autograd is told of it: no backward uses what was replaced."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed._shard.sharded_tensor.api import Shard as TorchShard
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import holdfast
from holdfast.errors import CorruptError
from holdfast.integrations.dcp import HoldfastReader

NewPath = Callable[[], Path]
CHANGED = "modified (by an )?inplace"


def fails(loss: torch.Tensor) -> None:
    """Check that a backward is refused, and not computed from other numbers."""
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()  # type: ignore[no-untyped-call]


def targets() -> dict[str, Any]:
    strided = torch.ones(4, 6)
    return {
        "plain": torch.ones(6, 4),
        "parameter": nn.Parameter(torch.ones(6, 4)),
        "view": torch.ones(3, 6, 4)[1],
        "strided": strided.T,
        "converted": torch.ones(6, 4, dtype=torch.float64),
    }


@pytest.mark.parametrize("kind", targets())
def test_a_load_between_forward_and_backward_is_noticed(new_path: NewPath, kind: str) -> None:
    path, target = new_path(), targets()[kind]
    holdfast.save({"w": torch.full((6, 4), 3.0)}, path)
    if not target.requires_grad:
        target.requires_grad_()
    loss = (target * target).sum()
    holdfast.load(path, into={"w": target}, cast=True)
    fails(loss)
    (target * target).sum().backward()
    assert target.grad is not None and target.grad.flatten()[0] == 6


@pytest.mark.parametrize("kind", ["module", "restored", "model", "foreign", "dcp"])
def test_whatever_fills_a_module_is_noticed(new_path: NewPath, kind: str) -> None:
    path, model = new_path(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    if kind == "restored":
        with holdfast.Checkpointer(path) as checkpointer:
            checkpointer.save(1, state)
    elif kind == "foreign":
        path = path.with_suffix(".pt")
        torch.save({"model": model.state_dict()}, path)
    else:
        holdfast.save(state, path)
    loss = model(torch.ones(2, 3)).sum()
    if kind == "module":
        holdfast.load(path, into=state)
    elif kind == "restored":
        with holdfast.Checkpointer(path) as checkpointer:
            assert checkpointer.restore(state) == 1
    elif kind == "model":
        holdfast.load_model(path, model)
    elif kind == "foreign":
        holdfast.load(path, into={"model": model})
    else:
        dcp.load({"model": model.state_dict()}, storage_reader=HoldfastReader(path), no_dist=True)
    fails(loss)


def test_what_a_failed_load_has_filled_is_noticed(new_path: NewPath) -> None:
    path, first = new_path(), torch.ones(1 << 10, requires_grad=True)
    state = {"a": torch.full((1 << 10,), 3.0), "b": torch.full((8 << 20,), 5.0)}
    holdfast.save(state, path)
    (file,) = path.glob("data/*/*.hf")
    data = bytearray(file.read_bytes())
    at = len(data) // 2
    data[at] ^= 1
    file.write_bytes(data)
    loss = (first * first).sum()
    with pytest.raises(CorruptError):
        holdfast.load(path, into={"a": first, "b": torch.zeros(8 << 20)})
    assert first[0] == 3
    fails(loss)


def test_what_a_load_leaves_alone_is_no_change(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2)}, path)
    kept = [torch.ones(n, requires_grad=True) for n in (3, 4)]
    loss = sum((each * each).sum() for each in kept)
    into = {"c": torch.zeros(2), "a": kept[0], "b": kept[1]}
    holdfast.load(path, into=into, strict=False)  # these have other shapes
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(holdfast.errors.MismatchError):
        holdfast.load(path, into=into)
    assert [each._version for each in into.values()] == [1, 0, 0]


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """Have a process group and a mesh, of this process alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_load_into_parts_of_sharded_tensors_is_noticed(one_rank: Any, new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"new": torch.full((4, 2), 3.0), "old": torch.full((2, 3), 3.0)}, path)
    new = DTensor.from_local(torch.ones(4, 2), one_rank, [Replicate()], run_check=False)
    new.requires_grad_()
    part = torch.ones(2, 3, requires_grad=True)
    old = ShardedTensor._init_from_local_shards(
        [TorchShard.from_tensor_and_offsets(part, [0, 0], 0)], 2, 3
    )
    local = new.to_local()
    losses = (new * new).sum(), (part * part).sum(), (local * local).sum()
    holdfast.load(path, into={"new": new, "old": old}, group="alone")
    assert new.to_local()[0, 0] == part[0, 0] == 3
    for loss in losses:
        fails(loss)
