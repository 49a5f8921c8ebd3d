"""The tree of names: how it is cut, joined and opened."""

import pytest

from holdfast.tools.families import join_figures, label
from holdfast.tools.tree import DEPTH_MAX, Leaf, Node, grow, rows_of, split_name


def tree(*names: str, join: bool = True) -> Node:
    leaf = Leaf("f32", "[2]", tensors=1, size_bytes=8, shards=1)
    return grow(((name, leaf) for name in names), join=join)


def keys(root: Node, limit: int | None = None) -> list[str]:
    """Each row as its indented key, with the number of alike nodes or hidden ones."""
    return [
        f"{' ' * row.depth}+{row.hidden}"
        if row.hidden
        else f"{' ' * row.depth}{row.node.key}{f' x{row.node.alike}' if row.node.alike > 1 else ''}"
        for row in rows_of(root, limit)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.b.0", ["a", "b", "0"]),
        ("", [""]),
        ("a..b.", ["a", "", "b", ""]),
        ("a\\.b.c", ["a\\.b", "c"]),
        ("a\\\\.b", ["a\\\\", "b"]),
        ("[0].(1)", ["[0]", "(1)"]),
        ("a\nb.c", ["a\nb", "c"]),
    ],
)
def test_names_are_cut_at_dots_that_are_not_escaped(name: str, expected: list[str]) -> None:
    assert split_name(name) == expected


def test_the_depth_is_bounded_and_nothing_is_lost() -> None:
    name = ".".join("ab" * 500)
    found = split_name(name)
    assert len(found) == DEPTH_MAX and ".".join(found) == name


def test_chains_are_one_row() -> None:
    assert keys(tree("a.b.c", "a.b.d", "e.f")) == ["a.b", " c", " d", "e.f"]


def test_alike_siblings_are_joined_within_joined_ones() -> None:
    names = [f"layers.{i}.experts.{j}.w" for i in range(3) for j in range(4)]
    root = tree(*names)
    assert keys(root) == ["layers.0…2.experts x3", " 0…3.w x4"]
    (leaf,) = root.leaves()
    assert (leaf.tensors, leaf.size_bytes, leaf.shards) == (12, 96, 12)
    assert len(keys(tree(*names, join=False))) == 1 + 3 + 12


def test_a_number_inside_a_key_joins_too() -> None:
    assert keys(tree("block_0.w", "block_1.w", "head_a.w")) == ["block_0…1.w x2", "head_a.w"]


def test_a_name_may_be_a_leaf_and_a_branch() -> None:
    assert keys(tree("a", "a.b")) == ["a", " b"]


def test_the_upper_levels_open_first() -> None:
    root = tree("a.b.x", "a.b.y", "a.c", "d.x", "d.y", join=False)
    assert keys(root) == ["a", " b", "  x", "  y", " c", "d", " x", " y"]
    assert keys(root, 6) == ["a", " b", " c", "d", " x", " y"]
    assert keys(root, 4) == ["a", " b", " c", "d"]
    assert keys(root, 2) == ["a", "d"]


def test_a_branch_that_does_not_fit_is_opened_in_part() -> None:
    root = tree(*(f"a.{key}" for key in "bcdefg"), "h", join=False)
    assert keys(root, 6) == ["a", " b", " c", " d", " +3", "h"]


def test_a_family_is_named_by_its_ranges() -> None:
    assert label(["a.9.b.1", "a.10.b.1"]) == "a.9…10.b.1 (x2)"
    assert label(["only.1"]) == "only.1"


def test_joined_figures_weigh_each_element_alike() -> None:
    common = {"not_finite": 0, "max_abs": 4.0}
    entries = [
        {**common, "name": "w.0", "elements": 1, "differing": 1, "mean_abs": 4.0},
        {**common, "name": "w.1", "elements": 3, "differing": 2, "mean_abs": 1.0, "not_finite": 1},
    ]
    (joined,) = join_figures(entries)
    assert joined == {
        **{"name": "w.0…1 (x2)", "elements": 4, "differing": 3},
        **{"not_finite": 1, "max_abs": 4.0, "mean_abs": 2.0},
    }
