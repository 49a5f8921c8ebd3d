"""Modules, whatever wraps them; ties; extra state; and objects that save themselves."""

from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DataParallel, DistributedDataParallel

import holdfast
from holdfast.errors import MismatchError, StateError

from .training import net, same, train

NewPath = Callable[[], Path]
Pair = namedtuple("Pair", "weights count")


@pytest.fixture
def process_group() -> Iterator[None]:
    """A default process group of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.usefixtures("process_group")
def test_wrappers_leave_no_trace_in_names(new_path: NewPath) -> None:
    bare, expected = net(), weights(net())
    wrapped = {
        "none": bare,
        "DDP": DistributedDataParallel(net()),
        "compiled": torch.compile(net()),
        "compiled DDP": torch.compile(DistributedDataParallel(net())),
        "DDP of compiled": DistributedDataParallel(torch.compile(net())),  # type: ignore[arg-type]
        "DataParallel": DataParallel(net()),
    }
    inner = net()
    inner[0] = torch.compile(inner[0])  # type: ignore[assignment]
    wrapped["compiled inside"] = inner
    paths = {}
    for kind, module in wrapped.items():
        paths[kind] = new_path()
        holdfast.save({"model": module}, paths[kind])
        assert holdfast.open(paths[kind]).names() == [f"model.{name}" for name in expected], kind
    other = net(seed=1)
    for kind, module in wrapped.items():
        holdfast.load(paths["none"], into={"model": module})
        holdfast.load(paths[kind], into={"model": other})
        assert same(weights(other), expected), kind
        for parameter in module.parameters():
            parameter.data.zero_()
        holdfast.load(paths[kind], into={"model": module})
        assert all(bool(torch.any(p != 0)) for p in module.parameters() if p.ndim > 1), kind


@pytest.mark.usefixtures("process_group")
def test_an_optimizer_of_a_wrapped_module_has_the_same_names(new_path: NewPath) -> None:
    model = torch.compile(DistributedDataParallel(net()))
    optimizer = optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = new_path()
    holdfast.save({"model": model, "optimizer": optimizer}, path)
    assert "optimizer.state.0.weight.exp_avg" in holdfast.open(path).names()
    plain = net(seed=1)
    again = optim.Adam(plain.parameters())
    holdfast.load(path, into={"model": plain, "optimizer": again})
    assert same(again.state_dict(), optimizer.state_dict())


def test_two_keys_of_one_canonical_name_are_refused(new_path: NewPath) -> None:
    module = nn.Module()
    module.inner = nn.Linear(1, 1, bias=False)
    module.inner._orig_mod = nn.Linear(1, 1, bias=False)
    with pytest.raises(StateError, match=r"m has the keys 'inner\.weight' and 'inner\._orig_mod"):
        holdfast.save({"m": module}, new_path())


class Tied(nn.Module):
    """As a language model ties its embedding to its head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once_and_have_both_names(new_path: NewPath) -> None:
    tied, untied = new_path(), new_path()
    model = Tied()
    holdfast.save({"model": model}, tied)
    holdfast.save({"model": Tied(tied=False)}, untied)
    checkpoint = holdfast.open(tied)
    assert checkpoint.names() == ["model.embedding.weight", "model.head.weight"]
    assert checkpoint.info("model.head.weight").tied_to == "model.embedding.weight"
    saved = sum(holdfast.open(untied).file_bytes) - sum(checkpoint.file_bytes)
    assert saved >= model.head.weight.nbytes
    state = checkpoint.state()["model"]
    assert state["embedding.weight"] is state["head.weight"]
    assert same(state["head.weight"], model.head.weight.detach())
    for target in (Tied(), Tied(tied=False)):
        holdfast.load(tied, into={"model": target})
        assert same(weights(target), weights(model))
    assert checkpoint.verify() == []


def test_ties_across_dicts_are_kept_and_views_are_not_ties(new_path: NewPath) -> None:
    base = torch.arange(12.0)
    state = {"a": base, "b": {"c": base}, "row": base[:4], "reshaped": base.view(3, 4)}
    state |= {"empty": base[:0], "also empty": torch.zeros(0)}
    path = new_path()
    holdfast.save(state, path)
    checkpoint = holdfast.open(path)
    found = {name: checkpoint.info(name).tied_to for name in checkpoint.names()}
    assert {name for name, tie in found.items() if tie} == {"b.c"}
    assert same(checkpoint.state(), state)


def test_an_optimizer_over_tied_weights_names_them_once(new_path: NewPath) -> None:
    model = Tied()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.head(model.embedding(torch.arange(4))).sum().backward()
    optimizer.step()
    path = new_path()
    holdfast.save({"model": model, "optimizer": optimizer}, path)
    again = Tied()
    optimizer_again = optim.SGD(again.parameters(), 0.5)
    holdfast.load(path, into={"model": again, "optimizer": optimizer_again})
    assert same(optimizer.state_dict(), optimizer_again.state_dict())


class Remembering(nn.Module):
    """A module with buffers and an extra state of any form."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.register_buffer("kept", torch.full((3,), 2.0))
        self.register_buffer("passing", torch.full((3,), 3.0), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRAS: list[tuple[Any, Any]] = [
    ({"scale": 0.5, "history": [1, 2]}, None),
    ({"scale": 0.5}, {}),
    (None, {"scale": 0.5}),
    (7, {"scale": 0.5}),
    ({"amax": torch.ones(3), "parts": [torch.ones(2), 5]}, {"amax": torch.zeros(1)}),
    (torch.ones(4), torch.zeros(0)),
    (OrderedDict(a=1), OrderedDict()),
]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: str(extra[0])[:30])
def test_buffers_and_extra_state_come_back_whatever_the_target_had(
    new_path: NewPath, extra: tuple[Any, Any]
) -> None:
    path = new_path()
    holdfast.save({"m": Remembering(extra[0])}, path)
    target = Remembering(extra[1])
    target.kept.zero_()  # type: ignore[operator]
    target.passing.zero_()  # type: ignore[operator]
    holdfast.load(path, into={"m": target})
    assert same(target.extra, extra[0])
    assert target.kept.tolist() == [2.0] * 3  # type: ignore[operator]
    assert target.passing.tolist() == [0.0] * 3  # type: ignore[operator]


def test_a_module_that_overrides_load_state_dict_is_asked_to_load(new_path: NewPath) -> None:
    class Asked(nn.Linear):
        asked = 0

        def load_state_dict(self, *arguments: Any, **keywords: Any) -> Any:
            self.asked += 1
            return super().load_state_dict(*arguments, **keywords)

    path = new_path()
    holdfast.save({"m": Asked(2, 2)}, path)
    target, plain = Asked(2, 2), nn.Linear(2, 2)
    hooks: list[str] = []
    plain.register_load_state_dict_post_hook(lambda *_: hooks.append("called"))
    holdfast.load(path, into={"m": target})
    holdfast.load(path, into={"m": plain})
    assert (target.asked, hooks) == (1, ["called"])
    assert same(weights(target), weights(plain))


def test_a_plain_state_dict_and_a_module_are_one(new_path: NewPath) -> None:
    model = net()
    from_module, from_dict = new_path(), new_path()
    holdfast.save({"model": model}, from_module)
    holdfast.save({"model": model.state_dict()}, from_dict)
    for path in (from_module, from_dict):
        other = net(seed=1)
        holdfast.load(path, into={"model": other})
        assert same(weights(other), weights(model))
        values = weights(net(seed=2))
        holdfast.load(path, into={"model": values})
        assert same(values, weights(model))
        assert same(holdfast.open(path).state()["model"], weights(model))


def test_modules_in_lists_and_below_dicts_are_found(new_path: NewPath) -> None:
    first, second = net(), net(seed=1)
    optimizer = optim.SGD([*first.parameters(), *second.parameters()], 0.1, momentum=0.5)
    state = {"parts": [first, {"deep": (second,)}], "optimizer": optimizer}
    train(nn.Sequential(first, nn.Linear(2, 4), second), optimizer, range(1))
    path = new_path()
    holdfast.save(state, path)
    names = holdfast.open(path).names()
    assert "parts.0.0.weight" in names
    assert "parts.1.deep.0.0.weight" in names
    assert "optimizer.state.parts.1.deep.0.0.weight.momentum_buffer" in names


class Custom:
    """What saves itself: its state is whatever it says."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


SHARED = torch.zeros(3)
STATES: list[tuple[Any, Any]] = [
    ({"seen": 5, "queue": [torch.ones(2), torch.ones(3)]}, {"seen": 0, "queue": []}),
    ({"queue": []}, {"queue": [torch.ones(1)], "gone": 1}),
    ([1, 2, 3], {}),
    (torch.ones(2), None),
    ({}, {"a": 1}),
    ({1: {"1": torch.ones(1)}, -2: "x"}, {}),
    ({"a": Counter(x=2), "b": Counter()}, {"a": Counter(), "b": Counter(y=1)}),
    ({"d": defaultdict(list, a=[1])}, {"d": defaultdict(list)}),
    ({"p": Pair(torch.ones(2), 3)}, {"p": Pair(torch.zeros(2), 0)}),
    ({"h": [torch.ones(3), torch.full((3,), 2.0)]}, {"h": [SHARED, SHARED]}),
    ({"e": torch.ones(3)}, {"e": torch.zeros(1).expand(3)}),
    ({"t": torch.ones(3, dtype=torch.int8)}, {"t": torch.ones(3)}),
]


@pytest.mark.parametrize("states", STATES, ids=lambda states: str(states[0])[:30])
def test_an_object_that_saves_itself_gets_back_what_it_gave(
    new_path: NewPath, states: tuple[Any, Any]
) -> None:
    saved, present = states
    path = new_path()
    holdfast.save({"custom": Custom(saved)}, path)
    target = Custom(present)
    holdfast.load(path, into={"custom": target})
    assert same(target.state, saved)


def test_a_container_with_tensors_is_not_replaced_by_a_value(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"average": None, "step": 3}, path)
    into: dict[str, Any] = {"average": {"w": torch.zeros(2)}, "step": 0}
    with pytest.raises(MismatchError, match=r"average\.w"):
        holdfast.load(path, into=into)
    assert into["step"] == 0


@pytest.mark.parametrize("below", ["value", "dict", "tuple"])
def test_a_value_in_a_mapping_that_cannot_be_set_is_refused_first(
    new_path: NewPath, below: str
) -> None:
    def held(number: int) -> Any:
        nested = (torch.full((1,), float(number)), number)
        return {"value": number, "dict": MappingProxyType({"n": number}), "tuple": nested}[below]

    path, weight = new_path(), torch.zeros(2)
    holdfast.save({"w": torch.ones(2), "fixed": MappingProxyType({"a": held(1)})}, path)
    into = {"w": weight, "fixed": MappingProxyType({"a": held(0)})}
    with pytest.raises(StateError, match=r"^fixed\.a.* in a mapping that cannot be changed"):
        holdfast.load(path, into=into)
    assert weight.tolist() == [0, 0]
    with pytest.raises(StateError, match="cannot be changed"):
        holdfast.load(path, into=MappingProxyType(into), strict=False)
    assert weight.tolist() == [0, 0]


def test_tensors_and_objects_in_a_mapping_that_cannot_be_set_are_filled(new_path: NewPath) -> None:
    def state(number: int) -> dict[str, Any]:
        lists, custom = {"l": [torch.full((1,), 1.0 * number), number]}, Custom({"n": number})
        fixed = {"w": torch.full((2,), 1.0 * number), "below": lists, "custom": custom}
        return {"fixed": MappingProxyType(fixed | {"lost": number} if not number else fixed)}

    path, into = new_path(), MappingProxyType(state(0))
    holdfast.save(state(1), path)
    holdfast.load(path, into=into, strict=False)
    fixed = into["fixed"]
    assert (fixed["w"].tolist(), fixed["lost"]) == ([1.0, 1.0], 0)
    assert (fixed["below"]["l"], fixed["custom"].state) == ([torch.ones(1), 1], {"n": 1})


def test_values_and_tensors_in_tuples_and_lists_are_set_in_place(new_path: NewPath) -> None:
    path = new_path()
    state = {"l": [torch.ones(1), 5], "t": (torch.ones(1), (6, torch.ones(2))), "p": [7, [8]]}
    holdfast.save(state | {"pair": Pair(torch.ones(1), 9)}, path)
    weight, listed = torch.zeros(1), [torch.zeros(1), 0]
    into: dict[str, Any] = {"l": listed, "t": (weight, (0, torch.zeros(2))), "p": []}
    into["pair"] = Pair(torch.zeros(1), 0)
    holdfast.load(path, into=into)
    assert same(into, state | {"pair": Pair(torch.ones(1), 9)})
    assert into["l"] is listed
    assert into["t"][0] is weight
