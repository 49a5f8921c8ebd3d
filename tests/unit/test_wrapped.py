"""Optimizers in wrappers, states made too early, and errors that name the next call."""

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

import holdfast
from holdfast.errors import HoldfastError, MismatchError, StateError

from .training import net, same, train

NewPath = Callable[[], Path]


class Accelerated(Optimizer):
    """As accelerate's: an Optimizer that hands everything on to another."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Plain:
    """A wrapper that is no Optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class Scaled(Plain):
    """A wrapper with a state of its own."""

    scale = 4.0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state.pop("scale")
        super().load_state_dict(state)


def trained(seed: int = 0) -> tuple[Any, Optimizer]:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    return model, optimizer


WRAPPERS: list[Callable[[Optimizer], Any]] = [
    Accelerated,
    Plain,
    lambda optimizer: Accelerated(Accelerated(optimizer)),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_optimizer_is_saved_by_names(new_path: NewPath, wrap: Any) -> None:
    model, optimizer = trained()
    holdfast.save({"model": model, "optimizer": wrap(optimizer)}, path := new_path())
    names = holdfast.open(path).names()
    assert "optimizer.state.0.weight.exp_avg" in names
    for other in (lambda inner: inner, wrap):
        fresh, inner = trained(1)
        holdfast.load(path, into={"model": fresh, "optimizer": other(inner)})
        assert same(inner.state_dict(), optimizer.state_dict())
    holdfast.save({"model": model, "optimizer": optimizer}, plain := new_path())
    fresh, inner = trained(1)
    holdfast.load(plain, into={"model": fresh, "optimizer": wrap(inner)})
    assert same(inner.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_optimizer_loads_what_was_saved_by_numbers(new_path: NewPath, wrap: Any) -> None:
    model, optimizer = trained()
    numbers = optimizer.state_dict()
    holdfast.save({"model": model, "optimizer": numbers}, path := new_path())
    fresh, inner = trained(1)
    holdfast.load(path, into={"model": fresh, "optimizer": wrap(inner)})
    assert same(inner.state_dict(), optimizer.state_dict())


def test_a_wrapper_with_a_state_of_its_own_keeps_it(new_path: NewPath) -> None:
    model, optimizer = trained()
    wrapper = Scaled(optimizer)
    wrapper.scale = 8.0
    holdfast.save({"model": model, "optimizer": wrapper}, path := new_path())
    fresh, inner = trained(1)
    into = Scaled(inner)
    holdfast.load(path, into={"model": fresh, "optimizer": into})
    assert into.scale == 8.0
    assert same(inner.state_dict(), optimizer.state_dict())


def test_a_scheduler_is_no_wrapper(new_path: NewPath) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    holdfast.save({"model": model, "scheduler": scheduler}, path := new_path())
    assert holdfast.open(path).objects()["scheduler.last_epoch"] == 0


def test_a_lazy_save_of_a_wrapped_optimizer_is_held_before_a_step(new_path: NewPath) -> None:
    model, optimizer = trained()
    wrapper, before = Accelerated(optimizer), copy.deepcopy(optimizer.state_dict())
    state = {"model": model, "optimizer": wrapper}
    handle = holdfast.save_async(state, path := new_path(), stage="lazy")
    train(model, wrapper, range(2, 3))
    handle.result()
    fresh, inner = trained(1)
    holdfast.load(path, into={"model": fresh, "optimizer": inner})
    assert same(inner.state_dict(), before)


def test_a_state_dict_made_before_the_loop_is_warned_of(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    model, optimizer = trained()
    for _ in range(2):  # a new one each time, or the optimizer itself
        holdfast.save({"o": optimizer.state_dict()}, new_path())
        holdfast.save({"model": model, "o": optimizer}, new_path())
    assert "state_dict()" not in caplog.text
    early = {"model": model.state_dict(), "o": optimizer.state_dict()}
    holdfast.save(early, new_path())
    assert "state_dict()" not in caplog.text
    train(model, optimizer, range(1))
    holdfast.save(early, new_path())
    assert "o is the same state_dict() of an optimizer that was saved before" in caplog.text
    assert "pass the optimizer itself" in caplog.text


HINTS: list[tuple[Callable[[Path], Any], type[HoldfastError], str]] = [
    (lambda path: holdfast.load(path), StateError, "use holdfast.open('{path}').state()"),
    (lambda path: holdfast.save(net(), path / "x"), StateError, 'Wrap it: state={"model": model}'),
    (lambda path: holdfast.load(path, net()), StateError, 'Wrap it: into={"model": model}'),
    (
        lambda path: holdfast.load(path, torch.optim.SGD(net().parameters())),  # type: ignore[arg-type]
        StateError,
        'Wrap it: into={"optimizer": optimizer}',
    ),
    (
        lambda path: holdfast.load(path, {"model": net(), "o": trained()[1].state_dict()}),
        MismatchError,
        "pass the optimizer itself, such as {'o': optimizer}",
    ),
]

NAMED: list[tuple[Callable[[Any, Any], Any], dict[str, Any], str]] = [
    (lambda model, _: {"net": model}, {"partial": True}, "rename={'model': 'net'}"),
    (lambda model, _: model.state_dict(), {"include": "model"}, "rename={'model': ''}"),
    (
        lambda model, _: {"a": {"model": model}},
        {"partial": True},
        "rename={'model': 'a.model'}",
    ),
    (lambda _, optimizer: {"o": optimizer}, {"partial": True}, "add their module to the target"),
    (lambda *_: {"o": None}, {"partial": True}, "put holdfast.Value() in its place"),
    (lambda model, _: {"model": model}, {}, "partial=True"),
    (lambda model, _: {"model": model[:2], "x": 3}, {}, "strict=False"),
]


@pytest.mark.parametrize(("into", "given", "text"), NAMED)
def test_an_error_of_names_says_which_argument_makes_them_fit(
    new_path: NewPath, into: Any, given: dict[str, Any], text: str
) -> None:
    model, optimizer = trained()
    holdfast.save({"model": model, "o": optimizer}, path := new_path())
    with pytest.raises(MismatchError, match=re.escape(text)):
        holdfast.load(path, into(*trained(1)), **given)
    if text.startswith("rename="):
        fresh = trained(1)
        holdfast.load(path, into(*fresh), **given, rename=eval(text.removeprefix("rename=")))
        assert same(fresh[0].state_dict(), model.state_dict())


def test_a_beginning_that_is_lacking_is_named(new_path: NewPath) -> None:
    model, _ = trained()
    holdfast.save(model.state_dict(), path := new_path())
    fresh = trained(1)[0]
    with pytest.raises(MismatchError, match=re.escape("""rename=("^", 'model.')""")):
        holdfast.load(path, {"model": fresh})
    holdfast.load(path, {"model": fresh}, rename=("^", "model."))
    assert same(fresh.state_dict(), model.state_dict())


def test_a_place_without_a_tensor_names_what_is_below_it(new_path: NewPath) -> None:
    holdfast.save({"model": net()}, path := new_path())
    with pytest.raises(MismatchError, match=re.escape("use state(include='model')")):
        holdfast.open(path)["model"]


@pytest.mark.parametrize(("call", "kind", "text"), HINTS)
def test_an_error_names_the_next_call(
    new_path: NewPath, call: Callable[[Path], Any], kind: type[HoldfastError], text: str
) -> None:
    model, optimizer = trained()
    holdfast.save({"model": model, "o": optimizer}, path := new_path())
    with pytest.raises(kind, match=re.escape(text.replace("{path}", str(path)))):
        call(path)


def test_a_wrapper_of_an_optimizer_with_arrays_in_its_groups_is_saved(new_path: NewPath) -> None:
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["schedule"] = np.array([1.0, np.nan])
    path = new_path()
    holdfast.save({"model": model, "optimizer": Copies(optimizer)}, path)
    assert holdfast.open(path).verify() == []


class Copies(Plain):
    """Gives other arrays at each call."""

    def state_dict(self) -> dict[str, Any]:
        found = self.optimizer.state_dict()
        return {**found, "param_groups": copy.deepcopy(found["param_groups"])}
