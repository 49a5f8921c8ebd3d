"""A save through DCP over a checkpoint: replaced as DCP does, or refused in DCP's words."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import holdfast
from holdfast.errors import StoreError
from holdfast.format.spec import MARKER
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter, install, routing, writer
from holdfast.stores.local import LocalStore

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not routing._is_known(), reason="DCP of this torch is not routed"),
]
NewPath = Callable[[], Path]


class OwnWriter(FileSystemWriter):
    """A writer that is left to DCP."""

    def finish(self, *given: Any, **more: Any) -> None:
        super().finish(*given, **more)


@pytest.fixture
def every() -> Iterator[None]:
    with install(every=True):
        yield


def state(number: float) -> dict[str, Any]:
    return {"w": torch.full((4,), number), f"only-{number}": torch.ones(2)}


def load(path: Path) -> list[float]:
    into = {"w": torch.zeros(4)}
    dcp.load(into, storage_reader=HoldfastReader(path))
    found: list[float] = into["w"].tolist()
    return found


def check_new(path: Path) -> None:
    assert load(path) == [2.0] * 4
    assert sorted(os.listdir(path)) == [".metadata", "MANIFEST", "data"]
    assert (path / ".metadata").read_bytes() == MARKER
    assert holdfast.verify(path).damage == ()
    assert len(os.listdir(path / "data")) == 1
    assert holdfast.open(path).names() == ["only-2.0", "w"]


def old_of_ours(path: Path) -> None:
    dcp.save(state(1.0), storage_writer=HoldfastWriter(path))


def old_of_dcp(path: Path) -> None:
    dcp.save(state(1.0), storage_writer=OwnWriter(path, single_file_per_rank=False))


def both(path: Path) -> None:
    old_of_ours(path)
    old_of_dcp(path)


def dead_of_dcp(path: Path) -> None:
    old_of_ours(path)
    (path / "__0_0.distcp").write_bytes(b"half")


def marker_alone(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(MARKER)


OLD = {f.__name__: f for f in (old_of_ours, old_of_dcp, both, dead_of_dcp, marker_alone)}


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("how", ["path", "writer", "ours"])
def test_where_we_are_the_writer_it_is_overwritten(new_path: NewPath, old: str, how: str) -> None:
    path = new_path()
    OLD[old](path)
    ways: dict[str, Any] = {
        "path": {"checkpoint_id": path},
        "writer": {"storage_writer": FileSystemWriter(path)},
        "ours": {"storage_writer": HoldfastWriter(path, replace=True)},
    }
    dcp.save(state(2.0), **ways[how])
    check_new(path)


REFUSING: dict[str, Callable[[Path], dict[str, Any]]] = {
    "overwrite=False": lambda p: {"storage_writer": FileSystemWriter(p, overwrite=False)},
    "our own writer": lambda p: {"storage_writer": HoldfastWriter(p)},
}


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("how", REFUSING)
def test_it_is_refused_in_the_words_of_dcp(new_path: NewPath, how: str) -> None:
    path = new_path()
    old_of_ours(path)
    with pytest.raises(BaseException, match=r"Checkpoint already exists and self\.overwrite=False"):
        dcp.save(state(2.0), **REFUSING[how](path))
    assert load(path) == [1.0] * 4


def test_install_without_replace_refuses(new_path: NewPath) -> None:
    path = new_path()
    old_of_ours(path)
    with install(every=True, replace=False), pytest.raises(BaseException, match="already exists"):
        dcp.save(state(2.0), checkpoint_id=path)
    assert load(path) == [1.0] * 4


@pytest.mark.usefixtures("every")
def test_a_save_that_fails_leaves_the_old_one(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    old_of_ours(path)

    def fail(*_: object) -> None:
        raise StoreError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.engine.commit.check_present", fail)
        with pytest.raises(BaseException, match="the disk is gone"):
            dcp.save(state(2.0), checkpoint_id=path)
    assert load(path) == [1.0] * 4
    dcp.save(state(2.0), checkpoint_id=path)
    check_new(path)


@pytest.mark.usefixtures("every")
def test_a_crash_before_files_of_dcp_are_gone_names_both_and_the_next_save_heals(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    old_of_dcp(path)

    def crash(store: LocalStore) -> None:
        raise StoreError("as if it had crashed")

    with monkeypatch.context() as patched:
        patched.setattr(writer, "put_marker", crash)
        with pytest.raises(BaseException, match="as if it had crashed"):
            dcp.save(state(2.0), checkpoint_id=path)
    with pytest.raises(BaseException, match="holds two checkpoints"):
        load(path)
    dcp.save(state(2.0), checkpoint_id=path)
    check_new(path)
