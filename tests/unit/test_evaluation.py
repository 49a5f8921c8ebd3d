"""Weights alone, of the newest checkpoint, while another process writes and retires others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.errors import CorruptError, NotCommittedError
from holdfast.loading import load as load_module
from holdfast.runs import restore as restore_module

NewPath = Callable[[], Path]


def training(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), float(step))}, "moment": torch.ones(64)}


def save(run: Path, step: int) -> None:
    """What the training process does: one step comes, the one before goes."""
    with Checkpointer(run, keep=Keep.latest(1), stage="sync") as checkpointer:
        checkpointer.save(step, training(step))


def weights() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(64)}}


def retiring_beneath(monkeypatch: pytest.MonkeyPatch, run: Path, times: int) -> list[int]:
    """Have the step retired between its MANIFEST and its data, so often."""
    saved: list[int] = []
    find_chunks = load_module.find_chunks

    def plan(*arguments: Any) -> Any:
        if len(saved) < times:
            saved.append(2 + len(saved))
            save(run, saved[-1])
        return find_chunks(*arguments)

    monkeypatch.setattr(load_module, "find_chunks", plan)
    return saved


def test_a_step_retired_while_it_is_read_gives_way_to_the_newest(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, state = new_path(), weights()
    save(run, 1)
    saved = retiring_beneath(monkeypatch, run, 3)
    assert Checkpointer(run).restore(state, partial=True) == 4
    assert saved == [2, 3, 4] and state["model"]["w"].eq(4).all()


def test_a_run_that_retires_faster_than_it_is_read_is_an_error(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_path()
    save(run, 1)
    retiring_beneath(monkeypatch, run, 1000)
    with pytest.raises(NotCommittedError, match=r"Keep more steps.*while it was read"):
        Checkpointer(run).restore(weights(), partial=True)
    assert Checkpointer(run).steps() == [1 + restore_module.TRIES]


def test_a_given_step_that_is_retired_says_so(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_path()
    save(run, 1)
    retiring_beneath(monkeypatch, run, 1)
    with pytest.raises(NotCommittedError, match="by another process while it was read"):
        Checkpointer(run).restore(weights(), step=1, partial=True)


def test_an_open_checkpoint_that_is_retired_says_so(new_path: NewPath) -> None:
    run = new_path()
    save(run, 1)
    with holdfast.open(Checkpointer(run).path(1)) as checkpoint:
        save(run, 2)
        with pytest.raises(NotCommittedError, match="by another process while it was read"):
            checkpoint.tensor("model.w")


@pytest.mark.parametrize("step", [None, 7])
def test_evaluation_changes_nothing_in_the_run(new_path: NewPath, step: int | None) -> None:
    run, state = new_path(), weights()
    save(run, 7)

    def contents() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in run.rglob("*")
        }

    before = contents()
    with Checkpointer(run) as checkpointer:
        assert checkpointer.restore(state, step=step, partial=True) == 7
    assert contents() == before and state["model"]["w"].eq(7).all()


def test_a_damaged_step_is_skipped_for_the_weights_too(new_path: NewPath) -> None:
    run, state = new_path(), weights()
    with Checkpointer(run, stage="sync") as checkpointer:
        checkpointer.save(1, training(1))
        checkpointer.save(2, training(2))
    manifest = Path(Checkpointer(run).path(2)) / "MANIFEST"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert Checkpointer(run).restore(state, partial=True) == 1
    manifest = Path(Checkpointer(run).path(1)) / "MANIFEST"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="every checkpoint"):
        Checkpointer(run).restore(state, partial=True)
