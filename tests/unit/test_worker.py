"""What the thread that calls a verb, and the worker that runs its body, are to each other."""

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import worker

WITHIN_S = 20.0


def test_a_second_interrupt_before_the_first_is_passed_on_leaves_no_save_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody answered the body any more; it waited for its hooks for ever, and all after it."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    state = {"w": torch.ones(3)}
    with monkeypatch.context() as points:  # two at which a handler may raise
        points.setattr(worker._Call, "make", interrupted)
        points.setattr(worker._Job, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised:
            holdfast.save_async(state, tmp_path / "interrupted")
    holdfast.save_async(state, tmp_path / "next", deadline_s=WITHIN_S).result()
    assert list(tmp_path.iterdir()) == [tmp_path / "next"]
    assert worker.HELD_UP in raised.value.__notes__
