"""DCP's own writers and readers are routed by their class: whoever makes and calls them."""

import copy
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,
    _load_state_dict_from_keys,
)
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

import holdfast
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter, install, routed, routing

from .dcp_suite.storage import OwnFinish, Xor

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not routing._is_known(), reason="DCP of this torch is not routed"),
]
NewPath = Callable[[], Path]
ROOT = Path(__file__).parents[2]
STATE: dict[str, Any] = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "n": 5}


@pytest.fixture
def every() -> Iterator[None]:
    before = FileSystemReader.read_metadata, FileSystemWriter.write_data
    with install(every=True):
        yield
    assert (FileSystemReader.read_metadata, FileSystemWriter.write_data) == before


@pytest.fixture
def saved(new_path: NewPath) -> Path:
    path = new_path()
    dcp.save(STATE, storage_writer=HoldfastWriter(path))
    return path


def blank() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(2, 3)}, "n": 0}


def is_same(state: dict[str, Any]) -> bool:
    return torch.equal(state["model"]["w"], STATE["model"]["w"]) and state["n"] == STATE["n"]


def is_ours(path: Path) -> bool:
    return (path / "MANIFEST").exists() and not list(path.glob("*.distcp"))


class OwnReader(FileSystemReader):
    """Counts, and lets DCP's class do the work."""

    reads = 0

    def read_data(self, *given: Any, **more: Any) -> Any:
        self.reads += 1
        return super().read_data(*given, **more)


class Wrapper:
    """Holds a reader or writer of DCP's, as frameworks do."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def wrapped(inner: Any) -> Any:
    return Wrapper(inner)


def _whole(reader: dcp.StorageReader) -> dict[str, Any]:
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def _into(load: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    state = blank()
    load(state)
    return state


def _to_torch(path: Path) -> dict[str, Any]:
    dcp_to_torch_save(path, f"{path}.pt")
    found: dict[str, Any] = torch.load(f"{path}.pt")
    return found


def _old_load(state: dict[str, Any], path: Path) -> None:
    dcp.load_state_dict(state, FileSystemReader(path), no_dist=True)


READS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "load by path": lambda p: _into(lambda s: dcp.load(s, checkpoint_id=p)),
    "load by reader": lambda p: _into(lambda s: dcp.load(s, storage_reader=FileSystemReader(p))),
    "load by reader and id": lambda p: _into(
        lambda s: dcp.load(s, storage_reader=FileSystemReader("/nowhere"), checkpoint_id=p)
    ),
    "subclass": lambda p: _into(lambda s: dcp.load(s, storage_reader=OwnReader(p))),
    "wrapper": lambda p: _into(lambda s: dcp.load(s, storage_reader=wrapped(FileSystemReader(p)))),
    "fsspec": lambda p: _into(lambda s: dcp.load(s, storage_reader=FsspecReader(str(p)))),
    "file URL": lambda p: _into(lambda s: dcp.load(s, checkpoint_id=f"file://{p}")),
    "load_state_dict": lambda p: _into(lambda s: _old_load(s, p)),
    "_load_state_dict": lambda p: _whole(FileSystemReader(p)),
    "_load_state_dict_from_keys": lambda p: _load_state_dict_from_keys(checkpoint_id=p),
    "dcp_to_torch_save": _to_torch,
}


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("how", READS)
def test_readers_of_dcp_read_our_checkpoints_wherever_they_are_used(saved: Path, how: str) -> None:
    assert is_same(READS[how](saved))


@pytest.mark.usefixtures("every")
def test_a_subclass_of_the_reader_is_called_as_before(saved: Path) -> None:
    reader = OwnReader(saved)
    dcp.load(blank(), storage_reader=reader)
    assert reader.reads == 1


@pytest.mark.usefixtures("every")
def test_metadata_is_as_dcp_returns_it(saved: Path, new_path: NewPath) -> None:
    stock = new_path()
    writer = FileSystemWriter(stock, serialization_format=SerializationFormat.SAFETENSORS)
    expected = dcp.save({"model": STATE["model"]}, storage_writer=writer)
    found = FileSystemReader(saved).read_metadata()
    assert found.version == expected.version
    assert found.storage_data.keys() >= expected.storage_data.keys()
    assert found.storage_meta.load_id and found.storage_meta.save_id
    assert str(found.storage_meta.checkpoint_id) == str(saved)
    described = found.state_dict_metadata
    assert described["model.w"].size == expected.state_dict_metadata["model.w"].size
    again = pickle.loads(pickle.dumps(found))
    assert again.state_dict_metadata == described


@pytest.mark.usefixtures("every")
def test_a_reader_takes_metadata_that_another_has_read(saved: Path) -> None:
    metadata = FileSystemReader(saved).read_metadata()
    other, state = FileSystemReader(saved), blank()
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, True)
    other.set_up_storage_reader(metadata, True)
    other.read_data(planner.create_local_plan(), planner).wait()
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])


def _fill(reader: Any, metadata: Any) -> list[float]:
    state = blank()["model"]
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner({"model": state}, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    found: list[float] = state["w"].flatten().tolist()
    return found


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("kind", [FileSystemReader, HoldfastReader])
def test_a_reader_that_was_elsewhere_reads_what_the_metadata_is_of(
    saved: Path, new_path: NewPath, kind: Any
) -> None:
    other = new_path()
    dcp.save({"model": {"w": torch.full((2, 3), 7.0)}}, checkpoint_id=other)
    reader = kind(saved)
    reader.read_metadata()
    reader.reset(other)
    assert _fill(reader, kind(other).read_metadata()) == [7.0] * 6


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("kind", [FileSystemReader, HoldfastReader])
def test_metadata_read_in_one_thread_serves_another(saved: Path, kind: Any) -> None:
    reader = kind(saved)
    metadata = reader.read_metadata()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_fill, reader, metadata).result() == list(range(6))


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda reader: pickle.loads(pickle.dumps(reader))]
)
def test_a_reader_that_has_read_can_be_copied_and_sent(saved: Path, again: Any) -> None:
    reader = FileSystemReader(saved)
    dcp.load(blank(), storage_reader=reader)
    state = blank()
    dcp.load(state, storage_reader=again(reader))
    assert is_same(state)


@pytest.mark.usefixtures("every")
def test_a_marker_without_manifest_is_no_checkpoint_of_dcp(saved: Path) -> None:
    (saved / "MANIFEST").unlink()
    with pytest.raises(BaseException, match="the marker of a checkpoint"):
        dcp.load(blank(), checkpoint_id=saved)


class Renamed(FileSystemWriter):
    """A class of its own that changes nothing of how it writes."""


def _old_save(path: Path) -> None:
    dcp.save_state_dict(STATE, FileSystemWriter(path), no_dist=True)


def _from_torch(path: Path) -> None:
    torch.save(STATE, f"{path}.pt")
    torch_save_to_dcp(f"{path}.pt", path)


def _bare_save(path: Path) -> None:
    _save_state_dict(STATE, FileSystemWriter(path), no_dist=True)


WRITES: dict[str, Callable[[Path], Any]] = {
    "save by path": lambda p: dcp.save(STATE, checkpoint_id=p),
    "save by writer": lambda p: dcp.save(STATE, storage_writer=FileSystemWriter(p)),
    "subclass": lambda p: dcp.save(STATE, storage_writer=Renamed(p)),
    "wrapper": lambda p: dcp.save(STATE, storage_writer=wrapped(FileSystemWriter(p))),
    "fsspec": lambda p: dcp.save(STATE, storage_writer=FsspecWriter(str(p))),
    "save_state_dict": _old_save,
    "_save_state_dict": _bare_save,
    "torch_save_to_dcp": _from_torch,
}


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("how", WRITES)
def test_writers_of_dcp_write_our_checkpoints_wherever_they_are_used(
    new_path: NewPath, how: str
) -> None:
    path = new_path()
    WRITES[how](path)
    assert is_ours(path)
    assert is_same(READS["load by path"](path))


class Nowhere(dcp.StorageWriter):
    """A writer that is not DCP's, and keeps nothing."""

    def reset(self, *_: Any) -> None: ...
    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None: ...
    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, *_: Any) -> Any:
        done: torch.futures.Future[list[Any]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, *_: Any, **__: Any) -> None: ...
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


LEFT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "own finish": (
        lambda p: dcp.save(STATE, storage_writer=OwnFinish(p)),
        "has a finish of its own",
    ),
    "own writer": (
        lambda p: dcp.save(STATE, storage_writer=Nowhere()),
        "is not a FileSystemWriter",
    ),
    "extensions": (
        lambda p: dcp.save(STATE, storage_writer=FileSystemWriter(p, _extensions=[Xor()])),
        "writes through extensions: Xor",
    ),
    "safetensors": (
        lambda p: dcp.save(
            {"w": torch.ones(2)},
            storage_writer=FileSystemWriter(
                p, serialization_format=SerializationFormat.SAFETENSORS
            ),
        ),
        "writes SerializationFormat.SAFETENSORS",
    ),
    "no collectives": (
        lambda p: dcp.save(STATE, checkpoint_id=p, use_collectives=False),
        "writes without collectives",
    ),
}


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("how", LEFT)
def test_what_we_do_not_carry_out_is_left_to_dcp_and_said_once(
    new_path: NewPath, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    routed._say_once.cache_clear()
    write, why = LEFT[how]
    with caplog.at_level(logging.WARNING, "holdfast"):
        for _ in range(2):
            path = new_path()
            write(path)
            assert not is_ours(path)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "holdfast"]
    assert "are not written by holdfast" in said and why in said


@pytest.mark.usefixtures("every")
def test_a_home_directory_is_not_looked_for_in_a_path(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = new_path()
    here.mkdir()
    monkeypatch.chdir(here)
    dcp.save(STATE, storage_writer=FileSystemWriter("~/first"))
    assert is_ours(here / "~" / "first")


def test_an_unknown_torch_is_left_alone_and_said(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    before = FileSystemReader.read_metadata
    with caplog.at_level(logging.WARNING, "holdfast"), install(every=True):
        assert FileSystemReader.read_metadata is before
        path = new_path()
        dcp.save(STATE, checkpoint_id=path)
    assert not is_ours(path)
    assert "torch is 2.99.0+cpu" in caplog.text and "2.13" in caplog.text


def test_the_torch_that_all_tests_run_with_is_known() -> None:
    pinned = re.search(r"TORCH \?= torch==(\d+\.\d+)", (ROOT / "Makefile").read_text())
    assert pinned and pinned[1] in routing.VERSIONS


def test_the_converter_of_dcp_needs_no_change(saved: Path) -> None:
    target = f"{saved}.pt"
    command = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    environment = {**os.environ, "HOLDFAST_DCP": "every"}
    subprocess.run([*command, str(saved), target], env=environment, check=True)
    assert is_same(torch.load(target))
    assert holdfast.verify(saved).damage == ()
