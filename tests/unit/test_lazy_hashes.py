"""A lazy raw save hashes what it copies at once, if there is time, and nothing of it twice."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import Options
from holdfast.engine import raw, staging
from holdfast.engine.staging import LazyCopies
from holdfast.format.table import content_digest
from holdfast.testing import Fault, faulty

SMALL_FILES = Options(file_bytes=1 << 16, chunk_elements=1000)


def mixed() -> dict[str, Any]:
    """Return parameters that are copied later, and tensors that are copied at the call."""
    torch.manual_seed(7)
    shapes = [(300, 70), (0,), (5,), (64, 1000), (2500,)]
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    weights.append(nn.Parameter(torch.randn(40, 90).t()))  # its chunks have to be gathered
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    return {
        "a": torch.arange(7000),
        "weights": dict(enumerate(weights)),
        "optimizer": optimizer,
        "z": torch.arange(3.0),
    }


@pytest.fixture(autouse=True)
def has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LazyCopies, "has_time", True)


def size_of(state: dict[str, Any]) -> int:
    weights = state["weights"].values()
    return sum(data.nbytes for data in (state["a"], state["z"], *weights))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the address and the bytes of every chunk that is hashed when it is written."""
    found: list[tuple[int, int]] = []
    stage_chunks = raw.stage_chunks

    def noted(targets: Any, sources: Any, sizes: Any, *others: Any) -> None:
        rows = np.flatnonzero(sources)
        found.extend(zip(targets[rows].tolist(), sizes[rows].tolist(), strict=True))
        stage_chunks(targets, sources, sizes, *others)

    monkeypatch.setattr(raw, "stage_chunks", noted)
    return found


def save(path: Path, options: Options, state: dict[str, Any], stage: Any = "lazy") -> None:
    holdfast.save_async(state, path, stage=stage, options=options).result()


def is_whole(path: Path, state: dict[str, Any]) -> bool:
    with holdfast.open(path) as checkpoint:
        found = checkpoint.verify()
        values = {str(n): checkpoint.tensor(f"weights.{n}") for n in range(len(state["weights"]))}
    expected = {str(n): weight.detach() for n, weight in state["weights"].items()}
    return not found and all(torch.equal(values[name], expected[name]) for name in expected)


@pytest.mark.parametrize("options", [Options(), SMALL_FILES], ids=["one file", "many files"])
def test_what_was_copied_later_is_hashed_once(
    tmp_path: Path, hashed: list[tuple[int, int]], options: Options
) -> None:
    state = mixed()
    save(tmp_path / "lazy", options, state)
    assert is_whole(tmp_path / "lazy", state)
    straight = sum(weight.nbytes for weight in list(state["weights"].values())[:-1])
    assert sum(size for _, size in hashed) == size_of(state) - straight
    files = len(list((tmp_path / "lazy").rglob("*.hf")))
    assert files > 10 if options is SMALL_FILES else files == 1


def test_the_hashes_are_those_of_an_eager_save(tmp_path: Path) -> None:
    state = mixed()
    digests = []
    for stage in ("lazy", "eager"):
        save(tmp_path / stage, SMALL_FILES, state, stage)
        with holdfast.open(tmp_path / stage) as checkpoint:
            digests.append(content_digest(checkpoint._manifest.table))
    assert digests[0] == digests[1]


def test_after_a_failed_sync_all_is_hashed_for_the_other_files(
    tmp_path: Path, hashed: list[tuple[int, int]]
) -> None:
    state = mixed()
    with faulty(Fault("sync")):
        save(tmp_path / "lazy", SMALL_FILES, state)
    assert is_whole(tmp_path / "lazy", state)
    assert len({address for address, _ in hashed}) > 100  # of 130: what was copied later as well


@pytest.mark.parametrize("wait", ["wait_staged", "step"])
def test_a_copy_that_is_waited_for_is_hashed_when_it_is_written(
    tmp_path: Path, hashed: list[tuple[int, int]], wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, copy_held, release = mixed(), staging.copy_held, threading.Event()

    def waits(*given: Any) -> Any:
        release.wait()
        return copy_held(*given)

    monkeypatch.setattr(staging, "copy_held", waits)
    expected = {number: weight.detach().clone() for number, weight in state["weights"].items()}
    handle = holdfast.save_async(state, tmp_path / "lazy", stage="lazy")
    copies = handle._copies
    assert copies is not None
    waiting = threading.Thread(
        target=handle.wait_staged if wait == "wait_staged" else state["optimizer"].step
    )
    waiting.start()
    while not copies._hurry[0]:
        time.sleep(0.001)
    release.set()
    waiting.join()
    handle.result()
    assert is_whole(tmp_path / "lazy", {"weights": expected})
    assert sum(size for _, size in hashed) == size_of(state)


def test_after_a_copy_that_was_waited_for_the_next_one_does_not_hash(
    tmp_path: Path, hashed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, copy_held = mixed(), staging.copy_held

    def waits(*given: Any) -> Any:
        while not given[-1][0]:
            time.sleep(0.001)
        return copy_held(*given)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "copy_held", waits)
        handle = holdfast.save_async(state, tmp_path / "waited for", stage="lazy")
        handle.wait_staged()
        handle.result()
    for hashes in (False, True, True):
        hashed.clear()
        save(tmp_path / f"{time.monotonic()}", Options(), state)
        assert (sum(size for _, size in hashed) < size_of(state)) == hashes


@pytest.mark.parametrize("codec", ["lossless", "delta"])
def test_other_codecs_save_what_was_there(tmp_path: Path, codec: str) -> None:
    state = mixed()
    holdfast.save_async(state, tmp_path / "lazy", stage="lazy", codec=codec).result()
    assert is_whole(tmp_path / "lazy", state)
