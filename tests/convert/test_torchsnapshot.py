"""Snapshots of torchsnapshot as sources, from files that it has written (make_torchsnapshot.py)."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.convert.kinds import open_source
from holdfast.errors import CorruptError, HoldfastError, OptionError

from .make_torchsnapshot import state
from .test_torch_file import all_of, assert_same
from .unpacked import unpacked

NewPath = Callable[[], Path]


@pytest.fixture
def theirs(new_path: NewPath) -> Path:
    return unpacked("torchsnapshot", new_path())


def changed(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = directory / ".snapshot_metadata"
    metadata = json.loads(file.read_text())
    change(metadata["manifest"])
    file.write_text(json.dumps(metadata))


def test_tensors_in_one_piece_in_chunks_and_in_shards_are_read(theirs: Path) -> None:
    with open_source(theirs) as source:
        assert source.kind == "torchsnapshot"
        kinds = {
            entry["type"]
            for entry in json.loads((theirs / ".snapshot_metadata").read_text())[
                "manifest"
            ].values()
        }
        assert {"Tensor", "ChunkedTensor", "ShardedTensor", "object", "list"} <= kinds
        assert_same(source, {"state": state(0)})
        names = {path[1] for path in all_of(source)}
        assert names == {"nested", "half", "turned", "large", "count", "shared", "own"}


def test_values_of_rank_0_come_along(theirs: Path) -> None:
    with open_source(theirs) as source:
        values = {path[1:]: value for path, value in source.values.items()}
        assert values == {
            **{("step",): 3, ("rate",): 0.5, ("name",): "a/b%", ("bytes",): b"ab"},
            **{("flag",): True, ("nothing",): None, ("pair",): (1, 2)},
            **{("nested", "x/y", ("list", 0)): 1, ("nested", 7): "seven"},
        }
        assert "ranks above 0" in source.advice[0]


def test_it_becomes_a_checkpoint_of_holdfast(theirs: Path, new_path: NewPath) -> None:
    ours = new_path()
    holdfast.import_checkpoint(theirs, ours)
    with holdfast.open(ours) as checkpoint:
        assert checkpoint.verify(deep=True) == []
        assert torch.equal(checkpoint.tensor("state.shared"), state(0)["shared"])


def of(manifest: dict[str, Any], name: str) -> Any:
    return manifest[f"0/state/{name}"]


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nowhere": lambda m: m.pop("0/state/step"),
    "without keys": lambda m: m["0/state"].update(keys=3),
    "without chunks": lambda m: of(m, "large").update(chunks=None),
    "cover": lambda m: of(m, "large")["chunks"].pop(),
    "none of those in": lambda m: of(m, "shared")["shards"].clear(),
    "as 'int' of 'x'": lambda m: of(m, "step").update(serialized_value="x"),
    "as 'float' of": lambda m: of(m, "rate").update(serialized_value="AAAA"),
    "'../x'; expected a file beneath": lambda m: of(m, "own").update(location="../x"),
    "'/etc/passwd'; expected": lambda m: of(m, "own").update(location="/etc/passwd"),
    "missing or not a file": lambda m: of(m, "own").update(location="nothing"),
    "not within the file": lambda m: of(m, "own").update(byte_range=[0, 1 << 40]),
    r"bytes; expected torch\.float32": lambda m: of(m, "own").update(byte_range=[0, 4]),
    "as an object of": lambda m: of(m, "pair").update(serializer="pickle"),
    "unknown way": lambda m: m.update({"0/state/x": 3}),
    "describes a tensor whose shape": lambda m: of(m, "own").update(shape=[-1]),
}


@pytest.mark.parametrize("text", LIES)
def test_a_lie_in_the_metadata_is_a_typed_error(theirs: Path, text: str) -> None:
    changed(theirs, LIES[text])
    with pytest.raises(CorruptError, match=text):
        open_source(theirs)


def test_a_quantized_tensor_is_refused(theirs: Path) -> None:
    changed(theirs, lambda m: of(m, "own").update(serializer="per_tensor_qtensor"))
    with pytest.raises(OptionError, match="expected a plain tensor"):
        open_source(theirs)


def test_metadata_that_is_none_is_refused(theirs: Path) -> None:
    for text in ("", "[]", "{}", "{" * 100_000, '{"manifest": {}, "world_size": 0}'):
        (theirs / ".snapshot_metadata").write_text(text)
        with pytest.raises(CorruptError, match=r"\.snapshot_metadata"):
            open_source(theirs)


JUNK = [None, True, -1, 1 << 70, 2.5, "", "x", "../x", [], {}, [[]], [None], {"x": 1}, [1, 2], "0"]


def test_anything_in_the_metadata_is_read_or_a_typed_error(theirs: Path) -> None:
    file, chance = theirs / ".snapshot_metadata", random.Random(5)
    text, refused = file.read_text(), 0
    for _ in range(600):
        metadata = json.loads(text)
        holder: Any = metadata["manifest"]
        for _ in range(chance.randrange(1, 5)):
            below = list(holder.values() if isinstance(holder, dict) else holder)
            below = [value for value in below if isinstance(value, (dict, list)) and value]
            if not below:
                break
            holder = chance.choice(below)
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        holder[chance.choice(list(keys))] = chance.choice(JUNK)
        file.write_text(json.dumps(metadata))
        try:
            with open_source(theirs) as source:
                all_of(source)
        except HoldfastError:
            refused += 1
    assert refused > 200
