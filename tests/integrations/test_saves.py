"""The saves of a framework's loop: whole under their own names, and what is deleted after them."""

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import OptionError, StoreError
from holdfast.integrations import saves as saves_module
from holdfast.integrations.adapter import is_committed
from holdfast.integrations.saves import Saves

NewPath = Callable[[], Path]


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((4096,), float(step)), "step": step}


def saved(saves: Saves, path: Path, step: int, **more: Any) -> None:
    saves.save(state(step), path, place=saves.place_for(path), **more)


def step_of(path: Path) -> int:
    return int(holdfast.open(path).objects()["step"])


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a block: writes fail, in whichever thread they are."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def root(new_path: NewPath) -> Path:
    path = new_path()
    path.mkdir(parents=True)
    return path


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_a_checkpoint_has_its_name_only_when_it_is_whole(root: Path) -> None:
    saves, path = Saves(), root / "a.ckpt"
    place = saves.place_for(path)
    assert os.path.basename(place) == ".a.ckpt.new"
    with full_disk():
        saves.save(state(1), path, place=place)
        saves.wait()
    assert "a.ckpt" not in names(root)
    saved(saves, path, 2)
    saves.close()
    assert names(root) == ["a.ckpt"] and step_of(path) == 2


def test_a_committed_checkpoint_is_replaced_in_its_place(root: Path) -> None:
    saves, path = Saves(), root / "last.ckpt"
    saved(saves, path, 1, now=True)
    assert saves.place_for(path) == str(path)
    saved(saves, path, 2, now=True)
    assert names(root) == ["last.ckpt"] and step_of(path) == 2


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_another_format_has_left_is_replaced(root: Path, kind: str) -> None:
    path = root / "last.ckpt"
    path.write_text("theirs") if kind == "file" else (path / "x").mkdir(parents=True)
    saves = Saves()
    saved(saves, path, 3)
    saves.close()
    assert names(root) == ["last.ckpt"] and step_of(path) == 3


def test_a_deletion_waits_until_the_save_before_it_is_durable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, older, newer = Saves(), root / "1", root / "2"
    saved(saves, older, 1, now=True)
    stock, seen, has_begun = saves_module._publish, list[bool](), threading.Event()

    def publish(place: str, final: str) -> None:
        assert has_begun.wait(60)
        saves.delete(older)  # the framework's next call, before the save is over
        seen.append(is_committed(older))
        stock(place, final)

    monkeypatch.setattr(saves_module, "_publish", publish)
    saved(saves, newer, 2)
    has_begun.set()
    saves.close()
    assert seen == [True] and names(root) == ["2"]


def test_nothing_is_deleted_after_a_save_that_failed(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves, older = Saves(), root / "1"
    saved(saves, older, 1, now=True)
    with full_disk():
        saved(saves, root / "2", 2)
        saves.delete(older)
        saves.wait()
        assert is_committed(older) and "saving" in caplog.text
        with pytest.raises(StoreError):
            saves.close()
    assert is_committed(older)
    saved(saves, root / "3", 3)
    saves.close()
    assert "1" not in names(root) and step_of(root / "3") == 3


def test_a_save_that_training_waits_for_raises(root: Path) -> None:
    with full_disk(), pytest.raises(StoreError):
        saved(Saves(stage="sync"), root / "1", 1)
    with full_disk(), pytest.raises(StoreError):
        saved(Saves(), root / "1", 1, now=True)


def test_another_error_is_not_covered(root: Path) -> None:
    saves = Saves()
    with full_disk():
        saved(saves, root / "1", 1)
        saves.wait()
    with pytest.raises(KeyError):
        try:
            raise KeyError("the user's")
        finally:
            saves.close()


def test_what_a_dead_job_left_is_finished_or_deleted(root: Path) -> None:
    holdfast.save(state(1), root / ".whole.ckpt.new")
    (root / ".torn.ckpt.new" / "data").mkdir(parents=True)
    (root / ".moved.ckpt.old").write_text("theirs")
    Saves().place_for(root / "x")
    assert names(root) == ["moved.ckpt", "whole.ckpt"]
    holdfast.save(state(2), root / ".whole.ckpt.new")
    (root / ".moved.ckpt.old").write_text("older")
    Saves().place_for(root / "x")
    assert names(root) == ["moved.ckpt", "whole.ckpt"] and step_of(root / "whole.ckpt") == 1


def test_a_deletion_of_a_dead_job_is_finished(root: Path) -> None:
    for step in (1, 2):
        holdfast.save(state(step), root / f"{step}")
    (root / "1" / ".manifest-leaving-0123456789abcdef").hardlink_to(root / "1" / "MANIFEST")
    (root / "1" / "MANIFEST").unlink()
    Saves().place_for(root / "x")
    assert names(root) == ["2"] and step_of(root / "2") == 2


def test_of_a_deletion_of_a_dead_job_only_that_save_goes(root: Path) -> None:
    """A mark that cannot be read, or is of who replaces a checkpoint, lets nothing go."""
    holdfast.save(state(1), root / "1")
    (kept,) = (root / "1" / "data").iterdir()
    (root / "1" / ".manifest-leaving-fedcba9876543210").write_bytes(b"torn")
    (root / "1" / f".manifest-leaving-{kept.name}").hardlink_to(root / "1" / "MANIFEST")
    (root / "1" / "MANIFEST").rename(root / "manifest")
    Saves().place_for(root / "x")
    assert [*(root / "1" / "data").iterdir()] == [kept] and len([*kept.iterdir()]) == 1
    (root / "1" / ".manifest-leaving-0123456789abcdef").hardlink_to(root / "manifest")
    other = root / "1" / "data" / ("0" * 32)
    other.mkdir()
    (other / "00000-0.hf").write_bytes(b"of another")
    Saves().place_for(root / "x")
    assert [*(root / "1" / "data").iterdir()] == [other] and len([*other.iterdir()]) == 1


def test_a_link_and_what_is_not_there_are_deleted_as_such(root: Path) -> None:
    saves, path = Saves(), root / "1"
    saved(saves, path, 1, now=True)
    (root / "link").symlink_to("1")
    saves.delete(root / "link")
    saves.delete(root / "nothing")
    assert names(root) == ["1"] and step_of(path) == 1


def test_what_a_link_leads_to_stays_until_the_link_is_moved(root: Path) -> None:
    saves, link = Saves(), root / "last.ckpt"
    for step in (1, 2):
        saved(saves, root / f"{step}", step)
        saves.wait()
        if step == 2:
            saves.delete(root / "1")
            assert names(root) == ["1", "2", "last.ckpt"] and step_of(link) == 1
        saves.link(root / f"{step}", link)
        assert os.readlink(link) == f"{step}" and step_of(link) == step
    assert names(root) == ["2", "last.ckpt"]
    (root / "mine").symlink_to("2")
    saves.delete(root / "2")
    assert is_committed(root / "2")
    saves.close()
    assert not is_committed(root / "2")


def test_a_link_does_not_lead_to_what_was_not_saved(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves, link = Saves(), root / "last.ckpt"
    saved(saves, root / "1", 1, now=True)
    saves.link(root / "1", link)
    with full_disk():
        saved(saves, root / "2", 2)
        saves.delete(root / "1")
        saves.wait()
        saves.link(root / "2", link)
    assert step_of(link) == 1 and "2 is not saved" in caplog.text


def test_a_link_takes_the_place_of_a_checkpoint_and_the_other_way_round(root: Path) -> None:
    saves, last = Saves(), root / "last.ckpt"
    saved(saves, root / "1", 1, now=True)
    saved(saves, last, 1, now=True)
    saves.link(root / "1", last)
    assert os.readlink(last) == "1" and names(root) == ["1", "last.ckpt"]
    saved(saves, last, 2, now=True)  # not through the link
    assert not last.is_symlink() and step_of(last) == 2
    assert step_of(root / "1") == 1 and names(root) == ["1", "last.ckpt"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match="expected one of eager, lazy, sync"):
        Saves(stage="later")
    with pytest.raises(OptionError, match="codec is 'delta', which makes each checkpoint from"):
        Saves(codec="delta")
