"""Names and values, DCP's and ours: what one opens, the other finds."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from holdfast.convert.dcp_paths import joined, opened, path_of
from holdfast.errors import StateError
from holdfast.integrations.dcp.names import dtype_of, fqns_of, keys_of, natural, place_of
from holdfast.layout import Path

LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.tuples(st.integers()))
VALUES = st.recursive(
    LEAVES,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.dictionaries(st.sampled_from("abc"), below, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@given(VALUES)
@settings(max_examples=60, deadline=None)
def test_values_are_opened_as_dcp_opens_them(value: Any) -> None:
    flat, keys = flatten_state_dict({"top": value})
    ours = dict(opened(("top",), value))
    assert {fqn: ours[path] for path, fqn in fqns_of(ours).items()} == flat
    assert {fqn: keys_of(path) for path, fqn in fqns_of(ours).items()} == keys


@given(VALUES)
@settings(max_examples=60, deadline=None)
def test_lists_that_were_opened_are_joined_again(value: Any) -> None:
    flat, keys = flatten_state_dict({"top": value})
    parts = {path_of(fqn, keys): item for fqn, item in flat.items()}
    whole = joined(parts, [])
    assert dict(leaf for path, item in whole.items() for leaf in opened(path, item)) == parts
    if isinstance(value, list):
        assert whole == {("top",): value}


def test_a_list_with_a_gap_or_a_tensor_stays_apart() -> None:
    first, second = (("list", 0), "n"), (("list", 2), "n")
    with_gap: dict[Path, Any] = {("a", *first): 1, ("a", *second): 2}
    assert joined(with_gap, []) == with_gap
    beside: dict[Path, Any] = {("a", *first): 1, ("a", ("list", 1), "n"): 2}
    assert joined(beside, [("a", ("list", 2))]) == beside
    assert joined(beside, [("b",)]) == {("a",): [{"n": 1}, {"n": 2}]}


@pytest.mark.parametrize(
    ("planner_data", "path"),
    [
        ({"a.0.b": ("a", 0, "b")}, ("a", ("list", 0), "b")),
        ({"a.0.b": ("a", "0.b")}, ("a", "0.b")),
        ({"a.0.b": ("renamed", "b")}, ("a.0.b",)),
        ({"a.0.b": "text"}, ("a.0.b",)),
        ({}, ("a.0.b",)),
        (None, ("a.0.b",)),
    ],
)
def test_the_path_behind_a_name(planner_data: Any, path: Path) -> None:
    assert path_of("a.0.b", planner_data) == path


def test_names_that_look_the_same_are_told_apart() -> None:
    paths: list[Path] = [("a", "b"), ("a.b",), ("c",)]
    names = fqns_of(paths)
    assert names[("c",)] == "c" and len(set(names.values())) == 3


def test_numbers_are_sorted_as_numbers() -> None:
    names = ["w.10.b", "w.2.b", "w.2.a", "w", "w.02.a", "10", "9"]
    assert sorted(names, key=natural)[:2] == ["9", "10"]
    assert sorted(names, key=natural).index("w.2.b") < sorted(names, key=natural).index("w.10.b")
    assert sorted(names, key=natural) == sorted(reversed(names), key=natural)


def test_a_dtype_that_cannot_be_held_is_named() -> None:
    with pytest.raises(StateError, match=r"w has the dtype torch\.qint8"):
        dtype_of(torch.qint8, "w")


def test_a_url_is_a_place() -> None:
    assert place_of("holdfast:///a/b") == "/a/b" and place_of("holdfast://a/b") == "a/b"
