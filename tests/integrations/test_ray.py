"""What `holdfast.integrations.ray` knows without Ray; `make frameworks-native` runs the rest."""

import contextlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import MismatchError, OptionError
from holdfast.integrations import ray


class Directory:
    """A directory, as Ray's Checkpoint gives it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[Path]:
        yield self.path


def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    with (
        holdfast.Checkpointer(tmp_path / "run") as checkpointer,
        pytest.raises(ImportError, match=r"holdfast-checkpoint\[ray\]"),
    ):
        ray.report({}, checkpointer)


def test_another_version_of_ray_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2.40.0")
    with (
        holdfast.Checkpointer(tmp_path / "run") as checkpointer,
        pytest.raises(OptionError, match=r"ray 2\.40\.0 is installed; .* 2\.60\.0"),
    ):
        ray.report({}, checkpointer)


def test_a_pointer_leads_to_its_step(tmp_path: Path) -> None:
    (tmp_path / ray.POINTER).write_text('{"path": "/runs/a/step-00000300", "step": 300}')
    assert ray.path_of(Directory(tmp_path)) == "/runs/a/step-00000300"


def test_a_checkpoint_that_another_program_has_reported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"weights")
    with pytest.raises(MismatchError, match=r"holds no holdfast\.json: it was not reported"):
        ray.path_of(Directory(tmp_path))
