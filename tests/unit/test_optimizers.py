"""Optimizers and schedulers: training goes on as if it had never stopped, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler

import holdfast
from format.simulated_ranks import ThreadGroup, run_ranks
from holdfast.errors import MismatchError, StateError

from .training import net, same, train

NewPath = Callable[[], Path]
Parameters = list[nn.Parameter]


class Factored(Optimizer):
    """As Shampoo and its kin: factors of other shapes in lists, numbers, nothing, nested dicts."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99), "block": None})

    @torch.no_grad()
    def step(self, closure: Any) -> float:  # type: ignore[override]
        with torch.enable_grad():
            loss: float = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    sides = [torch.eye(n, dtype=torch.float64) for n in p.shape]
                    state |= {"factors": sides, "count": 0, "graft": {"square": torch.zeros(())}}
                    state |= {"basis": None, "dims": tuple(p.shape), "named": {1: p.clone()}}
                state["count"] += 1
                state["graft"]["square"] += p.grad.square().sum()
                update = p.grad / state["graft"]["square"].sqrt()
                for d, factor in enumerate(state["factors"]):
                    rows = update.transpose(0, d).flatten(1) if p.ndim > 1 else update[:, None]
                    factor += (rows @ rows.T).double()
                    update = torch.tensordot(factor.inverse().float(), update, ([1], [d]))
                    update = update.movedim(0, d)
                state["named"][1].lerp_(update, 0.5)
                p.sub_(group["lr"] * state["named"][1])
        return loss


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "Adam, fused": lambda p: optim.Adam(p, 0.01, fused=True),
    "Adam, its rate a tensor": lambda p: optim.Adam(p, torch.tensor(0.01)),
    "AdamW with amsgrad": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, 0.01),
    "Adafactor": lambda p: optim.Adafactor(p),
    "Muon": lambda p: optim.Muon([q for q in p if q.ndim == 2], 0.01),
    "Shampoo-like": lambda p: Factored(p),
    "LBFGS": lambda p: optim.LBFGS(p, max_iter=3),
    "two groups": lambda p: optim.AdamW(
        [{"params": p[:2], "lr": 0.1, "weight_decay": 0.0}, {"params": p[2:], "betas": (0.8, 0.9)}]
    ),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR, with a Counter": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "MultiStepLR, its Counter empty": lambda o: lr_scheduler.MultiStepLR(o, []),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


def parameters(module: nn.Module) -> Parameters:
    return list(module.parameters())


@pytest.mark.parametrize("before", ["without state", "with other state"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resumed_training_equals_unbroken_training(
    new_path: NewPath, kind: str, before: str
) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](parameters(model))
    path = new_path()
    train(model, optimizer, range(3))
    holdfast.save({"model": model, "optimizer": optimizer}, path)
    train(model, optimizer, range(3, 6))

    resumed = net(seed=1)
    again = OPTIMIZERS[kind](parameters(resumed))
    if before == "with other state":
        train(resumed, again, range(50, 52))
    holdfast.load(path, into={"model": resumed, "optimizer": again})
    train(resumed, again, range(3, 6))
    assert same(dict(model.state_dict()), dict(resumed.state_dict()))
    assert same(optimizer.state_dict(), again.state_dict())


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(new_path: NewPath, kind: str) -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), 0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    path = new_path()
    train(model, optimizer, range(3), scheduler)
    holdfast.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, path)
    train(model, optimizer, range(3, 7), scheduler)

    resumed = net(seed=1)
    again = optim.SGD(resumed.parameters(), 0.1)
    scheduler_again = SCHEDULERS[kind](again)
    into = {"model": resumed, "optimizer": again, "scheduler": scheduler_again}
    holdfast.load(path, into=into)
    train(resumed, again, range(3, 7), scheduler_again)
    assert same(scheduler.state_dict(), scheduler_again.state_dict())
    assert same(dict(model.state_dict()), dict(resumed.state_dict()))


def test_a_grad_scaler_comes_back(new_path: NewPath) -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    weight = torch.ones(1, requires_grad=True)
    optimizer = optim.SGD([weight], 0.1)
    for value in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((weight * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    path = new_path()
    holdfast.save({"scaler": scaler}, path)
    other = torch.amp.GradScaler("cpu")
    holdfast.load(path, into={"scaler": other})
    assert scaler.state_dict() == other.state_dict() != torch.amp.GradScaler("cpu").state_dict()


def test_loading_takes_no_optimizer_step_and_touches_no_gradient(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    path = new_path()
    holdfast.save({"model": model, "optimizer": optimizer}, path)

    resumed = net(seed=1)
    again = optim.Adam(resumed.parameters())
    calls: list[str] = []
    again.register_step_pre_hook(lambda *_: calls.append("hook"))
    monkeypatch.setattr(optim.Adam, "step", lambda *_, **__: calls.append("step"))
    gradients = [torch.full_like(p, 3.0) for p in resumed.parameters()]
    for parameter, gradient in zip(resumed.parameters(), gradients, strict=True):
        parameter.grad = gradient
    into = {"model": resumed, "optimizer": again}
    holdfast.load(path, into=into)
    holdfast.save(into, new_path())
    assert calls == []
    for parameter, gradient in zip(resumed.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert bool((gradient == 3.0).all())


def test_a_frozen_parameter_has_no_state_and_loses_what_it_had(new_path: NewPath) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    path = new_path()
    holdfast.save({"model": model, "optimizer": optimizer}, path)
    assert "optimizer.state.0.weight.exp_avg" not in holdfast.open(path).names()

    thawed = net(seed=1)
    again = optim.Adam(thawed.parameters())
    train(thawed, again, range(2))
    holdfast.load(path, into={"model": thawed, "optimizer": again})
    assert thawed[0].weight not in again.state
    assert thawed[3].weight in again.state


def test_the_order_and_number_of_groups_may_change(new_path: NewPath) -> None:
    model = net()
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = optim.AdamW([{"params": weights, "lr": 0.5}, {"params": others, "lr": 0.25}])
    train(model, optimizer, range(2))
    path = new_path()
    holdfast.save({"model": model, "optimizer": optimizer}, path)

    resumed = net(seed=1)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in reversed(parameters(resumed)) if p.ndim == 1]},
        {"params": [resumed[3].weight]},
        {"params": [resumed[0].weight]},
    ]
    again = optim.AdamW(groups)
    holdfast.load(path, into={"model": resumed, "optimizer": again})
    assert [group["lr"] for group in again.param_groups] == [0.25, 0.5, 0.5]
    for mine, theirs in zip(model.parameters(), resumed.parameters(), strict=True):
        assert same(dict(optimizer.state[mine]), dict(again.state[theirs]))


def test_a_group_that_joins_what_was_set_apart_is_refused(new_path: NewPath) -> None:
    model = net()
    both = parameters(model)
    optimizer = optim.SGD([{"params": both[:1], "lr": 0.5}, {"params": both[1:], "lr": 0.25}])
    path = new_path()
    holdfast.save({"model": model, "optimizer": optimizer}, path)
    into = {"model": model, "optimizer": optim.SGD(both, 0.1)}
    with pytest.raises(MismatchError, match=r"optimizer: group 0 holds 0\.bias"):
        holdfast.load(path, into=into)


def test_parameters_of_no_module_go_by_their_position(new_path: NewPath) -> None:
    weights = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    optimizer = optim.SGD(weights, 0.1, momentum=0.9)
    sum(w.sum() for w in weights).backward()  # type: ignore[union-attr]
    optimizer.step()
    path = new_path()
    holdfast.save({"optimizer": optimizer}, path)
    again = optim.SGD([w.detach().clone().requires_grad_() for w in weights], 0.5)
    holdfast.load(path, into={"optimizer": again})
    assert same(optimizer.state_dict(), again.state_dict())
    assert holdfast.open(path).names()[0] == "optimizer.state.0.momentum_buffer"


def test_two_modules_with_an_optimizer_each_and_one_over_both(new_path: NewPath) -> None:
    def gan(seed: int) -> dict[str, Any]:
        generator, judge = net(seed), net(seed + 1)
        both = [*generator.parameters(), *judge.parameters()]
        optimizers = {"generator": optim.Adam(generator.parameters()), "both": optim.SGD(both)}
        return {"generator": generator, "judge": judge, "optimizers": optimizers}

    state = gan(0)
    state["optimizers"]["both"].param_groups[0]["momentum"] = 0.9
    train(state["generator"], state["optimizers"]["generator"], range(2))
    train(state["judge"], state["optimizers"]["both"], range(2))
    path = new_path()
    holdfast.save(state, path)
    names = holdfast.open(path).names()
    assert "optimizers.generator.state.3.weight.exp_avg" in names
    assert "optimizers.both.state.judge.3.weight.momentum_buffer" in names
    other = gan(7)
    holdfast.load(path, into=other)
    for key in ("generator", "both"):
        one, two = (s["optimizers"][key].state_dict() for s in (state, other))
        assert same(one, two)


def test_an_optimizer_that_overrides_the_protocol_saves_itself(new_path: NewPath) -> None:
    class Gathering(optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"everything": torch.full((2,), 5.0)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    path = new_path()
    holdfast.save({"optimizer": Gathering([torch.ones(1)])}, path)
    target = Gathering([torch.ones(1)])
    holdfast.load(path, into={"optimizer": target})
    assert same(target.loaded, {"everything": torch.full((2,), 5.0)})


def test_naming_the_state_of_many_parameters_is_not_quadratic() -> None:
    """20,000 names took minutes when each parameter looked at all of them."""
    from holdfast.layout import Tensor
    from holdfast.state.target import Source, bind

    weights = [nn.Parameter(torch.zeros(1)) for _ in range(5000)]
    optimizer = optim.Adam(weights)
    tensors, objects = {}, {}
    for i in range(len(weights)):
        objects["optimizer", "param_groups", i] = {"lr": 0.5}
        for key in ("exp_avg", "exp_avg_sq", "step"):
            path = ("optimizer", "state", i, key)
            tensors[path] = Tensor(path, "f32", () if key == "step" else (1,))
    looked_at = 0

    class Counted(tuple):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(index)

    counted = {Counted(path): tensor for path, tensor in tensors.items()}
    target = bind({"optimizer": optimizer}, Source(counted, objects))
    assert len(target.tensors) == len(tensors)
    assert looked_at < 20 * len(tensors)


def test_state_of_an_optimizer_that_differs_between_ranks_is_no_statistic(
    new_path: NewPath,
) -> None:
    """BatchNorm's may differ; factors of what each rank holds a part of would be lost."""

    states = []
    for rank in range(2):
        model = net()
        optimizer = OPTIMIZERS["Shampoo-like"](parameters(model))
        train(model, optimizer, range(1))
        model[1].running_mean += rank  # type: ignore[operator]
        states.append({"model": model, "optimizer": optimizer})

    def save(group: ThreadGroup) -> None:
        holdfast.save(states[group.rank], path, group=group)  # type: ignore[arg-type]

    path = new_path()
    run_ranks(2, save)
    optimizer.state[model[0].weight]["factors"][0][0, 0] += 1
    path = new_path()
    with pytest.raises(StateError, match=r"values of optimizer\.state\.0\.weight\.factors\.0;"):
        run_ranks(2, save)
    assert not path.exists()
