"""Random generators come back bit for bit, and by a stated rule when the ranks are others."""

import contextlib
import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import RandomState
from holdfast.errors import MismatchError, OptionError, StateError

from .training import same

NewPath = Callable[[], Path]


def draw() -> dict[str, Any]:
    """Numbers of every kind; an odd number of normal ones leaves half a pair behind."""
    return {
        "python": [random.random(), random.gauss(0, 1), random.getrandbits(70)],
        "numpy": [np.random.rand(), np.random.randn(3).tolist(), int(np.random.randint(1 << 30))],
        "torch": torch.randn(5),
    }


def saved_by(ranks: list[int], path: Path) -> list[dict[str, Any]]:
    """Save the generators of several ranks; return what each of them draws next."""
    state: dict[str, Any] = {"world_size": len(ranks), "ranks": {}}
    drawn = []
    for rank in ranks:
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        draw()
        state["ranks"] |= RandomState(rank=rank, world_size=len(ranks)).state_dict()["ranks"]
        drawn.append(draw())
    holdfast.save({"random": state}, path)
    return drawn


def restored(path: Path, rank: int, world_size: int) -> dict[str, Any]:
    holdfast.load(path, into={"random": RandomState(rank=rank, world_size=world_size)})
    return draw()


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_the_same_number_of_ranks_go_on_bit_for_bit(new_path: NewPath, kind: str) -> None:
    path = new_path()
    drawn = saved_by([0, 1, 2], path)
    for rank in (2, 0, 1):
        assert same(restored(path, rank, 3)[kind], drawn[rank][kind])


def test_a_process_alone_needs_to_say_nothing(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"random": RandomState()}, path)
    expected = draw()
    holdfast.load(path, into={"random": RandomState()})
    assert same(draw(), expected)


def test_another_number_of_ranks_draws_other_numbers_the_same_each_time(
    new_path: NewPath, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = new_path(), new_path()
    saved_by([0, 1, 2], first)
    saved_by([1, 0, 2], second)  # rank 0 has the same state, from the same seed
    drawn = [restored(first, rank, n) for n in (2, 4) for rank in range(n)]
    again = [restored(second, rank, n) for n in (2, 4) for rank in range(n)]
    assert same(drawn, again)
    for kind in ("python", "numpy"):
        assert len({str(one[kind]) for one in drawn}) == 6
    assert len({tuple(one["torch"].tolist()) for one in drawn}) == 6
    numbers = [one[kind][0] for one in drawn for kind in ("python", "numpy")]
    assert len(set(numbers)) == 12, "two generators of one rank draw other numbers too"
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 4, "rank 0 of 2 and rank 0 of 4, twice"
    assert "3 ranks saved the random states, and 2 restore them" in warnings[0].getMessage()


def test_other_saved_states_give_other_seeds(new_path: NewPath) -> None:
    first, second = new_path(), new_path()
    holdfast.save({"random": RandomState(rank=0, world_size=1)}, first)
    random.random()  # of one generator only
    holdfast.save({"random": RandomState(rank=0, world_size=1)}, second)
    assert not same(restored(first, 0, 2), restored(second, 0, 2))


def test_a_rank_whose_state_was_not_saved_is_told(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"random": RandomState(rank=1, world_size=2)}, path)
    with pytest.raises(MismatchError, match=r"2 ranks saved .*, and the RandomState of rank 0"):
        restored(path, 0, 2)


def test_numpy_with_another_generator_is_refused() -> None:
    # What np.random.set_bit_generator changes, and what it does not give back.
    bits = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(StateError, match="draws from PCG64"):
            RandomState().state_dict()
    finally:
        np.random.set_bit_generator(bits)


@pytest.mark.parametrize("place", [(None, 2), (1, None), (2, 2), (-1, 2), (True, 2)])
def test_a_place_that_cannot_be_is_refused(place: tuple[Any, Any]) -> None:
    with pytest.raises(OptionError, match="rank is"):
        RandomState(rank=place[0], world_size=place[1])


class FakeCuda:
    """A device of numbers: what torch.cuda is asked for, without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, here: bool) -> None:
        self.state = torch.arange(16, dtype=torch.uint8)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: here)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: self.state.clone())
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        pinned = SimpleNamespace(cudaHostRegister=lambda *_: 0)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: pinned)
        for name in ("current_stream", "default_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())

    def set(self, state: torch.Tensor) -> None:
        self.state = state


def test_the_generator_of_a_used_cuda_device_comes_back(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, cuda = new_path(), FakeCuda(monkeypatch, here=True)
    holdfast.save({"random": RandomState()}, path)
    cuda.state = torch.zeros(16, dtype=torch.uint8)
    holdfast.load(path, into={"random": RandomState()})
    assert cuda.state.equal(torch.arange(16, dtype=torch.uint8)) and not caplog.records
    FakeCuda(monkeypatch, here=False)
    holdfast.load(path, into={"random": RandomState()})
    assert "no CUDA device here" in caplog.text
