"""An interrupt on one rank: the others are told at once, and all of them save again."""

import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError, PeerError
from holdfast.testing.faults import Fault, faulty

from .ranks import run_ranks

ELEMENTS = 4 << 20
# By call: 64 write one file here, 256 KiB each.
SLOW = Fault("write", nth=1, action="delay", argument=50, persistent=True)
VERBS = ("save", "save_async", "step", "load", "restore")


class Interrupts:
    """A part of a state that is interrupted as it is asked for."""

    def __init__(self, *, here: bool) -> None:
        self.here = here

    def state_dict(self) -> dict[str, Any]:
        if self.here:
            raise KeyboardInterrupt("at the hook")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.here:
            raise KeyboardInterrupt("at the hook")


def call(verb: str, state: dict[str, Any], path: Path) -> None:
    if verb == "save":
        holdfast.save(state, path / "new")
    elif verb == "save_async":
        holdfast.save_async(state, path / "new").result()
    elif verb == "load":
        holdfast.load(path / "run" / "step-00000001", into=state)
    else:
        with holdfast.Checkpointer(path / "run", every=1, signals=()) as run:
            if verb == "step":
                run.step(2, state)
                run.wait()
            else:
                run.restore(state)


def told(rank: int, verb: str, path: str) -> tuple[str, float, bool]:
    """Return what a rank raises, after how long, and whether it saves afterwards."""
    plain = {"w": torch.ones(64), "h": Interrupts(here=False)}
    with holdfast.Checkpointer(Path(path) / "run", every=1, signals=()) as run:
        run.save(1, plain)
    state = {"w": torch.ones(64), "h": Interrupts(here=rank == 1)}
    started, kind = time.monotonic(), ""
    try:
        call(verb, state, Path(path))
    except (HoldfastError, KeyboardInterrupt) as error:
        kind = type(error).__name__
    taken_s = time.monotonic() - started
    holdfast.save_async(plain, Path(path) / "after").result()
    return kind, taken_s, holdfast.open(Path(path) / "after").verify() == []


@pytest.mark.parametrize("verb", VERBS)
def test_the_others_are_told_at_once_that_a_rank_was_interrupted(tmp_path: Path, verb: str) -> None:
    found = run_ranks(2, told, verb, str(tmp_path))
    assert [kind for kind, _, _ in found] == [PeerError.__name__, "KeyboardInterrupt"]
    assert all(taken_s < 10 and saves for _, taken_s, saves in found)


def strike(begun: Path) -> None:
    """Send the alarm to the main thread when the save has begun to write."""
    while not begun.exists():
        time.sleep(0.01)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)


def struck(rank: int, path: str) -> tuple[str, bool]:
    """Be interrupted, on rank 1, by an alarm while the disk is slow."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("the alarm")

    signal.signal(signal.SIGALRM, handler)
    # Each rank writes its own.
    state = {f"w{rank}": torch.full((ELEMENTS,), float(rank))}
    kind = ""
    with faulty(SLOW):
        if rank == 1:
            waiting = threading.Thread(target=strike, args=(Path(path) / "struck" / "data",))
            waiting.start()
        try:
            holdfast.save(state, Path(path) / "struck")
        except (HoldfastError, KeyboardInterrupt) as error:
            kind = type(error).__name__
    holdfast.save(state, Path(path) / "after")
    return kind, holdfast.open(Path(path) / "after").verify() == []


def test_an_alarm_while_a_rank_writes_fails_the_save_on_all(tmp_path: Path) -> None:
    found = run_ranks(2, struck, str(tmp_path))
    assert found == [(PeerError.__name__, True), ("KeyboardInterrupt", True)]
    assert not (tmp_path / "struck").exists()
