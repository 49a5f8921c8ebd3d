"""What a commit, and what goes with it in a run's directory, does where it seldom gets to."""

import errno
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Keep
from holdfast.brief import show_bytes
from holdfast.engine import commit, retire
from holdfast.errors import CorruptError, PeerError, StateError, StoreError
from holdfast.format import spec
from holdfast.format.manifest import Manifest, check_table
from holdfast.format.rows import Written, written_in
from holdfast.group.phase import Phase
from holdfast.runs.directory import Run
from holdfast.saving import save as save_module
from holdfast.saving import share
from holdfast.stores.local import LocalStore

NewPath = Callable[[], Path]
SAVE_ID = "0" * 32


def save(path: Path) -> None:
    holdfast.save({"w": torch.ones(3)}, path)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        error = StoreError("the disk does not work")
        error.errno = number
        raise error

    return fail


def left(path: Path) -> list[str]:
    return sorted(p.name for p in path.rglob("*") if p.is_file())


def test_what_the_dead_left_is_no_reason_not_to_save(new_path: NewPath) -> None:
    path = new_path()
    path.mkdir()
    (path / ".manifest-of-the-dead").write_bytes(b"")
    save(path)
    names = sorted(file.name for file in path.iterdir())
    assert names == [".manifest-of-the-dead", "MANIFEST", "data"]


def test_a_directory_that_cannot_be_listed_is_not_saved_to(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> list[Any]:
        error = StoreError("list: not today")
        error.errno = 13
        raise error

    monkeypatch.setattr(LocalStore, "list", refuse)
    with pytest.raises(StoreError, match="not today"):
        (path := new_path()).mkdir()
        commit.check_absent(LocalStore(path))


def test_a_directory_that_goes_while_it_is_looked_at_holds_no_checkpoint(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := new_path()).mkdir()
    monkeypatch.setattr(LocalStore, "list", failing(errno.ENOENT))
    commit.check_absent(LocalStore(path))


def test_data_that_cannot_be_listed_is_not_taken_for_ours(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, names = new_path(), LocalStore.list
    (path / spec.DATA_DIRECTORY).mkdir(parents=True)

    def refuse(self: LocalStore, name: str = "") -> Any:
        return failing(errno.EIO)() if name == spec.DATA_DIRECTORY else names(self, name)

    commit.check_absent(LocalStore(path))
    monkeypatch.setattr(LocalStore, "list", refuse)
    with pytest.raises(StoreError, match="does not work"):
        commit.check_absent(LocalStore(path))


@pytest.mark.parametrize("call", ["list", "modified_s"])
def test_data_of_which_nothing_is_known_is_not_deleted(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path, real = new_path(), getattr(LocalStore, call)
    (dead := path / spec.DATA_DIRECTORY / SAVE_ID).mkdir(parents=True)
    (dead / "00000-0.hf").write_bytes(b"1")

    def refuse(self: LocalStore, name: str = "") -> Any:
        return failing(errno.EIO)() if name.endswith(SAVE_ID) else real(self, name)

    monkeypatch.setattr(LocalStore, call, refuse)
    with pytest.raises(StoreError, match="does not work"):
        retire.sweep(LocalStore(path), math.inf)
    assert left(path) == ["00000-0.hf"]
    monkeypatch.setattr(LocalStore, call, real)
    retire.sweep(LocalStore(path), math.inf)
    assert not path.exists()


def test_a_directory_that_goes_while_it_is_swept_needs_no_sweep(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = new_path(), LocalStore.modified_s
    (path / spec.DATA_DIRECTORY / SAVE_ID).mkdir(parents=True)

    def late(self: LocalStore, name: str) -> float:
        if name.endswith(SAVE_ID):
            shutil.rmtree(path / spec.DATA_DIRECTORY, ignore_errors=True)
        return real(self, name)

    monkeypatch.setattr(LocalStore, "modified_s", late)
    retire.sweep(LocalStore(path), 0)
    assert not (path / spec.DATA_DIRECTORY).exists()


def test_a_manifest_that_nobody_would_read_is_not_committed(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    monkeypatch.setattr(spec, "MANIFEST_BYTES_MAX", 100)
    with pytest.raises(StateError, match=r"cannot be read back: it takes \d+ bytes, at most 1"):
        save(path)
    assert left(path) == []


def test_a_header_that_nobody_would_read_is_not_committed(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    monkeypatch.setattr(spec, "HEADER_BYTES_MAX", 100)
    with pytest.raises(
        StateError, match=r"data file cannot be read back: its JSON header takes \d+"
    ):
        save(path)
    assert left(path) == []


def test_boxes_that_were_not_planned_are_not_committed(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    others = Written(bytes(16), written_in([]).columns)
    monkeypatch.setattr(save_module, "written_in", lambda tables: others)
    with pytest.raises(StateError, match="rank 0 wrote other boxes than were planned"):
        save(path)
    assert left(path) == []


def _all_cut(manifest: Manifest) -> Manifest:
    return replace(manifest, is_cut=np.ones_like(manifest.is_cut))


def test_shards_that_do_not_tile_are_not_committed(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gap(_: object) -> None:
        raise CorruptError("tensor w: 2 elements are in no shard")

    path = new_path()
    monkeypatch.setattr(commit, "check_table", lambda table: _all_cut(check_table(table)))
    monkeypatch.setattr(commit, "check_tiling", gap)
    with pytest.raises(StateError, match="do not make whole tensors: tensor w: 2 elements"):
        save(path)
    assert left(path) == []


@pytest.mark.parametrize(("size", "text"), [(None, "is not there"), (7, "has 7 bytes")])
def test_a_file_that_the_coordinator_sees_otherwise_is_not_committed(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, size: int | None, text: str
) -> None:
    path, names = new_path(), LocalStore.list

    def seen(self: LocalStore, name: str = "") -> list[Any]:
        entries = names(self, name)
        if name.count("/") == 0:
            return entries
        return [replace(e, size_bytes=size) for e in entries] if size is not None else []

    monkeypatch.setattr(LocalStore, "list", seen)
    with pytest.raises(StoreError, match=f"{text} on rank 0"):
        save(path)
    assert not (path / "MANIFEST").exists()


def test_a_manifest_that_did_not_come_about_leaves_no_file(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StoreError("sync: no such luck")

    path = new_path()
    monkeypatch.setattr(LocalStore, "sync_above", fail)  # the manifest is there, under its own name
    with pytest.raises(StoreError, match="no such luck") as caught:
        save(path)
    assert not path.exists() and not getattr(caught.value, "__notes__", [])


def test_a_checkpoint_is_not_replaced_by_one_of_other_content(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_path()
    state = {"w": torch.arange(100.0)}
    for step in range(2):
        holdfast.save(state, root / f"step-{step:08}", codec="delta")
    before = left(root)
    monkeypatch.setattr(commit, "content_digest", lambda _: "0" * 32)
    with pytest.raises(StateError, match="differ from its MANIFEST; the checkpoint is unchanged"):
        holdfast.rebase(root / "step-00000001")
    assert left(root) == before
    assert torch.equal(holdfast.open(root / "step-00000001").tensor("w"), state["w"])


def test_who_promised_its_files_and_lost_contact_leaves_them(new_path: NewPath) -> None:
    store = LocalStore(new_path())
    below = Path(store.location, "data", SAVE_ID)
    below.mkdir(parents=True)
    mine, other = below / "00001-0.hf", below / "00002-0.hf"
    mine.write_bytes(b"1")
    other.write_bytes(b"2")
    phase: Any = Phase.__new__(Phase)
    phase.promised = True
    share.discard(store, SAVE_ID, 1, phase, PeerError("out of contact", rank=-1, cause=""))
    assert mine.exists() and other.exists()
    share.discard(store, SAVE_ID, 1, phase, PeerError("rank 0 failed", rank=0, cause="EIO"))
    assert not mine.exists() and other.exists()


def test_a_step_that_is_not_there_is_let_go_without_a_word(new_path: NewPath) -> None:
    run = Run(new_path(), Keep.latest(1))
    run.retire(7)
    assert run.steps() == []


def test_a_full_disk_is_told_what_the_policy_keeps(new_path: NewPath) -> None:
    run = Run(new_path(), Keep.latest(2))
    save(Path(run.path(1)))
    (Path(run.path(1)) / "data" / "stray").write_text("a file, where directories are")
    holdfast.save({}, run.path(2))
    size = sum(run.disk_bytes(step) for step in (1, 2))
    assert f"Steps kept here: 2, of {show_bytes(size)} together (Keep.latest(2))" in run.advice()
    assert "The policy is Keep.latest(2)" in run.room_advice()


def test_steps_that_another_job_lets_go_of_meanwhile_are_no_fault(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, settle = Run(new_path(), Keep.latest(1)), Run._settle
    save(Path(run.path(1)))
    save(Path(run.path(2)))

    def settle_too_late(self: Run) -> None:
        for step in self.steps():
            shutil.rmtree(self.path(step))
        settle(self)

    monkeypatch.setattr(Run, "_settle", settle_too_late)
    run.tidy(2)
    assert run.steps() == [] and caplog.messages == []


def test_a_step_whose_manifest_is_gone_already_is_let_go(new_path: NewPath) -> None:
    run = Run(new_path(), Keep.latest(1))
    save(Path(run.path(1)))
    (Path(run.path(1)) / spec.MANIFEST_NAME).unlink()
    run.retire(1)
    assert not Path(run.path(1)).exists()


def test_a_mark_that_cannot_be_looked_for_is_not_taken_to_be_absent(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(path := new_path())
    monkeypatch.setattr(LocalStore, "list", failing(errno.EIO))
    with pytest.raises(StoreError, match="does not work"):
        retire.is_leaving(LocalStore(str(path)))
    monkeypatch.setattr(LocalStore, "list", failing(errno.ENOENT))
    assert not retire.is_leaving(LocalStore(str(path)))


def test_pending_manifests_that_cannot_be_decoded_stay(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are being written, or torn; those that cannot be read may be links of the base."""
    save(path := new_path())
    pending = path / f"{spec.PENDING_MANIFEST_PREFIX}{SAVE_ID}"
    pending.write_bytes(b"the beginning of one")
    retire.revoke_links(LocalStore(str(path)), "step-00000001")
    monkeypatch.setattr(LocalStore, "get", failing(errno.ENOENT))
    retire.revoke_links(LocalStore(str(path)), "step-00000001")
    monkeypatch.setattr(LocalStore, "get", failing(errno.EIO))
    with pytest.raises(StoreError, match="does not work"):
        retire.revoke_links(LocalStore(str(path)), "step-00000001")
    assert pending.exists()


def test_a_run_that_was_there_and_is_gone_takes_no_step(new_path: NewPath) -> None:
    root = new_path()
    root.mkdir()
    run = Run(root, Keep.latest(1))
    assert run.steps() == []
    root.rmdir()
    with pytest.raises(StoreError, match="the directory is gone"):
        run.free_bytes()


def test_what_cannot_be_noted_is_logged(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_path()
    (root / "metrics.jsonl").mkdir(parents=True)
    Run(root, Keep.all()).metrics.add("save", 3, [{"seconds": 1}])
    assert "metrics.jsonl lacks the save of step 3" in caplog.text


def test_room_is_made_of_what_nothing_kept_needs(new_path: NewPath) -> None:
    root = new_path()
    run = Run(root, Keep.latest(1))
    for step in range(3):
        holdfast.save({"w": torch.full((3,), float(step))}, run.path(step), codec="delta")
    run.tidy(2)
    assert run.steps() == [0, 1, 2]  # the links need those before them
    holdfast.save({"w": torch.ones(3)}, run.path(3))
    assert run.make_room({0}) == 2
    assert run.steps() == [0, 3]
