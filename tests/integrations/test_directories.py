"""Files that stand beside a commit: whoever made the checkpoint, nothing else is written."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CorruptError, NotCommittedError, OptionError, StoreError
from holdfast.integrations.adapter import delete, mark
from holdfast.integrations.directories import (
    Directories,
    Saving,
    as_tensor,
    heal,
    saving_of,
)
from holdfast.testing import Fault, faulty

NewPath = Callable[[], Path]
WORDS = b"step 7"
CALLS_MAX = 100


def saved(path: Path, files: Any, **more: Any) -> Path:
    holdfast.save({"w": torch.ones(2), "files": files, **mark("some", "1", **more)}, path)
    return path


def test_files_that_are_missing_or_differ_are_written(new_path: NewPath) -> None:
    path = saved(new_path(), {"a.json": as_tensor(WORDS), "empty": as_tensor(b"")})
    heal(str(path))
    assert (path / "a.json").read_bytes() == WORDS and (path / "empty").read_bytes() == b""
    (path / "a.json").write_bytes(WORDS + b"x")
    heal(str(path))
    assert (path / "a.json").read_bytes() == WORDS
    assert sorted(os.listdir(path)) == ["MANIFEST", "a.json", "data", "empty"]


@pytest.mark.parametrize(
    "name", ["MANIFEST", "data", "SIGNATURE", ".manifest-x", "..", ".", "../out", "/tmp/out"]
)
def test_a_name_that_is_no_file_of_its_own_is_refused(new_path: NewPath, name: str) -> None:
    path = saved(new_path(), {name: as_tensor(WORDS)})
    before = (path / "MANIFEST").read_bytes()
    with pytest.raises(CorruptError, match="as a file beside it"):
        heal(str(path))
    assert (path / "MANIFEST").read_bytes() == before
    assert not (path.parent / "out").exists()


@pytest.mark.parametrize("files", [{"a": torch.ones(3)}, [as_tensor(WORDS)]])
def test_what_is_no_bytes_is_refused(new_path: NewPath, files: Any) -> None:
    path = saved(new_path(), files)
    with pytest.raises(CorruptError, match="as a file beside it"):
        heal(str(path))


def test_no_link_is_followed(new_path: NewPath) -> None:
    path, victim = saved(new_path(), {"a.json": as_tensor(WORDS)}), new_path()
    victim.write_bytes(b"mine")
    for name in ("a.json", "a.json.tmp"):
        (path / name).symlink_to(victim)
    heal(str(path))
    assert victim.read_bytes() == b"mine"
    assert (path / "a.json").read_bytes() == WORDS and not (path / "a.json").is_symlink()


def test_an_order_that_is_none_does_no_harm(new_path: NewPath) -> None:
    root = new_path()
    saved(root / "step-1", {}, order="many")
    saved(root / "step-2", {}, order=3)
    known = Directories("some", "1", r"step-(\d+)", Saving())
    assert known.newest(str(root)) == str(root / "step-2")


def directories(**saving: Any) -> Directories:
    return Directories("some", "1", r"step-(\d+)", Saving(**{"stage": "sync"} | saving))


def killed_while_it_deletes(path: Path, call: int) -> bool:
    """Delete in a process that is killed before a call of the disk; False: it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            with faulty(Fault("*", nth=call, action="kill")):
                delete(path)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_deletion_is_finished_wherever_its_process_was_killed(new_path: NewPath) -> None:
    torn = 0
    for call in range(1, CALLS_MAX):
        root = new_path()
        for step in (1, 2):
            heal(str(saved(root / f"step-{step}", {"a.json": as_tensor(WORDS)}, order=step)))
        if not killed_while_it_deletes(root / "step-1", call):
            break
        torn += (root / "step-1" / "data").exists() and not (root / "step-1" / "MANIFEST").exists()
        directories().keep(str(root), 1)
        left = [name for name in os.listdir(root) if os.listdir(root / name)]
        assert left == ["step-2"], f"killed before call {call}"
    assert torn > 3 and call < CALLS_MAX - 1


def test_a_deletion_that_was_not_finished_is_named_as_such(new_path: NewPath) -> None:
    root = new_path()
    saved(root / "step-1", {})
    for call in range(1, CALLS_MAX):
        if not (saved(root / "step-2", {}) / "MANIFEST").exists():
            break
        assert killed_while_it_deletes(root / "step-2", call)
        if not (root / "step-2" / "MANIFEST").exists():
            break
        delete(root / "step-2")
    with pytest.raises(NotCommittedError, match=r"step-2 was being deleted when .*step-1"):
        directories().check_whole(str(root / "step-2"))


def test_deltas_stay_as_long_as_others_need_them_and_no_longer(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    root, known = new_path(), directories(codec="delta")
    value = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    sizes = []
    for step in range(1, 41):
        value[step] += 1.0
        known.save({"w": value}, str(root / f"step-{step}"), step=step, files={}, limit=2)
        sizes.append(len(os.listdir(root)))
    assert torch.equal(holdfast.open(root / "step-40").state(include="w")["w"], value)
    assert max(sizes) > 3  # there were deltas
    assert min(sizes[20:]) == 2  # when a full one is the older of two
    assert "is not deleted" not in caplog.text


def test_what_cannot_be_deleted_is_said_once(
    new_path: NewPath, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any) -> None:
        raise StoreError(f"delete {path}: no")

    monkeypatch.setattr("holdfast.integrations.directories.delete", refuse)
    root, known = new_path(), directories()
    for step in range(1, 5):
        known.save({"w": torch.ones(2)}, str(root / f"step-{step}"), step=step, files={}, limit=1)
    assert caplog.text.count("step-1 is not deleted") == 1
    assert caplog.text.count("is not deleted") == 3


@pytest.mark.parametrize("stage", ["sync", "eager"])
def test_a_last_save_that_failed_is_raised_when_training_is_over(
    new_path: NewPath, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, known = new_path(), directories(stage=stage)
    root.mkdir()
    (root / "step-2").write_text("in the way")
    for step in (1, 2):
        known.save({"w": torch.ones(2)}, str(root / f"step-{step}"), step=step, files={})
    expected = f"last checkpoint {root}/step-2 is not saved: .*newest checkpoint is {root}/step-1"
    with caplog.at_level(logging.ERROR), pytest.raises(StoreError, match=expected):
        known.close()
    assert "training goes on" in caplog.text
    known.close()  # it was said
    known.save({"w": torch.ones(2)}, str(root / "step-2"), step=2, files={})
    known.save({"w": torch.ones(2)}, str(root / "step-3"), step=3, files={})
    known.close()  # a later one is whole


def test_an_unknown_option_is_refused_with_those_that_there_are() -> None:
    assert saving_of({"codec": "lossless"}) == Saving(codec="lossless")
    with pytest.raises(OptionError, match="no option 'codecs'; expected one of codec, stage, opt"):
        saving_of({"codecs": "raw"})


def test_an_unknown_codec_is_refused_at_once() -> None:
    with pytest.raises(OptionError, match="codec is 'losless'; expected one of raw, lossless"):
        Saving(codec="losless")
