"""Files that stand beside a commit: whoever made the checkpoint, nothing else is written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CorruptError
from holdfast.integrations.adapter import mark
from holdfast.integrations.directories import Directories, Saving, as_tensor, heal

NewPath = Callable[[], Path]
WORDS = b"step 7"


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
