"""Paths that look the same when their keys are joined by dots: rename, include and exclude."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format.simulated_ranks import run_ranks
from holdfast import Options, Value
from holdfast.errors import MismatchError
from holdfast.loading.selection import moved

from .training import same

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=32 << 20)


def one(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


def saved(new_path: NewPath, state: dict[Any, Any]) -> Path:
    holdfast.save(state, path := new_path())
    return path


TWINS: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
    ({"a.b": one(1), "a": {"b": one(2)}}, {"a.b": one(0), "a": {"b": one(0)}}),
    ({1: one(1), "1": one(2)}, {1: one(0), "1": one(0)}),
    ({"a.b": "dotted", "a": {"b": "nested"}}, {"a.b": "", "a": {"b": ""}}),
    ({"a[0]": one(1), "a": [one(2)]}, {"a[0]": one(0), "a": [one(0)]}),
    ({"a.b": {"v": one(1)}, "a": {"b": {"v": one(2)}}}, {"a.b": Value(), "a": {"b": Value()}}),
    ({"a.b": {"v": one(1)}, "a": {"b": {"w": 2}}}, {"a.b": Value(), "a": {"b": Value()}}),
    ({"a.b.v": one(1), "a.b": {"v": one(2)}}, {"a.b.v": one(0), "a.b": Value()}),
]


@pytest.mark.parametrize("options", [{"partial": True}, {"strict": False}])
@pytest.mark.parametrize(("state", "into"), TWINS)
def test_a_rename_of_others_leaves_each_name_its_own_path(
    new_path: NewPath, state: Any, into: Any, options: Any
) -> None:
    path = saved(new_path, {"x": one(9), **state})
    target = dict(into)
    holdfast.load(path, into=target, rename={"x": "y"}, **options)
    assert same(target, state)


@pytest.mark.parametrize(("state", "into"), TWINS)
def test_paths_that_look_the_same_follow_a_rename(new_path: NewPath, state: Any, into: Any) -> None:
    path = saved(new_path, {"p": {**state, "x": 3}})
    target = {"q": {**into, "x": 0}}
    holdfast.load(path, into=target, rename={"p": "q"})
    assert same(target["q"], {**state, "x": 3})
    assert same(holdfast.open(path, rename={"p": "q"}).state(), {"q": {**state, "x": 3}})


def test_a_part_of_a_checkpoint_has_the_keys_that_were_saved(new_path: NewPath) -> None:
    state = {"x": one(1), "a[0]": one(2), "a.b": one(3), "a": {"b": one(4)}, 1: 5, "1": 6}
    path = saved(new_path, state)
    part = {key: value for key, value in state.items() if key != "x"}
    assert same(holdfast.open(path, exclude="x").state(), part)
    assert same(holdfast.open(path, rename={"x": "y"}).state(), {**part, "y": one(1)})


def test_a_new_name_may_be_one_of_another_cut_than_a_name_that_is_there(new_path: NewPath) -> None:
    path = saved(new_path, {"x": one(9), "a.b": one(1), "a": {"b": one(2)}})
    rename = {"a.b": "z", "x": "a.b"}
    wanted = {"z": one(2), "a.b": one(1), "a": {"b": one(9)}}
    assert same(holdfast.open(path, rename=rename).state(), wanted)
    target: dict[str, Any] = {"z": one(0), "a.b": one(0), "a": {"b": one(0)}}
    holdfast.load(path, into=target, rename=rename)
    assert same(target, wanted)


def test_a_name_alone_is_found_however_its_keys_cut_it(new_path: NewPath) -> None:
    path = saved(new_path, {"x": one(9), "a.b": one(1), "c": {"d": 2}})
    target: dict[str, Any] = {"y": {"z": one(0)}, "a": {"b": one(0)}, "c.d": 0}
    holdfast.load(path, into=target, rename={"x": "y.z"})
    assert same(target, {"y": {"z": one(9)}, "a": {"b": one(1)}, "c.d": 2})


@pytest.mark.parametrize("strict", [True, False])
def test_one_name_does_not_fill_two_of_the_target(new_path: NewPath, strict: bool) -> None:
    path = saved(new_path, {"x": one(9), "a.b": one(1)})
    target = {"a.b": one(0), "a": {"b": one(0)}}
    with pytest.raises(MismatchError, match=r"a\.b and a\\\.b in the target would both be a\\\.b"):
        holdfast.load(path, into=target, rename={"x": "y"}, strict=strict, partial=True)
    assert same(target, {"a.b": one(0), "a": {"b": one(0)}})


OTHER_KEYS: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
    ({"1": one(1)}, {1: one(0)}),
    ({1: one(1)}, {"1": one(0)}),
    ({"l": [one(1)]}, {"l": (one(0),)}),
    ({"l": [one(1)]}, {"l": {0: one(0)}}),
    ({1: {"v": one(1)}}, {"1": Value()}),
]


@pytest.mark.parametrize("rename", [None, {"x": "y"}])
@pytest.mark.parametrize(("state", "into"), OTHER_KEYS)
def test_keys_of_other_types_are_others_with_and_without_a_rename(
    new_path: NewPath, state: Any, into: Any, rename: Any
) -> None:
    path = saved(new_path, {"x": one(9), **state})
    with pytest.raises(MismatchError, match="1 is missing in the checkpoint"):
        holdfast.load(path, into=into, rename=rename, partial=True)


ESCAPED: list[tuple[Any, str, str, Any]] = [
    (("p", "a.b"), r"p.a\.b", r"q.a\.b", ("q", "a.b")),
    (("p", "a.b"), r"p.a\.b", r"a\.b", ("a.b",)),
    (("p", "a.b"), r"p.a\.b", r"q.r.a\.b", ("q", "r", "a.b")),
    (("p", "a.b"), r"p.a\.b", r"p.c\.d", ("p", "c.d")),
    (("p.q", "a.b"), r"p\.q.a\.b", r"r\.s.a\.b", ("r.s", "a.b")),
    (("a[0]",), r"a\[0\]", r"b\[0\]", ("b[0]",)),
    (("p", "1"), 'p."1"', 'q."1"', ("q", "1")),
    (("p", ("list", 1), "a\n"), r"p.[1].a\x0a", r"q.[1].b\x0a", ("q", ("list", 1), "b\n")),
    (("p", ("list", 1), "a\\"), r"p.[1].a\\", r"p.(2).a\\", ("p", ("tuple", 2), "a\\")),
]


@pytest.mark.parametrize(("path", "old", "name", "after"), ESCAPED)
def test_the_keys_of_an_escaped_name_are_not_escaped(
    path: Any, old: str, name: str, after: Any
) -> None:
    assert moved(path, old, old) == path
    assert moved(path, name, old) == after


KEPT: list[tuple[dict[Any, Any], str, list[Any]]] = [
    ({"x": 1, "a[0]": 2}, "x", ["x"]),
    ({"x": 1, "a[0]": 2, "a\\": 3, "]": 4}, "x", ["x"]),
    ({"x": 1, "a.b": 2, "a": {"b": 3}}, "a.b", ["a"]),
    ({"x": 1, "a.b": 2, "a": {"b": 3}}, "a", ["a"]),
    ({"x": 1, "a.b": 2, "a": {"b": 3}}, r"a\.b", ["a.b"]),
    ({1: 1, "1": 2}, "1", [1]),
    ({1: 1, "1": 2}, '"1"', ["1"]),
]


def emptied(state: Any) -> Any:
    return {k: emptied(v) if isinstance(v, dict) else 0 for k, v in state.items()}


@pytest.mark.parametrize("rename", [None, {"old": "new"}])
@pytest.mark.parametrize(("state", "include", "kept"), KEPT)
def test_what_is_not_included_stays_as_it_is_whatever_its_keys(
    new_path: NewPath, state: Any, include: str, kept: list[Any], rename: Any
) -> None:
    path = saved(new_path, {**state, "old": 7})
    target = emptied(state) | {("new" if rename else "old"): 0}
    report = holdfast.load(path, into=target, include=[include, "old"], rename=rename)
    assert (report.missing, report.unexpected) == ((), ())
    wanted = emptied(state) | {key: state[key] for key in kept}
    assert target == {**wanted, ("new" if rename else "old"): 7}


@pytest.mark.parametrize("rename", [None, {"x": "y"}])
def test_what_only_looks_like_a_name_that_is_left_out_is_missing(
    new_path: NewPath, rename: Any
) -> None:
    path = saved(new_path, {"x": 1, "a.b": 2, "c": {"d": one(1)}, "o": {"p": {"s": one(2)}}})
    into = {"a.b": 0, "a": {"b": 0}, "c": Value(), "c.d": one(0), "o": {"p": Value()}}
    given: dict[str, Any] = {"exclude": ["a.b", "c", "o.p.s"], "rename": rename, "partial": True}
    with pytest.raises(MismatchError, match=r"2 are missing in the checkpoint: a\.b, c\.d\."):
        holdfast.load(path, into=into, **given)
    with pytest.raises(MismatchError, match=r"1 is missing in the checkpoint: o\.p\."):
        holdfast.load(path, into={"o": {"p": Value()}, "o.p": Value()}, **given)
    holdfast.load(path, into=(alone := {"a": {"b": 0}}), **given)
    assert alone == {"a": {"b": 0}}


def test_what_is_left_out_fills_nothing_that_looks_the_same(new_path: NewPath) -> None:
    path = saved(new_path, {"x": 9, "a.b": 1, "a": {"b": 2}})
    target = {"y": 0, "a": {"b": 0}}
    holdfast.load(path, into=target, exclude="a.b", rename={"x": "y"}, partial=True)
    assert target == {"y": 9, "a": {"b": 0}}


def test_a_new_name_may_be_that_of_what_is_left_out(new_path: NewPath) -> None:
    path = saved(new_path, {"old": {"w": 1}, "net": {"w": 2, "b": 3}})
    target = {"net": {"w": 0, "b": 0}}
    holdfast.load(path, into=target, include="old", rename={"old": "net"})
    assert target == {"net": {"w": 1, "b": 0}}


def trained() -> dict[str, Any]:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    optimizer = torch.optim.AdamW(layers.parameters())
    layers[0](torch.rand(1, 2)).sum().backward()
    optimizer.step()
    return {"net[0]": layers, "optimizer (1)": optimizer}


@pytest.mark.parametrize("by_number", [False, True])
def test_an_optimizer_s_state_is_left_out_under_any_name(
    new_path: NewPath, by_number: bool
) -> None:
    state, into = trained(), trained()
    weight, optimizer = into["net[0]"][0].weight, into["optimizer (1)"]
    if by_number:
        state = {"optimizer (1)": state["optimizer (1)"].state_dict()}
        into = {"optimizer (1)": optimizer}
    path = saved(new_path, state)
    before = {key: value.clone() for key, value in optimizer.state[weight].items()}
    number = "0" if by_number else r"0\.weight"
    name = rf"optimizer \(1\).state.{number}.exp_avg_sq"
    report = holdfast.load(path, into=into, exclude=name)
    assert report.missing == ()
    assert same(dict(optimizer.state[weight]), before)


LOOKALIKES: list[tuple[dict[Any, Any], dict[Any, Any], str]] = [
    ({1: 5}, {"1": 0}, '1 is the text "1" in the target, and the integer 1 in the checkpoint'),
    ({"a": {"1": 5}}, {"a": {1: 0}}, "a.1 is the integer 1 in the target, and the text"),
    ({"a.b": 5}, {"a": {"b": 0}}, r"a.b is a.b in the target, and a\.b in the checkpoint"),
    ({"l": [one(1)]}, {"l": (one(0),)}, "l is a tuple in the target, and a list in the"),
    ({"l": [one(1)]}, {"l": {0: one(0)}}, "l is a dict in the target, and a list in the"),
    ({"\xe9": 5}, {"e\u0301": 0}, "e\u0301 is 'e\\u0301' in the target, and '\\xe9' in the"),
]


@pytest.mark.parametrize(("state", "into", "text"), LOOKALIKES)
def test_names_that_look_the_same_are_told_apart(
    new_path: NewPath, state: Any, into: Any, text: str
) -> None:
    path = saved(new_path, state)
    with pytest.raises(MismatchError) as refused:
        holdfast.load(path, into=into)
    assert f"But some only look the same: {text}" in str(refused.value)


def test_names_that_fit_and_names_that_were_changed_are_no_lookalikes(new_path: NewPath) -> None:
    path = saved(new_path, {1: 1, "2": 2, "z": 3})
    for into, rename in (({1: 0, "1": 0}, None), ({2: 0}, {"2": "y"}), ({"z": 0}, {"z": "y"})):
        with pytest.raises(MismatchError, match="1 is missing in the checkpoint") as refused:
            holdfast.load(path, into=into, rename=rename, partial=True)
        assert "look the same" not in str(refused.value)


def test_ranks_tell_names_that_look_the_same_apart(new_path: NewPath) -> None:
    path = saved(new_path, {1: one(1), "x": one(2)})

    def load(group: Any) -> str:
        into = {1: one(0)} if group.rank == 0 else {"x": one(0), "1": one(0)}
        with pytest.raises(MismatchError) as refused:
            holdfast.load(path, into=into, group=group, options=SMALL)
        return str(refused.value)

    first, second = run_ranks(2, load)
    assert first == second
    assert '1 is the text "1" in the target, and the integer 1' in first


def test_a_rename_of_others_leaves_the_key_without_letters(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"": torch.ones(1), "x": torch.zeros(1)}, path)
    target = {"": torch.zeros(1), "y": torch.ones(1)}
    holdfast.load(path, into=target, rename={"x": "y"})
    assert (target[""].item(), target["y"].item()) == (1.0, 0.0)
