"""What is known of a chain by the bytes of its MANIFESTs: used while they stand, and only then."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.chains import base_choice
from holdfast.engine import known
from holdfast.stores.url import open_store


@pytest.fixture
def state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(4096.0)}}


def link(state: dict[str, Any], run: Path, step: int) -> str | None:
    """Save a further step, of which one element is new, and load it; return its base."""
    state["model"]["w"][step] += 0.5
    path = run / f"step-{step:08d}"
    holdfast.save(state, path, step=step, codec="delta")
    loaded = {"model": {"w": torch.zeros(4096)}}
    holdfast.load(path, into=loaded)
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    with holdfast.open(path) as checkpoint:
        return checkpoint.base


def refuse(*_: Any) -> None:
    raise AssertionError("a chain was opened that is known")


def test_a_chain_that_is_known_is_not_opened_again(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [link(state, tmp_path, step) for step in (1, 2)] == [None, "step-00000001"]
    monkeypatch.setattr(base_choice, "open_chain", refuse)
    assert link(state, tmp_path, 3) == "step-00000002"
    assert link(state, tmp_path, 4) == "step-00000003"


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("what", ["deleted", "damaged", "another", "another known"])
def test_what_has_changed_below_a_link_is_noticed(
    state: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, step: int
) -> None:
    bases = [link(state, tmp_path, number) for number in (1, 2, 3)]
    assert bases == [None, "step-00000001", "step-00000002"]
    manifest = tmp_path / f"step-{step:08d}" / "MANIFEST"
    if what == "deleted":
        manifest.unlink()
    elif what == "damaged":
        data = bytearray(manifest.read_bytes())
        data[len(data) // 2] ^= 1
        manifest.write_bytes(data)
    else:
        holdfast.save({"model": {"w": torch.ones(4096)}}, tmp_path / "other")
        manifest.write_bytes((tmp_path / "other/MANIFEST").read_bytes())
        if what == "another known":
            known.remember(base_choice.open_chain(open_store(tmp_path / "other"))[-1].manifest)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert link(state, tmp_path, 4) is None
    assert "step-00000004 is saved in full" in caplog.text


def test_what_is_known_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_known", {})
    monkeypatch.setattr(known, "KNOWN_MAX", 3)
    for number in range(5):
        path = tmp_path / f"{number}"
        holdfast.save({"x": torch.full((2,), float(number))}, path)
        known.remember(base_choice.open_chain(open_store(path))[-1].manifest)
    found = [known.known_at(open_store(tmp_path / f"{number}")) for number in range(5)]
    assert [link is not None for link in found] == [False, False, True, True, True]
    assert known.known_at(open_store(tmp_path / "none")) is None
