"""The independent reader agrees with holdfast on random checkpoints, and shares no code with it."""

import ast
import contextlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import CorruptError
from holdfast.format.names import display_names
from holdfast.format.values import decode_path, decode_value, encode_path
from holdfast.layout import Path
from holdfast.state.tensors import DTYPE_NAMES
from unit.test_names import keys
from unit.test_round_trip import bits_of, exactly, filled, values

from . import display, reader
from .simulated_ranks import Piece, cut, pieces, save_pieces

NewPath = Callable[[], FilePath]
HERE = FilePath(__file__).parent
PARTS = {
    "reader",
    "centres",
    "replays",
    "steps",
    "chains",
    "payloads",
    "symbols",
    "values",
    "further",
}
ALLOWED = {"numpy", "xxhash"} | PARTS  # beside the standard library
LINES_MAX = 300
ROUNDS = 80


@pytest.mark.parametrize("name", sorted(PARTS | {"display"}))
def test_the_reader_is_short_and_imports_nothing_of_ours(name: str) -> None:
    text = (HERE / f"{name}.py").read_text()
    assert len(text.splitlines()) <= LINES_MAX
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            modules.add((node.module or "").split(".")[0])
    assert modules - sys.stdlib_module_names <= ALLOWED
    assert "holdfast" not in modules


def random_states(chance: random.Random) -> tuple[list[dict[Path, Any]], dict[Path, torch.Tensor]]:
    """States of a few ranks, and the whole tensors they make."""
    states: list[dict[Path, Any]] = [{} for _ in range(chance.choice([1, 1, 2, 3, 5]))]
    tensors: dict[Path, torch.Tensor] = {}
    for number in range(chance.randrange(6)):
        path: Path = (chance.choice(["a", "b", "é"]), chance.choice([number, ("list", number)]))
        shape = tuple(chance.choice([1, 2, 3, 5, 9]) for _ in range(chance.randrange(4)))
        shape = (*shape[:-1], 0) if shape and chance.random() < 0.1 else shape
        dtype = chance.choice(list(DTYPE_NAMES))
        tensors[path] = whole = filled(shape, dtype, chance.randrange(2**32))
        held = pieces(whole, cut(chance, (0,) * len(shape), shape, chance.randint(1, len(states))))
        others = held + ([Piece(shape, (0,) * len(shape), whole[:0])] if shape else [])
        held += [chance.choice(others) for _ in states[len(held) :]]
        chance.shuffle(held)
        for state, piece in zip(states, held, strict=True):
            state[path] = piece
    return states, tensors


def agreed(path: FilePath) -> Any:
    """What the reader finds, after comparing it with what holdfast finds."""
    found = reader.read(path)
    checkpoint = holdfast.open(path)
    assert checkpoint.verify() == []
    texts = [*found["tensors"], *found["ties"], *found["objects"]]
    paths = {text: decode_path(json.loads(text)) for text in texts}
    names = display_names(paths.values())
    for text, (dtype, shape, content) in found["tensors"].items():
        tensor = checkpoint.tensor(names[paths[text]])
        assert (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) == (dtype, shape)
        assert bits_of(tensor) == content
    for text, target in found["ties"].items():
        assert checkpoint.info(names[paths[text]]).tied_to == names[paths[target]]
    objects = {names[paths[text]]: value for text, value in found["objects"].items()}
    assert exactly(objects) == exactly(checkpoint.objects())
    assert len(checkpoint.names()) == len(found["tensors"]) + len(found["ties"])
    return found


def test_random_checkpoints_of_several_ranks_read_alike(new_path: NewPath) -> None:
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        states, tensors = random_states(chance)
        ties: dict[Path, Path] = {}
        whole_ones = [path for path, tensor in tensors.items() if tensor.numel()]
        if whole_ones and chance.random() < 0.5:
            ties["tied", seed] = chance.choice(whole_ones)
        options = holdfast.Options(
            chunk_elements=chance.choice([1, 2, 7, 1 << 20]), pool_bytes=32 << 20
        )
        path = new_path()
        save_pieces(path, states, ties=ties, step=seed, options=options)
        found = agreed(path)
        contents = {decode_path(json.loads(t)): v[2] for t, v in found["tensors"].items()}
        assert contents == {path: bits_of(tensor) for path, tensor in tensors.items()}, seed
        assert len(found["ties"]) == len(ties)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(values)
def test_values_read_alike(new_path: NewPath, value: Any) -> None:
    path = new_path()
    holdfast.save({"v": [value], "t": torch.zeros(1)}, path)
    assert exactly(agreed(path)["objects"]) == exactly({'["v"]': [value]})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.lists(keys, min_size=1, max_size=3).map(tuple), max_size=8, unique=True))
def test_names_are_shown_alike(paths: list[Path]) -> None:
    assert display.dotted([encode_path(path) for path in paths]) == list(
        display_names(paths).values()
    )


MEMBER = {"$enum": ["m.X", [1]]}


@pytest.mark.parametrize(
    ("value", "is_whole"),
    [
        ({"$set": [MEMBER]}, True),
        ({"$dict": [[{"$dataclass": ["m.X", {"a": [1]}]}, 1]]}, True),
        ({"$set": [{"$size": [1]}]}, True),
        ({"$namespace": {"__class__": 1, "self": 2}}, True),
        ({"$set": [MEMBER, MEMBER]}, False),
        ({"$set": [{"$tuple": [[1]]}]}, False),
        ({"$size": ""}, False),
        ({"$size": {}}, False),
        ({"$fraction": [True, 1]}, False),
        ({"$dtype": [1]}, False),
    ],
)
def test_both_readers_say_the_same_of_a_further_value(value: Any, is_whole: bool) -> None:
    decoders: list[tuple[Callable[[Any], Any], type[Exception]]] = [
        (decode_value, CorruptError),
        (reader.decode, reader.Corrupt),
    ]
    for decode, error in decoders:
        with contextlib.nullcontext() if is_whole else pytest.raises(error):
            decode(value)
