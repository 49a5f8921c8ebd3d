"""Import of safetensors: to the bit, whole or not at all, and loaded with holdfast's own calls."""

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast import Options
from holdfast.cli import main
from holdfast.convert import importing
from holdfast.convert.chunks import BLOCK_BYTES, BLOCKS, FromSource
from holdfast.convert.kinds import open_source
from holdfast.engine.workspace import bytes_at
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    NoSpaceError,
    NotCommittedError,
    OptionError,
    StateError,
    StoreError,
)
from holdfast.layout import Shard, whole
from holdfast.plan.shard_table import table_of
from holdfast.testing import Fault, faulty

from .test_export import DTYPES, some_tensor
from .test_source import header_file, same

NewPath = Callable[[], Path]


@pytest.mark.parametrize("chunk_elements", [1 << 20, 1000])
def test_every_tensor_comes_in_to_the_bit(chunk_elements: int, new_path: NewPath) -> None:
    chance = random.Random(6)
    torch.manual_seed(6)
    state = {f"layer.{n}.é": some_tensor(chance, chance.choice(DTYPES)) for n in range(60)}
    state["large"] = torch.randn(3, 7, 211_111)
    source, target = new_path().with_suffix(".safetensors"), new_path()
    safetensors.torch.save_file(state, source)
    report = holdfast.import_checkpoint(
        source, target, options=Options(chunk_elements=chunk_elements)
    )
    assert holdfast.verify(target, deep=True).damage == ()
    with holdfast.open(target) as checkpoint:
        assert set(checkpoint.names()) == set(state)
        assert all(same(checkpoint[name], state[name]) for name in state)
    assert (report.tensors, report.kind, report.to) == (61, "safetensors", "holdfast")
    assert report.size_bytes == sum(tensor.nbytes for tensor in state.values())


def test_an_export_that_is_imported_is_exported_to_the_same_bytes(new_path: NewPath) -> None:
    weight = torch.randn(50, 20)
    state = {"a": weight, "b": weight, "c": torch.randn(9).bfloat16(), "none": torch.empty(0, 3)}
    first, second = new_path(), new_path()
    files = [new_path().with_suffix(".safetensors") for _ in range(2)]
    holdfast.save(state, first)
    holdfast.export_checkpoint(first, files[0])
    holdfast.import_checkpoint(files[0], second)
    holdfast.export_checkpoint(second, files[1])
    assert files[0].read_bytes() == files[1].read_bytes()
    assert holdfast.open(second).info("b").tied_to == "a"


def test_a_module_loads_what_was_put_under_its_key(new_path: NewPath) -> None:
    source, target = new_path().with_suffix(".safetensors"), new_path()
    model, other = torch.nn.Linear(9, 8), torch.nn.Linear(9, 8)
    safetensors.torch.save_model(model, str(source))
    holdfast.import_checkpoint(source, target, under="model")
    holdfast.load(target, into={"model": other})
    assert torch.equal(model.weight, other.weight)


def test_blocks_are_read_ahead_and_again(new_path: NewPath) -> None:
    path = new_path().with_suffix(".safetensors")
    count = (BLOCKS + 4) * BLOCK_BYTES // 4
    state = {"a": torch.arange(count, dtype=torch.int32), "b": torch.arange(3, dtype=torch.int32)}
    safetensors.torch.save_file(state, path)
    told: list[int] = []
    with open_source(path) as source:
        table = table_of([Shard(t, whole(t.shape)) for t in source.tensors], source.tensors)
        origin = FromSource(source, table, 1 << 20, told.append)
        chunks = [*state["a"].split(1 << 20), state["b"]]
        for number in (*range(0, len(chunks) - 2, 3), 0, 5, 1):
            found = origin.addresses(number, number + 2)
            for address, chunk in zip(found.tolist(), chunks[number : number + 2], strict=True):
                assert torch.equal(bytes_at(address, chunk.nbytes), chunk.view(torch.uint8))
        origin.close()
    assert sum(told) <= sum(tensor.nbytes for tensor in state.values()) < 2 * sum(told)


def test_a_source_that_is_bad_leaves_nothing(new_path: NewPath) -> None:
    target, cut = new_path(), new_path().with_suffix(".safetensors")
    with pytest.raises(NotCommittedError):
        holdfast.import_checkpoint(new_path(), target)
    header_file(cut, {"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, b"123")
    with pytest.raises(CorruptError, match="cut"):
        holdfast.import_checkpoint(cut, target)
    assert not target.exists()


def test_a_source_that_ends_while_it_is_read_leaves_no_checkpoint(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = new_path().with_suffix(".safetensors"), new_path()
    safetensors.torch.save_file({"a": torch.randn(1000)}, source)
    before = importing.check_room
    monkeypatch.setattr(
        importing, "check_room", lambda *given: (before(*given), os.truncate(source, 300))
    )
    with pytest.raises(CorruptError, match="cut or changed"):
        holdfast.import_checkpoint(source, target)
    with pytest.raises(NotCommittedError):
        holdfast.open(target)
    assert [path for path in target.rglob("*") if path.is_file()] == []


def test_what_is_there_is_not_overwritten(new_path: NewPath) -> None:
    source, target = new_path().with_suffix(".safetensors"), new_path()
    safetensors.torch.save_file({"a": torch.ones(1)}, source)
    holdfast.import_checkpoint(source, target)
    with pytest.raises(AlreadyCommittedError):
        holdfast.import_checkpoint(source, target)
    with pytest.raises(OptionError, match="under"):
        holdfast.import_checkpoint(source, new_path(), under=5)  # type: ignore[arg-type]


def test_a_name_that_no_checkpoint_can_hold_is_refused(new_path: NewPath) -> None:
    source, target = new_path().with_suffix(".safetensors"), new_path()
    name = "x" * 100_000
    header_file(source, {name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"1")
    with pytest.raises(StateError):
        holdfast.import_checkpoint(source, target)
    assert not target.exists()


def test_a_full_disk_is_said_first(new_path: NewPath, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.stores.local import LocalStore

    source, target = new_path().with_suffix(".safetensors"), new_path()
    safetensors.torch.save_file({"a": torch.ones(100)}, source)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 100)
    with pytest.raises(NoSpaceError, match="Nothing was written"):
        holdfast.import_checkpoint(source, target)


@pytest.mark.parametrize("operation", ["create", "write", "sync", "link", "sync_directory"])
def test_a_failed_call_of_the_system_commits_nothing(operation: str, new_path: NewPath) -> None:
    source = new_path().with_suffix(".safetensors")
    state = {"a": torch.randn(999), "b": torch.randn(99)}
    safetensors.torch.save_file(state, source)
    for nth in range(1, 30):
        target = new_path()
        try:
            with faulty(Fault(operation, nth=nth, persistent=True, argument=errno.EIO)):
                holdfast.import_checkpoint(source, target)
        except StoreError:
            if operation != "sync_directory":  # after the last one it is whole
                with pytest.raises(NotCommittedError):
                    holdfast.open(target)
        else:
            assert holdfast.verify(target).damage == ()
            break
    else:
        pytest.fail("it never succeeds")


def test_the_command_line_imports(new_path: NewPath, capsys: pytest.CaptureFixture[str]) -> None:
    source, target, dcp = new_path().with_suffix(".safetensors"), new_path(), new_path()
    safetensors.torch.save_file({"a": torch.ones(4)}, source)
    assert main(["import", str(source), str(target), "--under", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 16
    assert holdfast.open(target).names() == ["m.a"]
    assert main(["export", str(target), str(dcp), "--to", "dcp"]) == 0
    assert main(["import", str(dcp), str(new_path())]) == 0
    assert "is a checkpoint of holdfast, from dcp: 1 tensor" in capsys.readouterr().out
    assert main(["import", str(dcp), str(new_path()), "--under", "m"]) == 2
    assert main(["import", str(source), str(new_path()), "--pickled"]) == 2
    assert main(["import", str(source), str(new_path()), "--from", "zip"]) == 2
    assert capsys.readouterr().err.count("leave it out") == 2
