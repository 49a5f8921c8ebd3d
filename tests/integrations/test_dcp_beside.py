"""Two checkpoints in one directory, of DCP and of holdfast: never the older one without a word."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import CorruptError, OptionError
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter, install, routing

from .versions import as_dcp_tells

NewPath = Callable[[], Path]
OLD, NEW = torch.ones(4), torch.full((4,), 2.0)


class OwnWriter(dcp.FileSystemWriter):
    """A writer that is not routed, as programs have."""


@pytest.fixture
def both(new_path: NewPath) -> Path:
    """A directory with an older checkpoint of holdfast, and a newer one of DCP."""
    path = new_path()
    dcp.save({"w": OLD}, storage_writer=HoldfastWriter(path))
    dcp.save({"w": NEW}, storage_writer=OwnWriter(path))
    return path


@pytest.fixture
def routed() -> Iterator[None]:
    with install(every=True):
        yield


def into() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4)}


READS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: holdfast.load(path, into=into()),
    "partial load": lambda path: holdfast.load(path, into=into(), partial=True),
    "load that only reports names": lambda path: holdfast.load(path, into=into(), strict=False),
    "open": lambda path: holdfast.open(path).tensor("w"),
    "dcp.load": lambda path: dcp.load(into(), checkpoint_id=path),
    "our reader": lambda path: dcp.load(into(), storage_reader=HoldfastReader(path)),
}


@pytest.mark.parametrize("how", READS)
def test_a_read_names_both(both: Path, routed: None, how: str) -> None:
    if how == "dcp.load" and not routing._is_known():
        pytest.skip("DCP of this torch is not routed")
    error = r"holds two checkpoints(?=.*MANIFEST)(?=.*\.metadata)"
    with pytest.raises(BaseException, match=as_dcp_tells(error) if "reader" in how else error):
        READS[how](both)


def test_a_file_of_a_save_of_dcp_that_died_is_named_too(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"w": OLD}, path)
    (path / "__0_0.distcp").write_bytes(b"half")
    with pytest.raises(CorruptError, match=r"__0_0\.distcp"):
        holdfast.load(path, into=into())


def test_verify_counts_it_as_damage(both: Path) -> None:
    (fault,) = holdfast.verify(both).damage
    assert "holds two checkpoints" in fault.what


def test_a_restore_does_not_take_it(new_path: NewPath) -> None:
    run = new_path()
    with holdfast.Checkpointer(run, every=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": OLD * step})
        dcp.save({"w": NEW * 9}, storage_writer=OwnWriter(checkpointer.path(2)))
    found = into()
    assert holdfast.Checkpointer(run).restore(found) == 1
    assert torch.equal(found["w"], OLD)


def test_a_save_beside_a_checkpoint_of_dcp_is_refused(new_path: NewPath) -> None:
    path = new_path()
    dcp.save({"w": OLD}, storage_writer=OwnWriter(path))
    with pytest.raises(OptionError, match="holds a checkpoint of PyTorch DCP"):
        holdfast.save({"w": NEW}, path)
    found = into()
    dcp.load(found, storage_reader=dcp.FileSystemReader(path))
    assert torch.equal(found["w"], OLD)
