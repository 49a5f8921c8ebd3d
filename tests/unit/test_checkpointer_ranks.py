"""A run of several ranks, threads that meet in a way of their own: they decide and fail alike."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from format import simulated_ranks
from holdfast import Checkpointer, Keep, Options
from holdfast.errors import AlreadyCommittedError, OptionError, PeerError

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=32 << 20)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((4000,), float(step)), "step": step}


def test_ranks_that_meet_in_another_way_save_together_too(new_path: NewPath) -> None:
    """A group of one's own need not be able to start something and read it later."""
    run = new_path()

    def train(group: Any) -> list[int]:
        with pytest.raises(OptionError, match="stage"):
            Checkpointer(run, group=group)
        every = timedelta(microseconds=1)
        with Checkpointer(run, every=every, stage="sync", group=group, options=SMALL) as made:
            return [step for step in range(1, 7) if made.step(step, state_at(step))]

    assert simulated_ranks.run_ranks(2, train) == [[2, 4, 6]] * 2
    assert [json.loads(row)["rank"] for row in (run / "metrics.jsonl").open()] == [0, 1] * 3


def test_a_rank_whose_state_cannot_take_what_was_loaded_fails_the_restore_of_all(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_ranks, "MEETING_TIMEOUT_S", 5.0)
    run = new_path()

    class Picky:
        def __init__(self, *, refuses: bool) -> None:
            self.refuses = refuses

        def state_dict(self) -> dict[str, Any]:
            return {"v": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.refuses:
                raise KeyError("mine")

    def restore(group: Any) -> str:
        state = {"x": Picky(refuses=group.rank == 1)}
        with Checkpointer(run, stage="sync", group=group, options=SMALL) as made:
            made.save(1, state)
            try:
                made.restore(state)
            except (KeyError, PeerError) as error:
                return str(error)
        return ""

    assert simulated_ranks.run_ranks(2, restore) == ["rank 1 failed: KeyError: 'mine'", "'mine'"]


def test_of_the_metrics_only_those_of_the_coordinator_count(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_ranks, "MEETING_TIMEOUT_S", 5.0)
    run = new_path()

    def train(group: Any) -> list[str]:
        told = []
        keep = Keep.best("loss", 1)
        with Checkpointer(run, keep=keep, stage="sync", group=group, options=SMALL) as made:
            for step, given in ((1, 0), (2, 1), (3, 0)):
                metrics = {"loss": float(step)} if group.rank == given else None
                try:
                    made.save(step, state_at(step), metrics=metrics)
                except (OptionError, PeerError) as error:
                    told.append(str(error))
        return told

    (first,), (second,) = simulated_ranks.run_ranks(2, train)
    assert "needs the metric loss; found none. Give its value, or NaN" in first
    assert second == f"rank 0 failed: OptionError: {first}"
    assert Checkpointer(run).steps() == [1, 3]


def test_no_rank_saves_a_step_that_is_saved_already(new_path: NewPath) -> None:
    run = new_path()

    def train(group: Any) -> list[int]:
        with Checkpointer(run, every=2, stage="sync", group=group, options=SMALL) as made:
            made.step(2, state_at(2))
            made.save(2, state_at(2))
            made._saver.saved_step = None if group.rank else 2  # as if it had seemed to fail there
            with pytest.raises((AlreadyCommittedError, PeerError), match="holds a committed"):
                made.save(2, state_at(2))
            return made.steps()

    assert simulated_ranks.run_ranks(2, train) == [[2], [2]]
