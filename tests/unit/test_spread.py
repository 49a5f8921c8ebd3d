"""What a host does with its part of a run whose MANIFESTs another host has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.engine import commit
from holdfast.engine.check import read_manifest
from holdfast.engine.retire import let_go
from holdfast.errors import AlreadyCommittedError, StoreError
from holdfast.runs.directory import Run
from holdfast.stores.url import open_store

NewPath = Callable[[], Path]


def saved(path: Path) -> str:
    """Save a step, and return the name of the save."""
    holdfast.save({"w": torch.ones(9)}, path)
    return read_manifest(open_store(path)).table.header.save_id


def test_only_the_save_that_is_kept_stays(new_path: NewPath) -> None:
    path = new_path()
    kept = saved(path)
    (path / "data" / ("0" * 32)).mkdir()
    (path / "data" / ("0" * 32) / "00000-0.hf").write_bytes(b"x")
    let_go(open_store(path), kept)
    assert [p.name for p in (path / "data").iterdir()] == [kept]
    let_go(open_store(path), "")  # it could not be read which: all stay
    assert [p.name for p in (path / "data").iterdir()] == [kept]
    let_go(open_store(path), None)
    assert not path.exists()


def test_a_hint_to_a_step_that_is_gone_on_purpose_goes_too(new_path: NewPath) -> None:
    root = new_path()
    with Checkpointer(root, signals=()) as checkpointer:
        checkpointer.save(3, {"w": torch.ones(9)})
    run = Run(root, Keep.all())
    run.drop_latest([3])
    assert (root / "LATEST").exists()
    run.drop_latest([])
    assert not (root / "LATEST").exists()
    run.drop_latest([])


@pytest.mark.parametrize("ranks", [None, frozenset({0}), frozenset({1})])
def test_only_the_files_of_ranks_that_share_a_disk_are_looked_for(
    new_path: NewPath, ranks: frozenset[int] | None
) -> None:
    path = new_path()
    save = saved(path)
    store: Any = open_store(path)
    manifest = read_manifest(store)
    commit.check_present(store, manifest, ranks)
    (path / "data" / save / "00000-0.hf").unlink()
    if ranks == {1}:  # which has written nothing of it
        commit.check_present(store, manifest, ranks)
        return
    with pytest.raises(StoreError, match="but is not there on rank 0"):
        commit.check_present(store, manifest, ranks)


def test_a_manifest_of_our_own_is_no_lost_race(new_path: NewPath) -> None:
    path = new_path()
    saved(path)
    store: Any = open_store(path)
    commit._settle_race(store, (path / "MANIFEST").read_bytes())
    with pytest.raises(AlreadyCommittedError, match="was taken by another save"):
        commit._settle_race(store, b"another")
