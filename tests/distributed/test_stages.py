"""Pipeline stages and experts: other names on other ranks, and optimizers of any kind over them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast

from .ranks import run_ranks
from .test_reshard import dense

State = dict[str, Any]
Tensors = dict[str, torch.Tensor]
WIDTH, EXPERTS, LAYERS = 6, 5, 4  # five experts are uneven over two ranks


class Layer(nn.Module):
    """A norm, a projection and stacked experts, all of which take part."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))


def stage_of(layers: list[int], mesh: DeviceMesh | None) -> nn.Module:
    """Some layers of the net, under their names in the whole; experts on the ranks of a mesh."""
    model = nn.Module()
    model.layers = nn.ModuleDict({str(number): Layer(number) for number in layers})
    for layer in model.layers.values() if mesh else ():
        experts = distribute_tensor(layer.experts.detach(), mesh, [Shard(0)])
        layer.experts = nn.Parameter(experts)
    return model


def state_of(layers: list[int], mesh: DeviceMesh | None, steps: int) -> State:
    """A stage, its optimizer and scheduler, and so many steps of gradients that any rank knows."""
    model = stage_of(layers, mesh)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    optimizer = optim.AdamW(groups, lr=0.01, foreach=False)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def stage_state(ranks: int, rank: int, steps: int) -> State:
    """Half of the layers on each half of the ranks; the experts on all ranks of a half."""
    if ranks == 1:
        return state_of(list(range(LAYERS)), None, steps)
    stages = 2
    mesh = init_device_mesh("cpu", (stages, ranks // stages), mesh_dim_names=("pp", "ep"))
    stage = rank // (ranks // stages)
    layers = list(range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages))
    return state_of(layers, mesh["ep"], steps)


def tensors_of(state: State) -> Tensors:
    found = {f"model.{name}": dense(value) for name, value in state["model"].state_dict().items()}
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optimizer"].state[parameter].items():
            found[f"optimizer.state.{name}.{key}"] = dense(value)
    return found


def save_stage(rank: int, path: str, ranks: int) -> Tensors:
    state = stage_state(ranks, rank, 3)
    holdfast.save(state, path)
    return tensors_of(state)


def load_stage(rank: int, path: str, ranks: int) -> tuple[Tensors, list[float], int]:
    state = stage_state(ranks, rank, 0)
    report = holdfast.load(path, into=state)
    assert (report.missing, report.unexpected) == ((), ())
    rates = [group["lr"] for group in state["optimizer"].param_groups]
    return tensors_of(state), rates, state["scheduler"].last_epoch


@pytest.mark.parametrize(("writers", "readers"), [(4, 1), (1, 4), (2, 4), (4, 2)])
def test_stages_with_experts_load_on_any_number_of_stages(
    tmp_path: Path, writers: int, readers: int
) -> None:
    path = str(tmp_path / "c")
    expected: Tensors = {}
    for part in run_ranks(writers, save_stage, path, writers):
        expected |= part
    seen: set[str] = set()
    for found, rates, epoch in run_ranks(readers, load_stage, path, readers):
        seen |= found.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name
        assert rates == pytest.approx([0.001, 0.002]) and epoch == 3
    assert seen == expected.keys()


def muon_state(rank: int, trained: bool) -> State:
    """Muon for matrices, AdamW for the rest, a frozen parameter, under FSDP2."""
    model = stage_of([0, 1], None)
    model.layers["0"].project.weight.requires_grad_(False)
    fully_shard(model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [optim.Muon(matrices, lr=0.01), optim.AdamW(rest, foreach=False)]
    for parameter in model.parameters() if trained else ():
        if parameter.requires_grad:
            parameter.grad = parameter.detach() * 0.5
    for optimizer in optimizers if trained else ():
        optimizer.step()
    return {"model": model, "optimizers": optimizers}


def muon(rank: int, path: str, saving: bool) -> Tensors:
    state = muon_state(rank, saving)
    if saving:
        holdfast.save(state, path)
    else:
        report = holdfast.load(path, into=state)
        assert (report.missing, report.unexpected) == ((), ())
    found = {f"model.{name}": dense(value) for name, value in state["model"].state_dict().items()}
    names = {parameter: name for name, parameter in state["model"].named_parameters()}
    for optimizer in state["optimizers"]:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                found[f"{type(optimizer).__name__}.{names[parameter]}.{key}"] = dense(value)
                assert isinstance(value, DTensor) or value.ndim == 0
    return found


def test_muon_beside_adamw_reshards_and_frozen_parameters_have_no_state(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    expected = run_ranks(2, muon, path, True)[0]
    assert "Muon.layers.1.project.weight.momentum_buffer" in expected
    assert "Muon.layers.0.project.weight.momentum_buffer" not in expected
    for found in run_ranks(3, muon, path, False):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
