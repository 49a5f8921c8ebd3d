"""What `holdfast.integrations.ray` knows without Ray; `make frameworks-native` runs the rest."""

import contextlib
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

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


class Reports:
    """As ``ray.train``, for one worker: it keeps what is reported, and what lies in checkpoints."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.found = rank, list[tuple[dict[str, Any], dict[str, Any] | None]]()

    def get_context(self) -> Any:
        return SimpleNamespace(get_world_rank=lambda: self.rank)

    def report(self, metrics: dict[str, Any], checkpoint: Path | None = None) -> None:
        files = None
        if checkpoint is not None:
            files = {file.name: json.loads(file.read_text()) for file in checkpoint.iterdir()}
        self.found.append((metrics, files))


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    found = Reports()
    train: Any = ModuleType("ray.train")
    train.get_context, train.report = found.get_context, found.report
    train.Checkpoint = SimpleNamespace(from_directory=Path)
    monkeypatch.setattr(metadata, "version", lambda _: "2.60.0")
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    return found


def test_rank_0_points_to_the_newest_durable_step_and_copies_nothing(
    tmp_path: Path, reports: Reports
) -> None:
    state = {"w": torch.ones(3)}
    with holdfast.Checkpointer(tmp_path / "run", every=1) as checkpointer:
        ray.report({"loss": 2.0}, checkpointer)
        for step in (3, 7):
            checkpointer.save(step, state)
        (tmp_path / "run" / "step-00000009").mkdir()  # begun, and not committed
        ray.report({"loss": 1.0}, checkpointer)
        reports.rank = 1
        ray.report({"loss": 9.0}, checkpointer)
    path = str(tmp_path / "run" / "step-00000007")
    assert reports.found == [
        ({"loss": 2.0}, None),
        ({"loss": 1.0}, {ray.POINTER: {"path": path, "step": 7}}),
        ({"loss": 9.0}, None),
    ]
    assert holdfast.open(path).step == 7


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
