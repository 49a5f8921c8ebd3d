"""A rank that dies in a save or load: all others hear of it, none waits for the group's timeout."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import PeerError

from .ranks import TIMEOUT_S, run_survivors

VICTIM = 2


def lose(rank: int, root: str, verb: str) -> tuple[str, float]:
    """Save together; then one rank is gone, and the others go on."""
    state = {f"w{rank}": torch.ones(9)}
    holdfast.save(state, f"{root}/a")
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        if verb == "save":
            holdfast.save(state, f"{root}/b")
        else:
            holdfast.load(f"{root}/a", into=state)
    except PeerError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


@pytest.mark.parametrize("verb", ["save", "load"])
def test_all_ranks_hear_at_once_that_one_is_dead(tmp_path: Path, verb: str) -> None:
    for text, waited in run_survivors(4, VICTIM, lose, str(tmp_path), verb):
        assert text.startswith("lost contact with another rank")
        assert waited < TIMEOUT_S / 3
    assert not (tmp_path / "b" / "MANIFEST").exists()
