"""A part of a checkpoint, under other names: include, exclude, rename; assign; `holdfast.Value`."""

import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from format.simulated_ranks import run_ranks
from holdfast import Checkpointer, Options
from holdfast.errors import MismatchError, OptionError, StateError
from holdfast.loading.selection import moved

from .training import same

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=32 << 20)


def trained(seed: int = 0, **layers: nn.Module) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.ModuleDict(layers or {"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.ones(1, 4)).sum() for layer in model.values()).backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": seed}


def moments(state: dict[str, Any], layer: str) -> torch.Tensor:
    moment: torch.Tensor = state["optimizer"].state[state["model"][layer].weight]["exp_avg"]
    return moment


def test_what_is_not_included_stays_as_it_is(new_path: NewPath) -> None:
    holdfast.save(saved := trained(), path := new_path())
    into = trained(seed=1)
    before = moments(into, "body").clone()
    report = holdfast.load(path, into=into, include=["model", "epoch"], exclude="*.head")
    assert (report.missing, report.unexpected, report.skipped) == ((), (), {})
    assert into["model"]["body"].weight.equal(saved["model"]["body"].weight)
    assert not into["model"]["head"].weight.equal(saved["model"]["head"].weight)
    assert into["epoch"] == 0
    assert moments(into, "body").equal(before)
    into["optimizer"].step()


def test_no_part_of_an_optimizer_s_state_is_loaded_without_the_rest(new_path: NewPath) -> None:
    holdfast.save(saved := trained(), path := new_path())
    into = trained(seed=1)
    before = moments(into, "head").clone()
    holdfast.load(path, into=into, exclude="optimizer.state.head.weight.exp_avg_sq")
    assert moments(into, "head").equal(before)
    assert moments(into, "body").equal(moments(saved, "body"))
    assert moments(into, "body").count_nonzero()
    into["optimizer"].step()


def test_what_neither_side_leaves_out_must_still_fit(new_path: NewPath) -> None:
    holdfast.save(trained(), path := new_path())
    into = {"model": trained(head=nn.Linear(4, 2), other=nn.Linear(4, 4))["model"]}
    with pytest.raises(MismatchError, match=r"missing in the checkpoint: model\.other") as refused:
        holdfast.load(path, into=into, include="model")
    assert "missing in the target: model.body" in str(refused.value)
    assert "optimizer" not in str(refused.value)


RENAMES: list[Any] = [
    {"model.body": "net.trunk", "model.head": "net.out", "optimizer": "optimizer"},
    [(r"^model\.body", "net.trunk"), (r"^model\.head", "net.out")],
    lambda name: name.replace("model.body", "net.trunk").replace("model.head", "net.out"),
]


@pytest.mark.parametrize("rename", RENAMES)
def test_names_are_changed_by_a_dict_by_patterns_and_by_a_function(
    new_path: NewPath, rename: Any
) -> None:
    holdfast.save(saved := trained(), path := new_path())
    model = trained(seed=1, trunk=nn.Linear(4, 4), out=nn.Linear(4, 2))["model"]
    report = holdfast.load(path, into={"net": model, "epoch": 9}, rename=rename, partial=True)
    assert {name.split(".")[0] for name in report.unexpected} == {"optimizer"}
    assert model["trunk"].weight.equal(saved["model"]["body"].weight)
    assert model["out"].bias.equal(saved["model"]["head"].bias)
    opened = holdfast.open(path, include="model", rename=rename)
    assert [*opened] == ["net.trunk.weight", "net.trunk.bias", "net.out.weight", "net.out.bias"]
    assert opened["net.trunk.weight"].equal(saved["model"]["body"].weight)
    assert opened.info("net.out.bias").name == "net.out.bias"
    again = pickle.loads(pickle.dumps(opened))
    assert [*again] == [*opened]
    assert again["net.out.bias"].equal(saved["model"]["head"].bias)


def test_an_optimizer_follows_its_parameters_new_names(new_path: NewPath) -> None:
    holdfast.save(saved := trained(), path := new_path())
    into = trained(seed=1, trunk=nn.Linear(4, 4), out=nn.Linear(4, 2))
    pairs = [(r"\bbody\b", "trunk"), (r"\bhead\b", "out")]
    report = holdfast.load(path, into=into, rename=pairs)
    assert (report.missing, report.unexpected) == ((), ())
    assert moments(into, "trunk").equal(moments(saved, "body"))
    into["optimizer"].step()


def test_what_is_left_out_under_another_name_stays_as_it_is(new_path: NewPath) -> None:
    holdfast.save(saved := trained(), path := new_path())
    into = trained(seed=1)
    before = moments(into, "body").clone()
    target = {"net": into["model"], "optimizer": into["optimizer"], "epoch": 0}
    report = holdfast.load(path, target, exclude="optimizer", rename={"model": "net"})
    assert (report.missing, report.unexpected) == ((), ())
    assert into["model"]["head"].weight.equal(saved["model"]["head"].weight)
    assert moments(into, "body").equal(before)
    part = "optimizer.state.body.weight.exp_avg_sq"
    holdfast.load(path, target, exclude=part, rename={"model": "net"})
    assert moments(into, "body").equal(before), "no part of it without the rest"
    assert moments(into, "head").equal(moments(saved, "head"))
    into["optimizer"].step()


def test_a_beginning_is_dropped_or_put_before(new_path: NewPath) -> None:
    holdfast.save(saved := trained(), path := new_path())
    weights = holdfast.open(path, include="model", rename={"model": ""}).state()
    assert list(weights) == ["body.weight", "body.bias", "head.weight", "head.bias"]
    saved["model"].load_state_dict(weights)
    inner = trained(seed=1)["model"]
    holdfast.load(path, into={"a": {"b": inner}}, include="model", rename={"model": "a.b"})
    assert inner["head"].weight.equal(saved["model"]["head"].weight)
    wrapped = nn.ModuleDict({"inner": trained(seed=2)["model"]})
    rename = ("^model", "model.inner")
    holdfast.load(path, into={"model": wrapped}, include="model", rename=rename)
    assert wrapped["inner"]["head"].weight.equal(saved["model"]["head"].weight)


CUT: list[tuple[Any, str, Any]] = [
    (("module.0.weight",), "0.weight", ("0.weight",)),
    (("weight",), "model.weight", ("model", "weight")),
    (("a.weight",), "b.c.weight", ("b.c.weight",)),
    (("model", "0.weight"), "0.weight", ("0.weight",)),
    (("model", "0.weight"), "a.b.0.weight", ("a", "b", "0.weight")),
    (("model", "layers.0.w"), "model.blocks.0.w", ("model", "blocks.0.w")),
    (("model", "layers.0.w"), "model.l0.w", ("model", "l0.w")),
    (("model", "0.weight"), "MODEL.0.WEIGHT", ("MODEL", "0.WEIGHT")),
    (("a", ("list", 1), "w"), "a.1.v", ("a", ("list", 1), "v")),
    (("a", ("list", 1), "w"), "b.1.w", ("b", ("list", 1), "w")),
    (("a", 0, "w"), "a.0.w", ("a", 0, "w")),
    (("a", "b", "w"), "w", ("w",)),
]


@pytest.mark.parametrize(("path", "name", "after"), CUT)
def test_the_keys_of_a_new_name_are_cut_as_before(path: Any, name: str, after: Any) -> None:
    assert moved(path, name) == after


def test_lists_and_numbered_optimizers_keep_their_keys(new_path: NewPath) -> None:
    state = trained()
    numbers = state["optimizer"].state_dict()
    holdfast.save({"opt": numbers, "parts": [torch.ones(2), {"x": 5}]}, path := new_path())
    into = trained(seed=1)["optimizer"]
    holdfast.load(path, into={"optim": into}, include="opt", rename={"opt": "optim"})
    assert same(into.state_dict(), numbers)
    found = holdfast.open(path, include="parts", rename={"parts": "all.parts"}).state()
    assert found["all"]["parts"][1] == {"x": 5}
    assert found["all"]["parts"][0].tolist() == [1, 1]


def test_tied_names_of_which_one_is_left_out(new_path: NewPath) -> None:
    weight = torch.ones(3)
    holdfast.save({"a": weight, "b": weight}, path := new_path())
    opened = holdfast.open(path, exclude="a")
    assert opened.info("b").tied_to is None
    assert opened.state()["b"].tolist() == [1, 1, 1]
    both = holdfast.open(path, rename={"b": "c"})
    assert both.info("c").tied_to == "a"
    state = both.state()
    assert state["a"] is state["c"]


def test_ranks_that_select_differently_are_named(new_path: NewPath) -> None:
    holdfast.save(trained(), path := new_path())

    def load(group: Any) -> str:
        given = {"include": "model"} if group.rank == 0 else {"include": "epoch"}
        try:
            holdfast.load(path, trained(1), **given, group=group, options=SMALL)
        except OptionError as error:
            return str(error)
        return ""

    first, second = run_ranks(2, load)
    assert first == second
    assert re.search(r"names: '\w+' on rank 0; '\w+' on rank 1", first), first


def test_ranks_load_a_part_under_other_names_together(new_path: NewPath) -> None:
    holdfast.save(saved := trained(), path := new_path())

    def load(group: Any) -> bool:
        net = trained(1)["model"]
        how: dict[str, Any] = {"include": "model", "rename": {"model": "net"}}
        holdfast.load(path, {"net": net}, **how, group=group, options=SMALL)
        return same(net.state_dict(), saved["model"].state_dict())

    assert run_ranks(2, load) == [True, True]


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({"rename": {"body": "x"}}, MismatchError, "fits 'body'"),
    ({"rename": [("nothing", "x")]}, MismatchError, "fits 'nothing'"),
    ({"rename": {"model.body": "model.head"}}, MismatchError, "one name of two"),
    ({"rename": lambda _: "same"}, MismatchError, "one name of two"),
    ({"rename": lambda name: name[99]}, OptionError, "raised IndexError"),
    ({"rename": lambda _: 3}, OptionError, "makes 3 of"),
    ({"rename": {"epoch": ""}}, OptionError, "makes '' of 'epoch'"),
    ({"rename": 3}, OptionError, "rename is 3"),
    ({"rename": {}}, OptionError, "rename is"),
    ({"rename": []}, OptionError, "rename is"),
    ({"rename": [("(", "x")]}, OptionError, "cannot be used"),
    ({"rename": [("(o)", r"\2")]}, OptionError, "cannot be used"),
    ({"rename": {"model": 3}}, OptionError, "rename is"),
    ({"include": "nothing"}, MismatchError, "nothing that 'nothing' means"),
    ({"exclude": ["model", "nothing"]}, MismatchError, "nothing that 'nothing' means"),
    ({"include": 3}, OptionError, "include is 3"),
]


@pytest.mark.parametrize(("given", "kind", "text"), REFUSED)
def test_a_selection_that_cannot_be_is_refused_before_anything_changes(
    new_path: NewPath, given: Any, kind: type[Exception], text: str
) -> None:
    with Checkpointer(new_path()) as checkpointer:
        checkpointer.save(1, trained())
        path, into = checkpointer.path(1), trained(seed=1)
        before = pickle.dumps([into["model"].state_dict(), into["epoch"]])
        for call in (
            lambda: holdfast.load(path, into=into, **given),
            lambda: holdfast.open(path, **given),
            lambda: checkpointer.restore(into, **given),
        ):
            with pytest.raises(kind, match=text):
                call()
        assert pickle.dumps([into["model"].state_dict(), into["epoch"]]) == before


def test_restore_takes_a_part_under_other_names(new_path: NewPath) -> None:
    saved = trained()
    with Checkpointer(new_path()) as checkpointer:
        checkpointer.save(5, saved)
        net = trained(seed=1)["model"]
        assert checkpointer.restore({"net": net}, include="model", rename={"model": "net"}) == 5
        assert net["body"].weight.equal(saved["model"]["body"].weight)


class Tied(nn.Module):
    """An embedding whose weight is the head's too, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.norm.weight.requires_grad = False
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_a_module_on_the_meta_device_gets_its_parameters(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    holdfast.save({"model": Tied()}, path := new_path())
    with torch.device("meta"):
        empty = Tied()
    with pytest.raises(StateError, match="assign=True"):
        holdfast.load(path, into={"model": empty})
    for assign in (True, "cpu", torch.device("cpu")):
        with torch.device("meta"):
            model = Tied()
        model.embed.weight.mark = "kept"
        with caplog.at_level(logging.WARNING, "holdfast"):
            holdfast.load(path, into={"model": model}, assign=assign)
        assert "table" in caplog.text
        assert model.head.weight is model.embed.weight
        assert isinstance(model.embed.weight, nn.Parameter)
        assert model.embed.weight.mark == "kept"
        assert not model.norm.weight.requires_grad
        assert model.norm.bias.requires_grad
        assert same(dict(model.state_dict()), holdfast.open(path, rename={"model": ""}).state())
        model.head(model.norm(model.embed(torch.tensor([1, 2])))).sum().backward()


def test_assign_fills_what_has_memory_in_place(new_path: NewPath) -> None:
    holdfast.save(saved := trained(), path := new_path())
    model = trained(seed=1)["model"]
    body = model["body"].weight
    model["head"].to("meta")
    holdfast.load(path, into={"model": model}, partial=True, assign=True)
    assert model["body"].weight is body
    assert same(model.state_dict(), saved["model"].state_dict())


def test_assign_changes_nothing_where_it_cannot_be_done(new_path: NewPath) -> None:
    holdfast.save(trained(), path := new_path())
    with torch.device("meta"):
        model = trained(seed=1)["model"].to(torch.bfloat16)
    with pytest.raises(MismatchError, match="bf16"):
        holdfast.load(path, into={"model": model}, partial=True, assign=True)
    assert all(tensor.is_meta for tensor in model.parameters())
    holdfast.load(path, into={"model": model}, partial=True, assign=True, cast=True)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    with torch.device("meta"):
        state = {"model": (m := nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)}))}
    state["optimizer"] = torch.optim.AdamW(m.parameters())
    with pytest.raises(MismatchError, match="create its optimizer"):
        holdfast.load(path, into=state, partial=True, assign=True)
    assert all(tensor.is_meta for tensor in m.parameters())
    for wrong in (3, None, "no device", "cuda:77", "meta:x"):
        with pytest.raises(OptionError, match=r"assign|device"):
            holdfast.load(path, into={"model": m}, partial=True, assign=wrong)


def test_a_skipped_parameter_stays_on_the_meta_device(new_path: NewPath) -> None:
    holdfast.save(trained(), path := new_path())
    with torch.device("meta"):
        model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 3)})
    report = holdfast.load(path, into={"model": model}, strict=False, assign=True)
    assert {*report.skipped} == {"model.head.weight", "model.head.bias"}
    assert model["head"].weight.is_meta
    assert not model["body"].weight.is_meta


def test_a_placeholder_takes_whatever_was_saved(new_path: NewPath) -> None:
    weight = torch.arange(4.0)
    nested = {"w": weight, "again": weight, "list": [torch.ones(2), (3, "x")], "n": 5}
    holdfast.save({"a": nested, "lr": 0.1, "t": weight, "l": [1, 2]}, path := new_path())
    value = holdfast.Value
    into: dict[str, Any] = {"a": value(), "lr": value(), "t": value(), "l": value()}
    holdfast.load(path, into=into)
    assert same(into, {"a": nested, "lr": 0.1, "t": weight, "l": [1, 2]})
    assert into["a"]["w"] is into["a"]["again"]
    inside: dict[str, Any] = {"a": {"w": value(), "list": [value(), value()]}}
    holdfast.load(path, into=inside, partial=True)
    assert same(inside["a"], {"w": weight, "list": [torch.ones(2), (3, "x")]})
    with pytest.raises(MismatchError, match="none"):
        holdfast.load(path, into={"none": value()}, partial=True)
    with pytest.raises(StateError, match=r"a .*Value"):
        holdfast.save({"a": value()}, new_path())
