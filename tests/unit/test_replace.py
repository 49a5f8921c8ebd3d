"""`replace=True`: the new checkpoint takes the place of the old one in one step, or is refused."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.codecs import Delta
from holdfast.engine import retire as retire_module
from holdfast.engine.basis import forget_bases
from holdfast.engine.commit import Commit
from holdfast.engine.replace import Replacement
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    FencedError,
    NotCommittedError,
    OptionError,
    ReplacedError,
    StoreError,
    VersionError,
)
from holdfast.format.names import step_name
from holdfast.runs.directory import Run
from holdfast.stores.local import LocalStore

from .test_removed import VERBS, checked, damage_of, removals

NewPath = Callable[[], Path]


def state(step: int = 0) -> dict[str, Any]:
    torch.manual_seed(0)
    a = torch.randn(3000)
    a[7] = step
    return {"a": a, "b": torch.randn(40, 30), "step": step}


def held(path: Path) -> int:
    """Load all of a checkpoint; return the step that its state is of."""
    into = {"a": torch.zeros(3000), "b": torch.zeros(40, 30), "step": -1}
    holdfast.load(path, into=into)
    step = into["step"]
    assert isinstance(step, int) and torch.equal(into["a"], state(step)["a"])
    return step


def names(path: Path) -> list[str]:
    """Name everything there but data files: those of one save are as `1`."""
    saves = len(list((path / "data").iterdir()))
    return [*sorted(entry.name for entry in path.iterdir() if entry.name != "data"), str(saves)]


def replaced(path: Path, step: int, **given: Any) -> None:
    holdfast.save(state(step), path, step=step, replace=True, **given)


def test_the_new_one_stands_alone(new_path: NewPath) -> None:
    path = new_path()
    for step in (1, 2, 3):
        replaced(path, step)  # the first has nothing to replace
        assert held(path) == step
        assert names(path) == ["MANIFEST", "1"]
        assert holdfast.verify(path).damage == ()


def test_without_it_a_checkpoint_is_refused_and_the_text_says_how(new_path: NewPath) -> None:
    path = new_path()
    replaced(path, 1)
    with pytest.raises(AlreadyCommittedError, match="replace=True"):
        holdfast.save(state(2), path)
    assert held(path) == 1


@pytest.mark.parametrize("stage", ["eager", "lazy"])
def test_a_save_in_the_background_replaces_too(new_path: NewPath, stage: Any) -> None:
    path = new_path()
    for step in (1, 2):
        handle = holdfast.save_async(state(step), path, step=step, replace=True, stage=stage)
        assert handle.result() == str(path)
    assert held(path) == 2 and names(path) == ["MANIFEST", "1"]


@pytest.mark.parametrize("codec", ["raw", "lossless", Delta(every=3)])
def test_every_codec_replaces_and_none_is_made_from_what_it_replaces(
    new_path: NewPath, codec: Any
) -> None:
    path = new_path()
    for step in (1, 2):
        replaced(path, step, codec=codec)
    assert held(path) == 2 and holdfast.open(path).base is None


def test_a_delta_may_replace_a_step_and_its_base_stays(new_path: NewPath) -> None:
    run = new_path()
    for step in (1, 2):
        holdfast.save(state(step), run / step_name(step), step=step)
    replaced(run / step_name(2), 3, codec="delta")
    assert holdfast.open(run / step_name(2)).base == step_name(1)
    assert held(run / step_name(2)) == 3
    with pytest.raises(AlreadyCommittedError, match=r"base of the delta checkpoint step-00000002"):
        replaced(run / step_name(1), 9)
    assert held(run / step_name(1)) == 1 and held(run / step_name(2)) == 3
    holdfast.rebase(run / step_name(2))
    replaced(run / step_name(1), 9)
    assert held(run / step_name(1)) == 9 and held(run / step_name(2)) == 3


def test_an_invalid_value_is_an_option_error(new_path: NewPath) -> None:
    with pytest.raises(OptionError, match=r"replace is 'yes'; expected True or False"):
        holdfast.save(state(), new_path(), replace="yes")  # type: ignore[arg-type]


def test_a_base_whose_delta_cannot_be_read_stays(new_path: NewPath) -> None:
    run = new_path()
    for name in ("first", "second"):
        holdfast.save(state(), run / name)
    manifest = run / "second" / "MANIFEST"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    with pytest.raises(CorruptError, match=r"second cannot be read, and may be a delta of first"):
        replaced(run / "first", 1)
    manifest.write_bytes(b"a file of another program")
    replaced(run / "first", 1)
    assert held(run / "first") == 1


def test_foreign_directories_beside_it_are_left_alone(new_path: NewPath) -> None:
    run = new_path()
    replaced(run / "first", 1)
    (run / "notes").mkdir()
    (run / "notes" / ".manifest-mine").write_bytes(b"mine")
    (run / "notes" / "MANIFEST").mkdir()
    with pytest.raises(StoreError, match="MANIFEST"):  # nobody can tell what it is
        replaced(run / "first", 2)
    (run / "notes" / "MANIFEST").rmdir()
    replaced(run / "first", 2)
    assert (run / "notes" / ".manifest-mine").read_bytes() == b"mine"


def sign(path: Path, place: Path) -> None:
    form, key = serialization, Ed25519PrivateKey.generate()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    place.write_bytes(private)
    holdfast.sign(path, key=place)


def test_a_signed_checkpoint_stays(new_path: NewPath, tmp_path: Path) -> None:
    path = new_path()
    replaced(path, 1)
    sign(path, tmp_path / "key")
    with pytest.raises(AlreadyCommittedError, match="is a signed checkpoint"):
        replaced(path, 2)
    assert held(path) == 1 and holdfast.signer(path)


def test_a_checkpoint_that_is_signed_during_the_save_stays(
    new_path: NewPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    prepare = Commit.prepare

    def sign_first(self: Commit, *given: Any) -> None:
        sign(path, tmp_path / "key")
        prepare(self, *given)

    monkeypatch.setattr(Commit, "prepare", sign_first)
    with pytest.raises(AlreadyCommittedError, match="is a signed checkpoint"):
        replaced(path, 2)
    assert (
        held(path) == 1 and holdfast.signer(path) and names(path) == ["MANIFEST", "SIGNATURE", "1"]
    )


def test_a_signature_of_what_was_replaced_goes_with_it(
    new_path: NewPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    replace = Replacement.replace

    def sign_first(self: Replacement) -> None:
        sign(path, tmp_path / "key")  # after the last look
        replace(self)

    monkeypatch.setattr(Replacement, "replace", sign_first)
    replaced(path, 2)
    assert held(path) == 2 and names(path) == ["MANIFEST", "1"]


def test_who_signs_what_is_replaced_meanwhile_is_told(
    new_path: NewPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    put = LocalStore.replace

    def replace_first(self: LocalStore, pending: str, name: str) -> None:
        monkeypatch.setattr(LocalStore, "replace", put)
        replaced(path, 2)
        put(self, pending, name)

    monkeypatch.setattr(LocalStore, "replace", replace_first)
    with pytest.raises(ReplacedError, match="while it was signed"):
        sign(path, tmp_path / "key")
    assert held(path) == 2 and names(path) == ["MANIFEST", "1"]


def test_a_step_of_another_job_stays(new_path: NewPath, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_path()
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, state(1))
        replaced(run / step_name(1), 2)  # of this job
        replaced(run / "best", 2)
    assert held(run / step_name(1)) == 2
    (run / ".epoch-00000009").write_text("{}")
    for name in (step_name(1), "best"):
        with pytest.raises(FencedError, match=r"belongs to another job, with epoch 9"):
            replaced(run / name, 3)
    monkeypatch.setattr("holdfast.engine.epochs.held", {})  # a process that is no job of it
    with pytest.raises(FencedError, match=r"this process has no epoch of it"):
        replaced(run / step_name(1), 3)
    replaced(run / "best", 3)
    assert held(run / step_name(1)) == 2 and held(run / "best") == 3


def test_a_job_that_takes_the_run_over_during_the_save_keeps_its_step(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_path()
    holdfast.save(state(1), run / step_name(1), step=1)
    prepare = Commit.prepare

    def take_first(self: Commit, *given: Any) -> None:
        prepare(self, *given)
        (run / ".epoch-00000009").write_text("{}")

    monkeypatch.setattr(Commit, "prepare", take_first)
    with pytest.raises(FencedError):
        replaced(run / step_name(1), 2)
    assert held(run / step_name(1)) == 1 and names(run / step_name(1)) == ["MANIFEST", "1"]


def test_what_is_not_holdfasts_stays(new_path: NewPath) -> None:
    for make, text in {
        (lambda p: (p / "MANIFEST").write_bytes(b"Manifest-Version: 1.0")): "is not a MANIFEST of",
        (lambda p: (p / "MANIFEST").mkdir()): "is not a regular file",
        (lambda p: (p / "MANIFEST").symlink_to("elsewhere")): "is not a regular file",
        (lambda p: (p / ".metadata").write_bytes(b"")): "a checkpoint of PyTorch DCP",
        (lambda p: (p / "data").write_bytes(b"")): "is not a checkpoint's",
        (lambda p: (p / "step-00000001").mkdir()): "is a run, with step-00000001",
    }.items():
        path = new_path()
        path.mkdir()
        make(path)
        before = sorted(os.listdir(path))
        with pytest.raises(OptionError, match=text):
            replaced(path, 1)
        assert sorted(os.listdir(path)) == before


def test_a_base_is_not_replaced_through_a_link(new_path: NewPath) -> None:
    run = new_path()
    for step in (1, 2):
        holdfast.save(state(step), run / step_name(step), step=step, codec="delta")
    for link in (run / "latest", run.parent / "latest"):
        link.symlink_to(run / step_name(1))
        with pytest.raises(OptionError, match=rf"is a symlink.*give.*{step_name(1)}"):
            replaced(link, 9)
    assert held(run / step_name(1)) == 1 and held(run / step_name(2)) == 2
    (run / "empty").mkdir()
    (run / "place").symlink_to("empty")
    replaced(run / "place", 3)  # where nothing is replaced
    assert held(run / "empty") == 3


def test_two_checkpoints_in_one_directory_stay(new_path: NewPath) -> None:
    path = new_path()
    replaced(path, 1)
    (path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(OptionError, match=r"holds two checkpoints"):
        replaced(path, 2)


def test_a_damaged_checkpoint_is_replaced(new_path: NewPath) -> None:
    path = new_path()
    replaced(path, 1)
    manifest = path / "MANIFEST"
    data = bytearray(manifest.read_bytes())
    data[-1] ^= 1
    manifest.write_bytes(data)
    with pytest.raises(CorruptError):
        held(path)
    replaced(path, 2)
    assert held(path) == 2
    shutil.rmtree(path / "data")
    replaced(path, 3)
    assert held(path) == 3


def test_a_checkpoint_of_a_newer_holdfast_stays(new_path: NewPath) -> None:
    path = new_path()
    replaced(path, 1)
    manifest = path / "MANIFEST"
    data = bytearray(manifest.read_bytes())
    data[8] = 9  # the version
    manifest.write_bytes(data)
    with pytest.raises(VersionError):
        replaced(path, 2)
    assert manifest.read_bytes() == data


def test_foreign_files_beside_it_stay(new_path: NewPath) -> None:
    path = new_path()
    replaced(path, 1)
    theirs = {"config.json", "manifest", "MANIFEST.bak", "Data", "MANIFEST\u0301", "sub"}
    for name in theirs:
        (path / name).write_bytes(b"theirs")
    replaced(path, 2)
    assert held(path) == 2
    assert {entry.name for entry in path.iterdir()} == theirs | {"MANIFEST", "data"}


class Broken(Exception):
    """Stands for a crash."""


def crash_before(monkeypatch: pytest.MonkeyPatch, what: str, count: int = 1) -> None:
    """Have the process die before a call of the store, for all that is left behind."""
    original = getattr(LocalStore, what)
    calls = 0

    def crash(self: LocalStore, *given: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            for name in ("remove", "remove_directory", "list"):
                monkeypatch.setattr(LocalStore, name, lambda *given, **more: _die())
            _die()
        return original(self, *given, **more)

    monkeypatch.setattr(LocalStore, what, crash)


def _die() -> None:
    raise Broken


def test_old_data_that_a_crash_left_is_swept_by_the_next_replace(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    with monkeypatch.context() as patch, pytest.raises(Broken):
        crash_before(patch, "revoke")  # the first thing that is done about the old data
        replaced(path, 2)
    assert held(path) == 2 and len(list((path / "data").iterdir())) == 2
    replaced(path, 3)
    assert held(path) == 3 and names(path) == ["MANIFEST", "1"]


def test_old_data_that_a_crash_left_is_swept_by_the_run(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_path()
    path = run / step_name(1)
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, state(1))
        with monkeypatch.context() as patch, pytest.raises(Broken):
            crash_before(patch, "revoke")
            replaced(path, 2)
        assert len(list((path / "data").iterdir())) == 2
        checkpointer.save(2, state(2))
    assert held(path) == 2 and names(path) == ["MANIFEST", "1"]


def test_data_of_a_replace_that_died_goes_when_it_is_a_day_old(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    with monkeypatch.context() as patch, pytest.raises(Broken):
        crash_before(patch, "rename")
        replaced(path, 2)
    assert held(path) == 1
    replaced(path, 3)
    assert len(list((path / "data").iterdir())) == 2  # its writer may be alive
    monkeypatch.setattr("holdfast.engine.replace.GRACE_S", -3600)
    replaced(path, 4)
    assert held(path) == 4 and names(path) == ["MANIFEST", "1"]


def test_a_mark_that_a_crash_left_keeps_no_delta_away_once_it_is_settled(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_path()
    holdfast.save(state(1), run / step_name(1), step=1)
    with monkeypatch.context() as patch, pytest.raises(Broken):
        crash_before(patch, "revoke")
        replaced(run / step_name(1), 2)
    retire_module.settle(LocalStore(run / step_name(1)))
    forget_bases()
    holdfast.save(state(3), run / step_name(3), step=3, codec="delta")
    assert holdfast.open(run / step_name(3)).base == step_name(1)


def test_a_restart_before_the_rename_keeps_the_old_one_whole(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    for what in ("prepare", "link", "sync_above", "rename"):
        with monkeypatch.context() as patch, pytest.raises(Broken):
            crash_before(patch, what)
            replaced(path, 2)
        assert held(path) == 1 and holdfast.verify(path).damage == ()


def test_of_two_at_once_the_last_rename_wins_and_the_other_is_told(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    rename = LocalStore.rename

    def rename_and_lose(self: LocalStore, pending: str, name: str) -> None:
        monkeypatch.setattr(LocalStore, "rename", rename)
        rename(self, pending, name)
        thread = threading.Thread(target=replaced, args=(path, 3))
        thread.start()
        thread.join()

    monkeypatch.setattr(LocalStore, "rename", rename_and_lose)
    with pytest.raises(ReplacedError, match="was replaced or deleted by another process"):
        replaced(path, 2)
    assert held(path) == 3 and names(path) == ["MANIFEST", "1"]


def test_the_handle_of_the_loser_says_that_it_was_replaced(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    rename = LocalStore.rename

    def rename_and_lose(self: LocalStore, pending: str, name: str) -> None:
        monkeypatch.setattr(LocalStore, "rename", rename)
        rename(self, pending, name)
        replaced(path, 3)

    monkeypatch.setattr(LocalStore, "rename", rename_and_lose)
    handle = holdfast.save_async(state(2), path, replace=True)
    with pytest.raises(ReplacedError):
        handle.result()
    assert held(path) == 3 and names(path) == ["MANIFEST", "1"]


def test_a_save_that_finds_another_published_meanwhile_replaces_that(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    link = LocalStore._link

    def link_too_late(self: LocalStore, source: str, target: str) -> bool:
        monkeypatch.setattr(LocalStore, "_link", link)
        holdfast.save(state(1), path)
        return link(self, source, target)

    monkeypatch.setattr(LocalStore, "_link", link_too_late)
    replaced(path, 2)
    assert held(path) == 2 and names(path) == ["MANIFEST", "1"]


def test_a_reply_that_is_lost_is_found_out(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    rename = LocalStore.rename

    def rename_twice(self: LocalStore, pending: str, name: str) -> None:
        rename(self, pending, name)
        if name == "MANIFEST":
            rename(self, pending, name)

    monkeypatch.setattr(LocalStore, "rename", rename_twice)
    replaced(path, 2)
    assert held(path) == 2 and names(path) == ["MANIFEST", "1"]


def test_a_rename_that_cannot_be_made_durable_removes_nothing(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)

    def fail(self: LocalStore, name: str = "") -> None:
        error = StoreError("sync: failed")
        error.errno = errno.EIO
        raise error

    monkeypatch.setattr(LocalStore, "sync_directory", fail)
    with pytest.raises(StoreError, match="sync: failed") as caught:
        replaced(path, 2)
    assert any("may exist" in note for note in caught.value.__notes__)
    assert held(path) == 2 and len(list((path / "data").iterdir())) == 2
    monkeypatch.undo()
    replaced(path, 3)
    assert held(path) == 3 and names(path) == ["MANIFEST", "1"]


def test_retention_looks_again_at_a_step_that_was_replaced(new_path: NewPath) -> None:
    run = new_path()
    kept = Run(run, Keep.every(2))
    for step in (1, 2, 3):
        holdfast.save(state(step), run / step_name(step), step=step)
    kept.make_room({1})  # step 2 is kept, and needs nothing, as it has read
    replaced(run / step_name(2), 7, codec="delta")
    assert holdfast.open(run / step_name(2)).base == step_name(1)
    kept.make_room()
    assert kept.steps() == [1, 2, 3]  # 1: the base of 2; 3: the newest
    assert held(run / step_name(2)) == 7


def test_a_rebase_gives_way_to_a_replace(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_path()
    for step in (1, 2):
        holdfast.save(state(step), run / step_name(step), step=step, codec="delta")
    prepare = Replacement.prepare

    def replace_first(self: Replacement, *given: Any) -> None:
        monkeypatch.setattr(Replacement, "prepare", prepare)
        replaced(run / step_name(2), 9)
        prepare(self, *given)

    monkeypatch.setattr(Replacement, "prepare", replace_first)
    with pytest.raises(ReplacedError):
        holdfast.rebase(run / step_name(2))
    assert held(run / step_name(2)) == 9 and names(run / step_name(2)) == ["MANIFEST", "1"]


def test_a_rebase_that_has_looked_cannot_undo_a_replace(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_path()
    for step in (1, 2):
        holdfast.save(state(step), run / step_name(step), step=step, codec="delta")
    replace = Replacement.replace

    def replace_first(self: Replacement) -> None:
        monkeypatch.setattr(Replacement, "replace", replace)
        replaced(run / step_name(2), 9)
        replace(self)

    monkeypatch.setattr(Replacement, "replace", replace_first)
    with pytest.raises(StoreError):
        holdfast.rebase(run / step_name(2))
    assert held(run / step_name(2)) == 9 and names(run / step_name(2)) == ["MANIFEST", "1"]


@pytest.mark.parametrize("what", ["revoke", "rename"])
def test_a_rebase_clears_what_a_replace_left_that_is_over(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = new_path()
    path = run / step_name(2)
    for step in (1, 2):
        holdfast.save(state(step), run / step_name(step), step=step, codec="delta")
    with monkeypatch.context() as patch, pytest.raises(Broken):
        crash_before(patch, what)
        replaced(path, 2, codec="delta")
    if what == "rename":
        with pytest.raises(ReplacedError, match="or was by one that died less than a day ago"):
            holdfast.rebase(path)  # its writer may be alive
        for entry in path.rglob("*"):
            os.utime(entry, (0, 0))
    assert holdfast.rebase(path)
    assert held(path) == 2 and names(path) == ["MANIFEST", "1"]


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_of_the_old_one_finishes_or_is_told(
    new_path: NewPath, verb: str, codec: str
) -> None:
    path = new_path()

    def make() -> Callable[[], object]:
        holdfast.save(state(1), path, codec=codec, replace=True)
        return swap(path, new_path())

    came = list(removals(make, lambda: VERBS[verb](path)))
    checked(iter(came), ReplacedError, str(path))
    assert not any(damage_of(result) for _, result in came)


def swap(path: Path, other: Path) -> Callable[[], object]:
    """Save another checkpoint; return what puts it in the place of one, call by call."""
    holdfast.save(state(2), other)
    (old,), (new,) = (list((place / "data").iterdir()) for place in (path, other))

    def act() -> None:
        new.rename(path / "data" / new.name)
        (other / "MANIFEST").rename(path / "MANIFEST")
        shutil.rmtree(old)

    return act


def test_a_load_never_mixes_the_two(new_path: NewPath) -> None:
    path = new_path()

    def make() -> Callable[[], object]:
        replaced(path, 1)
        return swap(path, new_path())

    def load() -> int:
        return held(path)

    came = {c for _, c in removals(make, load) if not isinstance(c, NotCommittedError)}
    assert came == {1, 2}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_rights_keeps_the_old_one(new_path: NewPath) -> None:
    path = new_path()
    replaced(path, 1)
    path.chmod(0o555)
    try:
        with pytest.raises(StoreError):
            replaced(path, 2)
    finally:
        path.chmod(0o755)
    assert held(path) == 1


def test_repair_does_not_take_the_mark_of_a_replace_for_the_manifest(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    replaced(path, 1)
    with monkeypatch.context() as patch, pytest.raises(Broken):
        crash_before(patch, "revoke")
        replaced(path, 2)
    (path / "MANIFEST").write_bytes((path / "MANIFEST").read_bytes()[:200])
    with pytest.raises(CorruptError, match="has data files of 2 saves"):
        holdfast.repair(path)
