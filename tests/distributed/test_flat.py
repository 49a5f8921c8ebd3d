"""FSDP1 and ZeroRedundancyOptimizer: saved as the plain model would be, and loaded from anything.

What a rank holds is compared with what torch gathers by itself.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)

import holdfast

from .ranks import run_ranks
from .test_reshard import WIDTH, Net, assert_same, dense, train

State = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def state_of(kind: str) -> State:
    """Build a state: plain, fsdp2, ddp, zero, or FSDP1 as ``strategy/whose parameters``."""
    model: nn.Module = Net()
    if kind == "fsdp2":
        fully_shard(model)
    elif kind in ("ddp", "zero"):
        model = nn.parallel.DistributedDataParallel(model)
    elif "/" in kind:
        model = flat(model, *kind.split("/"))
    optimizer = optimizer_of(model, kind)
    return {"model": model, "optimizer": optimizer, "step": 0}


def flat(model: nn.Module, strategy: str, whose: str) -> nn.Module:
    options: State = {"sharding_strategy": ShardingStrategy[strategy]}
    options |= {"use_orig_params": whose == "own", "device_id": torch.device("cpu")}
    if strategy.startswith("HYBRID") or strategy.startswith("_HYBRID"):
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    model.encoder = FullyShardedDataParallel(model.encoder, **options)
    return FullyShardedDataParallel(model, **options)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

        adam = torch.optim.AdamW
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adam, lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(state: State, kind: str) -> Tensors:
    """Gather everything by torch's own means, under the names of the plain model."""
    model, optimizer = state["model"], state["optimizer"]
    if "/" in kind:
        return whole_of_flat(model, optimizer)
    model = getattr(model, "module", model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    if kind == "zero":
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():  # before it goes to the next one, and is gone here
                numbered = optimizer.state_dict()["state"]
        by_name = {name: numbered[i] for i, name in enumerate(names.values())}
    else:
        by_name = {names[parameter]: values for parameter, values in optimizer.state.items()}
    found = {f"model.{name}": dense(value) for name, value in model.state_dict().items()}
    for name, values in by_name.items():
        found |= {f"optimizer.state.{name}.{key}": dense(v) for key, v in values.items()}
    return found


def whole_of_flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Gather the parameters, and moments by putting them into the parameters' place for a while.

    torch's optim_state_dict gives the second moments of parameters as their first, without a GPU.
    """
    found = {f"model.{name}": value for name, value in gathered(model).items()}
    parameters = dict(model.named_parameters())
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        for parameter in parameters.values():
            state = optimizer.state.get(parameter, {})
            parameter.data.copy_(state.get(key, torch.zeros_like(parameter)))
        for name, value in gathered(model).items():
            if name not in ("seen", "head.weight"):
                found[f"optimizer.state.{name}.{key}"] = value
    for name, parameter in parameters.items():
        parameter.data.copy_(kept[name])
    return found


def gathered(model: nn.Module) -> Tensors:
    everywhere = FullStateDictConfig(rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, everywhere):
        return {name: value.clone() for name, value in model.state_dict().items()}


def save_trained(rank: int, path: str, kind: str) -> Tensors:
    state = state_of(kind)
    train(state, range(1, 4))
    found = whole(state, kind)
    with torch.no_grad():  # leaves gathered parameters behind, which are not the optimizer's
        state["model"](torch.ones(1, WIDTH))
    holdfast.save(state, path, step=3)
    holdfast.save(state, f"{path}-again")  # by the plan of the first
    return {**found, "losses": torch.tensor(train(state, range(4, 7)))}


def load_and_train(rank: int, path: str, kind: str, before: int) -> Tensors:
    state = state_of(kind)
    train(state, range(50, 50 + before))
    with torch.no_grad():  # leaves gathered parameters behind, which a load has to drop
        state["model"](torch.ones(1, WIDTH))
    report = holdfast.load(path, into=state)
    assert (report.missing, report.unexpected, state["step"]) == ((), (), 3)
    found = {**whole(state, kind), "losses": torch.tensor(train(state, range(4, 7)))}
    holdfast.save(state, f"{path}-of-{kind.replace('/', '-')}-{before}")  # counters have gone on
    return found


FLAT = ["FULL_SHARD/own", "FULL_SHARD/flat", "SHARD_GRAD_OP/own", "SHARD_GRAD_OP/flat"]
FLAT += ["NO_SHARD/own", "NO_SHARD/flat"]


@pytest.mark.parametrize("kind", [*FLAT, "HYBRID_SHARD/own", "zero"])
def test_what_flat_parameters_hold_is_saved_as_of_the_plain_model(
    tmp_path: Path, kind: str
) -> None:
    path = str(tmp_path / "c")
    ranks = 4 if kind.startswith("HYBRID") else 3
    expected = run_ranks(ranks, save_trained, path, kind)[0]
    for saved in (path, f"{path}-again"):
        with holdfast.open(saved) as checkpoint:
            assert set(checkpoint.names()) >= expected.keys() - {"losses"}
            for name in expected.keys() - {"losses"}:
                assert torch.equal(checkpoint.tensor(name), expected[name]), name
            assert checkpoint.info("model.head.weight").tied_to == "model.decoder.weight"
            assert checkpoint.verify() == []
    plain = load_and_train(0, path, "plain", 0)
    assert_same({name: plain[name] for name in expected}, expected)


def save_plain(path: str) -> Tensors:
    return save_trained(0, path, "plain")


@pytest.mark.parametrize(
    ("kind", "before"),  # steps that the target has taken, so that it has state
    [
        *[("FULL_SHARD/own", 0), ("FULL_SHARD/own", 2), ("FULL_SHARD/flat", 0)],
        *[("SHARD_GRAD_OP/own", 2), ("SHARD_GRAD_OP/flat", 2), ("NO_SHARD/flat", 0)],
        *[("HYBRID_SHARD/flat", 2), ("zero", 0), ("zero", 2)],
    ],
)
def test_flat_parameters_load_what_the_plain_model_has_saved(
    tmp_path: Path, kind: str, before: int
) -> None:
    path = str(tmp_path / "c")
    expected = save_plain(path)
    ranks = 4 if kind.startswith("HYBRID") else 3
    for found in run_ranks(ranks, load_and_train, path, kind, before):
        assert_same(found, {name: expected[name] for name in found})


def test_flat_parameters_reshard_into_each_other_and_into_fsdp2(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    expected = run_ranks(4, save_trained, path, "FULL_SHARD/flat")[0]
    for ranks, kind in [(3, "fsdp2"), (2, "FULL_SHARD/own")]:
        for found in run_ranks(ranks, load_and_train, path, kind, 0):
            assert_same({name: found[name] for name in expected}, expected)
    sharded = str(tmp_path / "sharded")
    expected = run_ranks(3, save_trained, sharded, "fsdp2")[0]
    for found in run_ranks(2, load_and_train, sharded, "FULL_SHARD/flat", 2):
        assert_same(found, {name: expected[name] for name in found})


def without_collectives(rank: int, path: str) -> list[str]:
    """Save and load; return what FSDP1 has gathered meanwhile."""
    state = state_of("FULL_SHARD/own")
    train(state, range(1, 3))
    calls: list[str] = []
    sends = ("all_gather_into_tensor", "all_gather_single", "all_gather", "broadcast")
    kept = {name: getattr(dist, name) for name in sends if hasattr(dist, name)}
    for name in kept:
        setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
    try:
        local = holdfast.Shard(torch.ones(1), (dist.get_world_size(),), start=rank)
        from holdfast.state.tree import flatten

        assert flatten({**state, "mine": local}).tensors
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    return calls


def test_laying_flat_parameters_out_asks_no_other_rank(tmp_path: Path) -> None:
    assert run_ranks(2, without_collectives, str(tmp_path / "c")) == [[], []]
