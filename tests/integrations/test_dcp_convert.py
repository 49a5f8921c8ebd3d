"""DCP's own directories ⇄ ours: the same state, a part at a time, nothing half-made or run."""

import argparse
import contextlib
import io
import itertools
import os
import pickle
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import holdfast
from holdfast.cli import main
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    HoldfastError,
    NotCommittedError,
    OptionError,
    StateError,
)
from holdfast.integrations.dcp import convert as module
from holdfast.integrations.dcp.convert import plan_conversion

from .test_dcp import Custom, assert_same, blank, odd_state

pytestmark = pytest.mark.filterwarnings("ignore")
NewPath = Callable[[], Path]


def convert(source: Path, target: Path, **given: Any) -> int:
    """Convert; return the bytes that were reported."""
    reported: list[int] = []
    conversion = plan_conversion(source, target, **given)
    conversion.run(reported.append)
    assert sum(reported) == conversion.size_bytes
    return conversion.size_bytes


def by_dcp(path: Path) -> dict[str, Any]:
    return _load_state_dict_from_keys(storage_reader=FileSystemReader(path))


def test_a_checkpoint_of_dcp_becomes_ours(new_path: NewPath) -> None:
    theirs, ours, state = new_path(), new_path(), odd_state()
    dcp.save(state, checkpoint_id=theirs)
    convert(theirs, ours)
    found = blank(state)
    holdfast.load(ours, into=found)
    assert_same(found, state)
    with holdfast.open(ours) as checkpoint:
        assert checkpoint.verify() == []


def test_ours_becomes_one_of_dcp_and_comes_back(new_path: NewPath) -> None:
    ours, theirs, again, state = new_path(), new_path(), new_path(), odd_state()
    state["twin"] = state["tensors"][0]
    holdfast.save(state, ours)
    convert(ours, theirs)
    assert_same(by_dcp(theirs), state)
    found = blank(state)
    dcp.load(found, checkpoint_id=theirs)
    assert_same(found, state)
    convert(theirs, again)
    found = blank(state)
    holdfast.load(again, into=found)
    assert_same(found, state)


def test_a_module_is_found_by_its_names_on_either_side(new_path: NewPath) -> None:
    ours, theirs = new_path(), new_path()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    holdfast.save({"model": model}, ours)
    convert(ours, theirs)
    state = {"model": blank(dict(model.state_dict()))}
    dcp.load(state, checkpoint_id=theirs)
    assert_same(state["model"], dict(model.state_dict()))


def test_large_tensors_go_in_pieces(new_path: NewPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 1 << 12)
    ours, theirs = new_path(), new_path()
    state = {"w": torch.randn(100, 33), "v": torch.randn(7), "u": torch.randn(900)}
    holdfast.save(state, ours)
    convert(ours, theirs)
    assert len(list(theirs.glob("*.distcp"))) > 4
    assert_same(by_dcp(theirs), state)


PROGRAM = """
import resource, sys
from holdfast.integrations.dcp import convert
convert.BATCH_BYTES = 16 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert.plan_conversion(sys.argv[1], sys.argv[2]).run(lambda _: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_checkpoint(new_path: NewPath) -> None:
    paths = [new_path() for _ in range(3)]
    state = {f"w{n}": torch.full((2 << 20,), float(n)) for n in range(64)}  # of 8 MiB: 512 MiB
    holdfast.save(state, paths[0])
    for source, target in itertools.pairwise(paths):
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(source), str(target)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert int(done.stdout) < 256 << 10, "KiB: a pool of 128 MiB, and a batch"


def test_values_that_need_a_pickle_are_refused_or_kept(new_path: NewPath) -> None:
    theirs, ours, back = new_path(), new_path(), new_path()
    dcp.save({"a": Custom(), "w": torch.ones(2)}, checkpoint_id=theirs)
    with pytest.raises(StateError, match=r"a is of the type .*Custom, which needs a pickle"):
        convert(theirs, ours)
    assert not ours.exists()
    convert(theirs, ours, pickled=True)
    convert(ours, back)
    assert by_dcp(back)["a"] == Custom()


def test_namespaces_that_dcp_saved_are_values(new_path: NewPath) -> None:
    theirs, ours = new_path(), new_path()
    arguments = argparse.Namespace(lr=0.1, betas=(0.9, 0.95), device=torch.device("cpu"))
    dcp.save({"args": arguments, "w": torch.ones(2)}, checkpoint_id=theirs)
    convert(theirs, ours)
    assert holdfast.open(ours).objects() == {"args": arguments}


def test_a_namespace_with_code_in_it_is_refused(new_path: NewPath) -> None:
    theirs = new_path()
    dcp.save({"args": argparse.Namespace(f=print), "w": torch.ones(2)}, checkpoint_id=theirs)
    with pytest.raises(StateError, match=r"args is of the type \S+, which needs a pickle"):
        convert(theirs, new_path())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_in_a_file_of_dcp_is_refused(new_path: NewPath) -> None:
    theirs, ours = new_path(), new_path()
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=theirs)
    file = theirs / "__0_0.distcp"
    flip(file, file.read_bytes().index(torch.ones(4).numpy().tobytes()) + 400)
    with pytest.raises(CorruptError, match=r"__0_0.distcp.*CRC"):
        convert(theirs, ours)
    assert not ours.exists()


def test_damage_in_a_value_of_dcp_is_refused(new_path: NewPath) -> None:
    theirs, ours = new_path(), new_path()
    dcp.save({"v": "a text that is long enough", "w": torch.ones(3)}, checkpoint_id=theirs)
    file = theirs / "__0_0.distcp"
    flip(file, file.read_bytes().index(b"long enough"))
    with pytest.raises(CorruptError, match=r"\(v\) is damaged"):
        convert(theirs, ours)
    assert by_dcp(theirs)["v"] == "a text that is mong enough"


@pytest.mark.parametrize("cut", [0, 10, 100, -1])
def test_metadata_that_is_not_whole_is_refused(new_path: NewPath, cut: int) -> None:
    theirs = new_path()
    dcp.save({"v": 1, "w": torch.ones(3)}, checkpoint_id=theirs)
    content = (theirs / ".metadata").read_bytes()
    (theirs / ".metadata").write_bytes(content[:cut])
    with pytest.raises(CorruptError, match=r"\.metadata"):
        plan_conversion(theirs, new_path())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda metadata: setattr(metadata, "storage_data", None),
        lambda metadata: setattr(metadata, "state_dict_metadata", []),
        lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", 3),
        lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", torch.Size([-3])),
        lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", torch.Size([1 << 62])),
        lambda metadata: setattr(metadata.state_dict_metadata["w"].properties, "dtype", "f32"),
        lambda metadata: metadata.state_dict_metadata.update(x=7),
        lambda metadata: [setattr(i, "offset", "0") for i in metadata.storage_data.values()],
        lambda metadata: metadata.state_dict_metadata["w"].chunks.append(7),
    ],
)
def test_metadata_of_other_types_is_refused(new_path: NewPath, spoil: Callable[..., Any]) -> None:
    theirs = new_path()
    dcp.save({"v": 1, "w": torch.ones(3)}, checkpoint_id=theirs)
    metadata = FileSystemReader(theirs).read_metadata()
    spoil(metadata)
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match=r"\.metadata"):
        plan_conversion(theirs, new_path())


def test_metadata_that_asks_for_much_memory_does_not_get_it(new_path: NewPath) -> None:
    theirs = new_path()
    dcp.save({"v": 1, "w": torch.arange(4.0)}, checkpoint_id=theirs)
    whole = (theirs / ".metadata").read_bytes()
    place = (1 << 31).to_bytes(4, "little")  # of its memo: Python's reader would take 64 GB
    (theirs / ".metadata").write_bytes(whole[:-1] + b"r" + place + b".")
    tracemalloc.start()
    plan_conversion(theirs, new_path())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_flipped_bit_of_metadata_is_refused_or_changes_nothing_else(new_path: NewPath) -> None:
    theirs = new_path()
    dcp.save({"v": 1, "w": torch.arange(4.0)}, checkpoint_id=theirs)
    whole, refused = (theirs / ".metadata").read_bytes(), 0
    for bit in range(0, 8 * len(whole), 37):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (theirs / ".metadata").write_bytes(damaged)
        ours = new_path()
        try:
            convert(theirs, ours)
        except HoldfastError:
            refused += 1
            assert not (ours / "MANIFEST").exists()
        else:
            with holdfast.open(ours) as checkpoint:
                (name,) = checkpoint.names()  # a bit of a name is protected by nothing
                assert checkpoint.tensor(name).view(-1).view(torch.float32).tolist() == [0, 1, 2, 3]
    assert refused > 20


def test_damage_in_a_file_of_ours_is_refused(new_path: NewPath) -> None:
    ours, theirs = new_path(), new_path()
    holdfast.save({"w": torch.ones(1000)}, ours)
    (file,) = ours.rglob("*.hf")
    flip(file, 400)
    with pytest.raises(CorruptError, match="checksum"):
        convert(ours, theirs)
    assert not theirs.exists()


class Attack:
    """A pickle that makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["metadata", "value", "tensor"])
def test_code_in_a_file_of_dcp_is_not_run(new_path: NewPath, where: str) -> None:
    theirs, ours, made = new_path(), new_path(), new_path()
    value = Attack(made) if where == "value" else "x" * 100
    dcp.save({"v": value, "w": torch.ones(2)}, checkpoint_id=theirs)
    if where == "metadata":
        metadata = FileSystemReader(theirs).read_metadata()
        metadata.planner_data = Attack(made)
        (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    if where == "tensor":
        metadata = FileSystemReader(theirs).read_metadata()
        buffer = io.BytesIO()
        torch.save(Attack(made), buffer)
        index = next(i for i in metadata.storage_data if i.fqn == "w")
        info = metadata.storage_data[index]
        info.offset, info.length = 0, len(buffer.getvalue())
        (theirs / "__0_0.distcp").write_bytes(buffer.getvalue() + b"\0" * 9999)
        (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(HoldfastError) as caught:
        convert(theirs, ours)
    assert not made.exists() and not ours.exists(), caught.value
    with contextlib.suppress(BaseException):
        by_dcp(theirs)
    assert made.exists(), "DCP runs it"


def test_a_path_out_of_the_directory_is_refused(new_path: NewPath) -> None:
    theirs, other = new_path(), new_path()
    for path in (theirs, other):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=path)
    metadata = FileSystemReader(theirs).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = f"../{other.name}/__0_0.distcp"
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match="outside it"):
        convert(theirs, new_path())


def test_a_part_that_dcp_has_lost_is_named(new_path: NewPath) -> None:
    theirs = new_path()
    dcp.save({"w": torch.ones(2), "v": torch.ones(3)}, checkpoint_id=theirs)
    metadata = FileSystemReader(theirs).read_metadata()
    metadata.storage_data = {i: s for i, s in metadata.storage_data.items() if i.fqn != "v"}
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match="lists v, but has no data"):
        convert(theirs, new_path())


def test_a_place_that_is_taken_is_refused(new_path: NewPath) -> None:
    theirs, ours, full = new_path(), new_path(), new_path()
    dcp.save({"w": torch.ones(2)}, checkpoint_id=theirs)
    holdfast.save({"w": torch.ones(2)}, ours)
    for source, target in ((theirs, ours), (ours, theirs)):
        with pytest.raises(AlreadyCommittedError):
            plan_conversion(source, target)
    full.mkdir()
    (full / "file").touch()
    with pytest.raises(OptionError, match="not empty"):
        plan_conversion(ours, full)
    with pytest.raises(NotCommittedError, match=r"MANIFEST nor \.metadata"):
        plan_conversion(full, new_path())


def test_nothing_is_converted_among_the_files_of_a_checkpoint(new_path: NewPath) -> None:
    ours, theirs = new_path(), new_path()
    holdfast.save({"w": torch.ones(3)}, ours)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=theirs)
    for source in (ours, theirs):
        with pytest.raises(OptionError, match=f"is within a committed checkpoint, {ours},"):
            plan_conversion(source, ours / "data" / "new")
    assert len(os.listdir(ours / "data")) == 1


def test_what_fails_leaves_nothing(new_path: NewPath, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = new_path(), new_path()
    holdfast.save({"w": torch.ones(2)}, ours)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "finish", full)
    with pytest.raises(HoldfastError, match="No space left"):
        convert(ours, theirs)
    assert not theirs.exists()


def test_the_command(new_path: NewPath, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = new_path(), new_path()
    dcp.save({"w": torch.ones(1000), "n": 1}, checkpoint_id=theirs)
    assert main(["inspect", str(theirs)]) == 0
    assert re.search(r"w +f32 +\[?1,?000", capsys.readouterr().out)
    assert main(["convert", str(theirs), str(ours)]) == 0
    assert "1 tensor, 1 value, 4.00 kB" in capsys.readouterr().out
    assert main(["verify", str(ours)]) == 0
    assert main(["convert", str(theirs), str(ours)]) == 2
    assert main(["convert", "--json", str(ours), str(new_path())]) == 0
    assert '"into": "dcp"' in capsys.readouterr().out
