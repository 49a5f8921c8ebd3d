"""Real ranks write equal shares of one state, and any other ranks load it back, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast

from .ranks import run_ranks

WIDTH, WIDE = 96, 402  # 402 rows are even over two ranks, uneven over three and four
EVEN = 1.05  # the largest share, of the mean
PARALLEL = {
    "up": ColwiseParallel(output_layouts=Replicate()),
    "down": RowwiseParallel(input_layouts=Replicate()),
}

Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two layers, a norm, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Linear(WIDTH, WIDE, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE, WIDTH)
        self.head = nn.Linear(WIDTH, WIDE, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(batch) + self.up(self.norm(batch))
        logits: torch.Tensor = self.head(self.down(torch.relu(hidden)))
        return logits


def alone(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def hsdp(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Two replicas of two parts; norm, embedding and a bias are on all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return parallelize_module(model, mesh["tp"], PARALLEL)


def sharded_tensor_parallel(model: nn.Module) -> nn.Module:
    """FSDP2 over tensor parallel: norm and embedding are on two ranks each, in halves."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    fully_shard(parallelize_module(model, mesh["tp"], PARALLEL), mesh=mesh["dp"])
    return model


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": alone,
    "DDP": ddp,
    "FSDP2": fsdp,
    "HSDP": hsdp,
    "DP x TP": tensor_parallel,
    "FSDP2 x TP": sharded_tensor_parallel,
}


def state_of(layout: str) -> dict[str, Any]:
    model = LAYOUTS[layout](Net())
    # One by one: a list of DTensors of several meshes cannot be stepped at once.
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), foreach=False)}


def numbered(layout: str) -> Tensors:
    """Each parameter as this rank has it, of a net whose elements are their own numbers."""
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    model = LAYOUTS[layout](model)
    return dict(getattr(model, "module", model).state_dict())


def dense(value: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, cut as `numbers` is: `full_tensor` of torch 2.9 mixes up its rows."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    assert isinstance(numbers, DTensor) and value.placements == numbers.placements
    mine = (numbers.to_local().flatten().long(), value.detach().to_local().flatten())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    whole = torch.full((value.numel(),), torch.nan)
    for places, elements in parts:
        whole[places] = elements
    return whole.view(value.shape)


def tensors_of(state: dict[str, Any], layout: str) -> Tensors:
    """The whole tensors, by their names in the checkpoint."""
    model, numbers = getattr(state["model"], "module", state["model"]), numbered(layout)
    found = {
        f"model.{name}": dense(value, numbers[name]) for name, value in model.state_dict().items()
    }
    for name, parameter in model.named_parameters():
        for key, value in state["optimizer"].state[parameter].items():
            found[f"optimizer.state.{name}.{key}"] = dense(value, numbers[name])
    return found


def save_trained(rank: int, path: str, layout: str) -> Tensors:
    state = state_of(layout)
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        state["model"](batch).square().mean().backward()
        state["optimizer"].step()
    holdfast.save(state, path)
    return tensors_of(state, layout)


def load(rank: int, path: str, layout: str) -> Tensors:
    state = state_of(layout)
    report = holdfast.load(path, into=state)
    assert (report.missing, report.unexpected) == ((), ())
    return tensors_of(state, layout)


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def bytes_by_rank(checkpoint: holdfast.Checkpoint) -> dict[int, int]:
    found: dict[int, int] = {}
    for name, size in zip(checkpoint.file_names, checkpoint.file_bytes, strict=True):
        rank = int(Path(name).name.partition("-")[0])
        found[rank] = found.get(rank, 0) + size
    return found


# Who wrote on four ranks, and who else loads it, on how many.
READERS = {
    "DDP": (3, "FSDP2"),
    "FSDP2": (2, "DDP"),
    "HSDP": (3, "FSDP2"),
    "DP x TP": (2, "DDP"),
    "FSDP2 x TP": (4, "HSDP"),
}


@pytest.mark.parametrize("layout", READERS)
def test_every_rank_writes_an_equal_share_that_any_ranks_load(tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "c")
    expected = run_ranks(4, save_trained, path, layout)[0]
    with holdfast.open(path) as checkpoint:
        sizes = bytes_by_rank(checkpoint)
        assert sorted(sizes) == [0, 1, 2, 3]
        assert max(sizes.values()) <= EVEN * sum(sizes.values()) / 4, sizes
        assert checkpoint.verify() == []
        assert same({name: checkpoint.tensor(name) for name in checkpoint.names()}, expected)
        assert checkpoint.info("model.head.weight").tied_to == "model.embedding.weight"
    assert same(load(0, path, "alone"), expected)
    world_size, other = READERS[layout]
    for found in run_ranks(world_size, load, path, other):
        assert same(found, expected)


def save_untrained(rank: int, path: str, layout: str) -> None:
    holdfast.save({"model": LAYOUTS[layout](Net())}, path)


@pytest.mark.parametrize("layout", READERS)
def test_a_net_is_stored_as_it_was_before_it_was_cut(tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "c")
    run_ranks(4, save_untrained, path, layout)
    expected = {f"model.{name}": value for name, value in Net().state_dict().items()}
    with holdfast.open(path) as checkpoint:
        assert same({name: checkpoint.tensor(name) for name in checkpoint.names()}, expected)


def save_on_two_hosts(rank: int, path: str, writers: str | int) -> None:
    torch.manual_seed(0)
    mine = holdfast.Options(writers=writers if rank == 0 else "rank")  # the coordinator's counts
    with patch("holdfast.saving.agreement.socket.gethostname", lambda: f"host{rank // 2}"):
        holdfast.save(
            {"w": torch.randn(1000, 100), f"of {rank}": torch.ones(3)}, path, options=mine
        )


@pytest.mark.parametrize(
    ("writers", "expected"), [("rank", [0, 1, 2, 3]), ("node", [0, 2]), (1, [0]), (3, [0, 1, 2])]
)
def test_fewer_writers_share_what_all_hold(
    tmp_path: Path, writers: str | int, expected: list[int]
) -> None:
    path = tmp_path / "c"
    run_ranks(4, save_on_two_hosts, str(path), writers)
    with holdfast.open(path) as checkpoint:
        sizes = bytes_by_rank(checkpoint)
        assert sorted(sizes) == [0, 1, 2, 3], "each writes what it alone holds"
        assert [rank for rank, size in sorted(sizes.items()) if size > 10_000] == expected
        assert max(sizes.values()) <= EVEN * 400_000 / len(expected)
        assert checkpoint.verify() == []
        torch.manual_seed(0)
        assert torch.equal(checkpoint.tensor("w"), torch.randn(1000, 100))
