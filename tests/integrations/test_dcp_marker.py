"""The marker: what programs of DCP look for, beside every checkpoint that is saved through it."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from format import reader as second_reader
from holdfast.cli import main
from holdfast.engine import marker as markers
from holdfast.engine.retire import LEAVING_PREFIX, retire
from holdfast.errors import CorruptError, NotCommittedError
from holdfast.format.spec import MARKER
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter, healing, install, routing
from holdfast.stores.local import LocalStore

from .versions import as_dcp_tells

pytestmark = pytest.mark.filterwarnings("ignore")
NewPath = Callable[[], Path]


def save(path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=HoldfastWriter(path))


def load(path: Path) -> Any:
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=HoldfastReader(path))
    return state["w"].tolist()


@pytest.fixture
def saved(new_path: NewPath) -> Path:
    path = new_path()
    save(path)
    return path


def test_a_save_returns_with_the_marker_there(saved: Path) -> None:
    assert (saved / ".metadata").read_bytes() == MARKER
    assert sorted(os.listdir(saved)) == [".metadata", "MANIFEST", "data"]


def test_the_marker_comes_after_the_manifest(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, there = new_path(), []
    stock = LocalStore.replace

    def replace(self: LocalStore, pending: str, name: str) -> None:
        if name == ".metadata":
            there.append((path / "MANIFEST").exists())
        stock(self, pending, name)

    monkeypatch.setattr(LocalStore, "replace", replace)
    save(path)
    assert there == [True]


def test_dcp_alone_fails_on_it_with_an_error(saved: Path) -> None:
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(MARKER)
    with pytest.raises(BaseException, match=as_dcp_tells("metadata is None")):
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=saved)
    with pytest.raises(pickle.UnpicklingError):
        dcp.FileSystemReader(saved).read_metadata()


def test_verify_and_inspect_take_it_for_ours(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert holdfast.verify(saved).foreign == ()
    assert main(["verify", "--strict", str(saved)]) == 0
    assert main(["inspect", str(saved)]) == 0
    assert ".metadata" not in capsys.readouterr().out
    second_reader.read(saved)


def _link(place: Path) -> None:
    place.symlink_to("MANIFEST")


OTHERS: dict[str, Callable[[Path], object]] = {
    "text": lambda place: place.write_bytes(b"# another line\n"),
    "nothing": lambda place: place.write_bytes(b""),
    "one byte more": lambda place: place.write_bytes(MARKER + b"\n"),
    "pickle": lambda place: place.write_bytes(pickle.dumps({})),
    "directory": lambda place: place.mkdir(),
    "link": _link,
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("how", OTHERS)
def test_a_marker_with_other_content_is_an_error(saved: Path, how: str) -> None:
    (saved / ".metadata").unlink()
    OTHERS[how](saved / ".metadata")
    with pytest.raises(CorruptError, match=r"holds two checkpoints.*\.metadata"):
        holdfast.load(saved, into={"w": torch.zeros(3)})
    with pytest.raises(BaseException, match=as_dcp_tells("holds two checkpoints")):
        load(saved)
    (fault,) = holdfast.verify(saved).damage
    assert ".metadata" in fault.what
    with pytest.raises(second_reader.Corrupt):
        second_reader.read(saved)


def test_retire_removes_it_before_the_manifest(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    stock = LocalStore.remove

    def remove(self: LocalStore, name: str) -> None:
        order.append(name)
        stock(self, name)

    monkeypatch.setattr(LocalStore, "remove", remove)
    retire(LocalStore(saved))
    assert order.index(".metadata") < order.index("MANIFEST")
    assert not saved.exists()


def test_retire_leaves_a_file_of_that_name_that_is_not_the_marker(saved: Path) -> None:
    (saved / ".metadata").write_bytes(b"of another program")
    retire(LocalStore(saved))
    assert os.listdir(saved) == [".metadata"]


@pytest.mark.parametrize("how", ["save", "load", "load of itself", "routed load of itself"])
def test_the_next_save_or_load_beside_it_heals_it(saved: Path, new_path: NewPath, how: str) -> None:
    (saved / ".metadata").unlink()
    other = new_path()
    assert other.parent == saved.parent
    save(other)
    if how != "save":
        (saved / ".metadata").unlink()
        assert load(saved if "itself" in how else other) == [1.0] * 3
    assert (saved / ".metadata").read_bytes() == MARKER


@pytest.mark.skipif(not routing._is_known(), reason="DCP of this torch is not routed")
def test_a_routed_load_heals_it(saved: Path) -> None:
    (saved / ".metadata").unlink()
    with install(every=True):
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=saved)
    assert (saved / ".metadata").read_bytes() == MARKER


@pytest.mark.parametrize("replace", [False, True])
def test_a_directory_of_its_name_is_refused_before_anything_is_written(
    new_path: NewPath, replace: bool
) -> None:
    path = new_path()
    (path / ".metadata").mkdir(parents=True)
    with pytest.raises(BaseException, match=r"\.metadata is a directory|holds .*\.metadata"):
        dcp.save({"w": torch.ones(3)}, storage_writer=HoldfastWriter(path, replace=replace))
    assert os.listdir(path) == [".metadata"]


def test_the_steps_of_a_checkpointer_get_none(new_path: NewPath) -> None:
    run = new_path()
    with holdfast.Checkpointer(run, every=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(3)})
    healing.heal(checkpointer.path(3))
    assert not list(run.glob("*/.metadata"))


def test_what_is_being_deleted_gets_none(saved: Path) -> None:
    (saved / ".metadata").unlink()
    (saved / f"{LEAVING_PREFIX}1234").touch()
    healing.heal(str(saved))
    assert not (saved / ".metadata").exists()


def test_a_checkpoint_that_goes_while_it_is_healed_leaves_no_marker(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / ".metadata").unlink()
    (saved / "config.json").touch()  # which keeps the directory there

    def late(store: LocalStore) -> None:
        retire(store)
        markers.put_marker(store)

    monkeypatch.setattr(healing, "put_marker", late)
    healing.heal(str(saved))
    assert os.listdir(saved) == ["config.json"]


def test_a_directory_that_cannot_be_written_to_is_read_nevertheless(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / ".metadata").unlink()

    def fail(self: LocalStore, name: str, data: bytes) -> None:
        raise holdfast.errors.StoreError("read-only")

    monkeypatch.setattr(LocalStore, "prepare", fail)
    assert load(saved) == [1.0] * 3


def test_a_marker_without_manifest_is_no_checkpoint(saved: Path) -> None:
    (saved / "MANIFEST").unlink()
    with pytest.raises(NotCommittedError, match="the marker of a checkpoint"):
        holdfast.load(saved, into={"w": torch.zeros(3)})
    save(saved)
    assert load(saved) == [1.0] * 3
