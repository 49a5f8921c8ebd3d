"""Dotted names: what people read is short where it can be, and never ambiguous."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.format.names import (
    FOREIGN_MAX,
    data_file_name,
    display_names,
    foreign_of,
    misnamed,
    step_name,
    step_of,
)
from holdfast.layout import Key, Path

# (keys of a state, each opened by the next; the names in the order of the state). A state holds
# tensors of its own at every place, for equal memory would make ties.
STATES: list[tuple[dict[Any, Any], list[str]]] = [
    ({"model": {"layer.weight": 0}, "0": 0}, ["model.layer.weight", "0"]),
    ({"a.b": 0, "a": {"b": 0}}, [r"a\.b", "a.b"]),
    ({"1": 0, 1: 0}, ['"1"', "1"]),
    ({"s": {"-7": 0, -7: 0, "x": 0}}, ['s."-7"', "s.-7", "s.x"]),
    ({"l": [0, 0]}, ["l.0", "l.1"]),
    ({"l": [0], "l.0": 0}, ["l.[0]", r"l\.0"]),
    ({"t": (0,), "t.0": 0}, ["t.(0)", r"t\.0"]),
    ({"d": {0: 0, "0": 0}, "d.0": 0}, ["d.0", 'd."0"', r"d\.0"]),
    ({"": 0}, [""]),
    ({"": {"": 0}, ".": 0}, ['"".""', r"\."]),
    ({'"q"': 0, "[0]": 0, "(0)": 0}, [r"\"q\"", r"\[0\]", r"\(0\)"]),
    ({"back\\slash": 0, "line\nbreak": 0}, [r"back\\slash", r"line\x0abreak"]),
    ({"\x7f": 0, "\x00.": 0}, [r"\x7f", r"\x00\."]),
    ({"é": 0, "\u0663": 0, "日.本": 0}, ["é", "\u0663", "日.本"]),
    ({"a": {"b.c": 0}, "a.b": {"c": 0}, "a.b.c": 0}, [r"a.b\.c", r"a\.b.c", r"a\.b\.c"]),
]


def filled(value: Any, numbers: Iterator[int]) -> Any:
    """The same containers with a tensor of its own at every place."""
    if isinstance(value, dict):
        return {key: filled(item, numbers) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([filled(item, numbers) for item in value])
    return torch.tensor([float(next(numbers))])


@pytest.mark.parametrize(("keys", "names"), STATES, ids=lambda case: ascii(case)[:40])
def test_names_are_dotted_and_escaped_where_two_would_be_alike(
    new_path: Callable[[], FilePath], keys: dict[Any, Any], names: list[str]
) -> None:
    path = new_path()
    holdfast.save(filled(keys, itertools.count()), path)
    checkpoint = holdfast.open(path)
    assert checkpoint.names() == names
    assert [checkpoint.tensor(name).item() for name in names] == list(range(len(names)))
    assert [checkpoint.info(name).name for name in names] == names


def test_objects_and_tensors_share_one_space_of_names(new_path: Callable[[], FilePath]) -> None:
    path = new_path()
    holdfast.save({"a.b": torch.ones(1), "a": {"b": 5}}, path)
    checkpoint = holdfast.open(path)
    assert (checkpoint.names(), checkpoint.objects()) == ([r"a\.b"], {"a.b": 5})


characters = st.sampled_from('ab01-.\\"[]()\n\x7fé\u0663')
keys = st.one_of(
    st.text(characters, max_size=4),
    st.integers(-2, 2),
    st.tuples(st.sampled_from(["list", "tuple"]), st.integers(0, 2)),
)


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.sets(st.lists(keys, min_size=1, max_size=3).map(tuple), max_size=8))
def test_no_two_paths_have_one_name_and_no_name_breaks_a_line(paths: set[Path]) -> None:
    names = display_names(paths)
    assert len(set(names.values())) == len(paths)
    assert not any(ord(c) < 32 or ord(c) == 127 for name in names.values() for c in name)


def test_a_position_is_not_an_integer_key() -> None:
    position: Key = ("list", 1)
    assert display_names([(position,), (1,), ("1",)]) == {
        (position,): "[1]",
        (1,): "1",
        ("1",): '"1"',
    }


def test_names_of_steps_and_files_are_one_to_one() -> None:
    assert [step_name(step) for step in (0, 1200, 10**9)] == [
        "step-00000000",
        "step-00001200",
        "step-1000000000",
    ]
    for name in ("step-1200", "step-000001200", "step-0000120x", "step-00001200/", "LATEST", ""):
        assert step_of(name) is None
    assert step_of("step-1000000000") == 10**9
    assert step_of("step-0000\u0661200") is None
    assert data_file_name("ab" * 16, 3, 0) == f"data/{'ab' * 16}/00003-0.hf"
    assert data_file_name("ab" * 16, 123456, 10) == f"data/{'ab' * 16}/123456-10.hf"


def test_a_name_of_another_step_is_told() -> None:
    assert "named step 6, but holds step 5" in str(misnamed("step-00000006", 5))
    for name, step in (("step-00000006", 6), ("step-00000006", None), ("step-6", 5), ("x", 5)):
        assert misnamed(name, step) is None


def test_of_foreign_names_the_first_are_held_and_all_are_counted() -> None:
    ours = ["MANIFEST", "SIGNATURE", "data", ".manifest-of-the-dead"]
    names = [f"{n:05}.bin" for n in range(5 * FOREIGN_MAX)]
    found = foreign_of([*ours, *reversed(names)])
    assert found.names == tuple(names[:FOREIGN_MAX])
    assert found.count == len(names) and found.of_dcp == ()


def test_some_files_of_dcp_are_told_wherever_they_stand_among_others() -> None:
    ours = [f"__{n}_0.distcp" for n in range(5)]
    found = foreign_of(["a", ours[0], "b", "MANIFEST", *ours[1:], "c"])
    assert found.of_dcp == tuple(ours[:3])
    assert found.count == 8 and set(found.names) == {"a", "b", "c", *ours}
