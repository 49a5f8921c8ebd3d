"""The drop-in for DCP on several ranks: FSDP2, TP, HSDP, as PyTorch's users write them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from holdfast.errors import AlreadyCommittedError, HoldfastError, PeerError, StateError
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter

from .ranks import run_ranks

LAYOUTS = ("one", "fsdp", "hsdp", "tp", "fsdp+tp")


class Net(nn.Module):
    """Uneven over two and four ranks, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5, 2.0, 2.5]))
        self.register_buffer("seen", torch.arange(5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(batch))) * self.scale.mean()


def laid_out(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    size = dist.get_world_size() if dist.is_initialized() else 1
    if "tp" in layout:
        shape, names = ((2, size // 2), ("dp", "tp")) if "fsdp" in layout else ((size,), ("tp",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        if "fsdp" in layout:
            fully_shard(model, mesh=mesh["dp"])
    elif layout == "hsdp":
        names = ("replicas", "shards")
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names))
    elif layout == "fsdp":
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5**seed, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(6, 12, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class AppState(Stateful):
    """What PyTorch's tutorial wraps a model and its optimizer in."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": weights, "optim": moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
            options=self.options,
        )


def dense(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().detach().clone() if isinstance(value, DTensor) else value.clone()


def whole_state(app: AppState) -> dict[str, Any]:
    """Everything of a state, gathered."""
    state = app.state_dict()
    named = {f"model.{k}": v for k, v in state["model"].items()}
    named |= {f"optim.{k}": v for k, v in state["optim"].items()}
    return {k: dense(v) if isinstance(v, torch.Tensor) else v for k, v in named.items()}


def save_trained(rank: int, path: str, layout: str) -> dict[str, Any]:
    app = AppState(*laid_out(layout, seed=2))
    train(app.model, app.optimizer, range(3))
    dcp.save({"app": app, "step": 3}, storage_writer=HoldfastWriter(path))
    return whole_state(app) | {"losses": train(app.model, app.optimizer, range(3, 6))}


def load_and_train(rank: int, path: str, layout: str) -> dict[str, Any]:
    app = AppState(*laid_out(layout, seed=1))
    state = {"app": app, "step": 0}
    dcp.load(state, storage_reader=HoldfastReader(path))
    assert state["step"] == 3
    return whole_state(app) | {"losses": train(app.model, app.optimizer, range(3, 6))}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        elif name == "losses":
            assert found[name] == pytest.approx(value, rel=1e-4)
        else:
            assert found[name] == value, name


@pytest.mark.parametrize(
    ("layout", "into", "readers"),
    [("fsdp", "tp", 2), ("hsdp", "fsdp", 3), ("tp", "hsdp", 4), ("fsdp+tp", "fsdp+tp", 4)],
)
def test_a_layout_loads_into_another(tmp_path: Path, layout: str, into: str, readers: int) -> None:
    path = str(tmp_path / "c")
    ranks = run_ranks(4, save_trained, path, layout)
    assert_same(ranks[1], ranks[0])
    for found in run_ranks(readers, load_and_train, path, into):
        assert_same(found, ranks[0])
    assert_same(load_and_train(0, path, "one"), ranks[0])
    with holdfast.open(path) as checkpoint:
        assert checkpoint.world_size == 4 and checkpoint.verify() == []
        for name, value in ranks[0].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(checkpoint.tensor(f"app.{name}"), value), name


def load_with_us(rank: int, path: str) -> dict[str, torch.Tensor]:
    model, _ = laid_out("fsdp", seed=1)
    holdfast.load(path, into={"app": {"model": model}}, partial=True)
    return {f"model.{name}": dense(value) for name, value in model.state_dict().items()}


def save_with_us(rank: int, path: str) -> dict[str, torch.Tensor]:
    model, _ = laid_out("fsdp", seed=2)
    holdfast.save({"app": {"model": model}}, path)
    return {f"model.{name}": dense(value) for name, value in model.state_dict().items()}


def load_with_dcp(rank: int, path: str) -> dict[str, torch.Tensor]:
    model, _ = laid_out("tp", seed=1)
    state = {"app": {"model": model.state_dict()}}
    dcp.load(state, storage_reader=HoldfastReader(path))
    model.load_state_dict(state["app"]["model"])
    return {f"model.{name}": dense(value) for name, value in model.state_dict().items()}


def test_either_reads_what_the_other_wrote(tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    expected = run_ranks(2, save_trained, theirs, "fsdp")[0]
    for found in run_ranks(3, load_with_us, theirs):
        assert_same(found, {name: expected[name] for name in found})
    expected = run_ranks(3, save_with_us, ours)[0]
    for found in run_ranks(2, load_with_dcp, ours):
        assert_same(found, expected)


GROUPS = [
    {"lr": 0.5, "betas": (0.9, 0.99), "names": ["a", "b"], "amsgrad": False},
    {"lr": 0.25, "betas": (0.9, 0.99), "names": ["c"], "amsgrad": True},
]


def save_groups(rank: int, path: str) -> None:
    state = {"groups": GROUPS, "step": 3, "w": torch.ones(5)}
    dcp.save(state, storage_writer=HoldfastWriter(path))


def test_lists_of_values_that_dcp_spread_over_ranks_are_one_again(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(2, save_groups, path)
    state: dict[str, Any] = {"groups": [], "step": 0, "w": torch.zeros(5)}
    holdfast.load(path, into=state)
    assert state["groups"] == GROUPS and state["step"] == 3
    assert [list(group) for group in state["groups"]] == [list(group) for group in GROUPS]


def save_background(rank: int, path: str, kind: str, count: int) -> list[dict[str, Any]]:
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where the saving processes meet
    # Collectives of the background need a group of their own: PyTorch's advice.
    group = dist.new_group(backend="gloo")
    app, expected = AppState(*laid_out("fsdp", seed=2)), []
    writer, done = HoldfastWriter(path), None
    for number in range(count):
        train(app.model, app.optimizer, range(number, number + 1))
        if done is not None:
            done.result()
        expected.append(whole_state(app))
        done = dcp.async_save(
            {"app": app, "step": 3},
            checkpoint_id=f"{path}/{number}",
            storage_writer=writer,
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )
        train(app.model, app.optimizer, range(10, 12))  # meanwhile the state goes on changing
    assert done is not None
    done.result()
    return expected


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_saves_in_the_background_hold_the_moment_they_began(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "run")
    expected = run_ranks(2, save_background, path, kind, 2)[0]
    for number, state in enumerate(expected):
        with holdfast.open(f"{path}/{number}") as checkpoint:
            assert checkpoint.verify() == []
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(checkpoint.tensor(f"app.{name}"), value), name


def told(call: Any) -> tuple[str, dict[int, str]]:
    """What a call of DCP raises: the kind of error, and that of each rank it names."""
    try:
        call()
    except CheckpointException as error:
        return "CheckpointException", {
            rank: type(cause).__name__ for rank, (cause, _) in error.failures.items()
        }
    except HoldfastError as error:
        return type(error).__name__, {}
    return "", {}


def fail_on_rank_1(rank: int, path: str) -> tuple[str, dict[int, str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = {f"w{n}": distribute_tensor(torch.ones(9, 4), mesh, [Shard(0)]) for n in range(3)}

    class Failing(DefaultSavePlanner):
        """Has no data on one rank."""

        def resolve_data(self, write_item: Any) -> Any:
            if rank == 1 and write_item.index.fqn == "w2":
                raise StateError("lost")
            return super().resolve_data(write_item)

    return told(lambda: dcp.save(parts, storage_writer=HoldfastWriter(path), planner=Failing()))


def test_a_rank_that_fails_makes_all_raise_and_leaves_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "c")
    for kind, causes in run_ranks(3, fail_on_rank_1, path):
        assert kind == "CheckpointException" and causes[1] == "StateError"
        assert set(causes.values()) <= {"StateError", "PeerError"}, causes
    assert not os.path.exists(path)


def save_twice(rank: int, path: str) -> tuple[str, dict[int, str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(value: float) -> dict[str, Any]:
        return {"w": distribute_tensor(torch.full((9, 4), value), mesh, [Shard(0)])}

    dcp.save(state(1), storage_writer=HoldfastWriter(path))
    return told(lambda: dcp.save(state(2), storage_writer=HoldfastWriter(path)))


def test_a_second_save_of_one_path_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    for kind, causes in run_ranks(2, save_twice, path):
        assert kind == "CheckpointException"
        assert causes == {0: AlreadyCommittedError.__name__}
    with holdfast.open(path) as checkpoint:
        assert torch.equal(checkpoint.tensor("w"), torch.ones(9, 4))


def save_apart(rank: int, path: str) -> tuple[str, dict[int, str]]:
    writer = HoldfastWriter(f"{path}/{rank}")
    return told(lambda: dcp.save({"w": torch.ones(3), "v": torch.ones(2)}, storage_writer=writer))


def test_ranks_that_do_not_see_one_directory_are_told_so(tmp_path: Path) -> None:
    for kind, causes in run_ranks(2, save_apart, str(tmp_path)):
        assert kind == "CheckpointException" and causes == {1: PeerError.__name__}
    assert not (tmp_path / "1").exists()


def save_cached(rank: int, path: str) -> None:
    model, optimizer = laid_out("fsdp", seed=2)
    for number in range(3):
        train(model, optimizer, range(number, number + 1))
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"app": AppState(model, optimizer), "step": 3 if number < 2 else 4}
        dcp.save(state, storage_writer=HoldfastWriter(f"{path}/{number}"), planner=planner)


def test_cached_plans_give_whole_checkpoints(tmp_path: Path) -> None:
    path = str(tmp_path)
    run_ranks(2, save_cached, path)
    for number in range(3):
        with holdfast.open(f"{path}/{number}") as checkpoint:
            assert checkpoint.verify() == []
            assert checkpoint.objects()["step"] == (3 if number < 2 else 4)


def save_in_a_part(rank: int, path: str) -> None:
    group = dist.new_group([1, 2])
    if rank:
        mesh = init_device_mesh("cpu", (3,))
        del mesh  # made by all ranks; the save below is of two
        state = {"w": torch.arange(6), "mine": torch.tensor(7)}
        dcp.save(state, storage_writer=HoldfastWriter(path), process_group=group)
    else:
        init_device_mesh("cpu", (3,))


def test_a_part_of_the_ranks_saves_by_itself(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(3, save_in_a_part, path)
    with holdfast.open(path) as checkpoint:
        assert checkpoint.world_size == 2 and checkpoint.verify() == []
