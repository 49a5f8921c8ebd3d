"""What each part of a state takes over the steps: named by its branch, and no byte is lost."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.report import read
from holdfast.report.data import TensorRow
from holdfast.report.document import page_of
from holdfast.report.read import read_run
from holdfast.report.treemap import grow, parts_of

NewPath = Callable[[], Path]
EVIL = "<img src=x onerror=alert(1)>\x1b[2J"


def make_run(run: Path, steps: int) -> Path:
    for step in range(1, steps + 1):
        layers = {str(n): torch.randn(32, 32) for n in range(3)}
        state: dict[str, Any] = {"model": {"layers": layers, "head": torch.randn(8, 8 * step)}}
        state |= {"optimizer": {"moments": torch.randn(64, 64)}, EVIL: torch.ones(4)}
        holdfast.save(state, run / f"step-{step:08d}", step=step)
    return run


def test_the_parts_of_each_step_add_up_to_what_is_stored(new_path: NewPath) -> None:
    found = read_run(make_run(new_path(), 4))
    for step in found.steps:
        assert sum(step.parts.values()) == step.stored_bytes
        assert step.parts["model.head"] == 8 * 8 * 4 * step.step
        assert step.parts["optimizer.moments"] == 64 * 64 * 4


def test_the_page_draws_a_column_for_each_step(new_path: NewPath) -> None:
    page = page_of(read_run(make_run(new_path(), 4)))
    chart = page[page.index("bytes stored of each part, by step") :].partition("</svg>")[0]
    heads = re.findall(r'data-tip="step (\d): model\.head ([^"]+), \d+ %"', chart)
    assert heads == [("1", "256 B"), ("2", "512 B"), ("3", "768 B"), ("4", "1.02 kB")]
    assert "<img" not in page and "\x1b" not in page


def test_one_step_has_no_history(new_path: NewPath) -> None:
    assert "Parts of the newest steps" not in page_of(read_run(make_run(new_path(), 1)))


def test_of_very_many_tensors_only_the_newest_steps_are_drawn(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "PARTS_TENSORS_MAX", 15)
    found = read_run(make_run(new_path(), 4))
    assert [step.step for step in found.steps if step.parts] == [3, 4]


def test_large_branches_are_opened_as_far_as_there_are_colours() -> None:
    def row(name: str, size: int) -> TensorRow:
        return TensorRow(name, "f32", (size,), size, size, "raw", None)

    rows = [row(f"model.layers.{n}.w", 100) for n in range(40)]
    rows += [row("model.embed", 5000), row("optimizer.m", 300), row("optimizer.v", 200)]
    root = grow(rows)
    assert parts_of(root, 2) == ["model", "optimizer"]
    assert parts_of(root, 5) == ["model.embed", "model.layers", "optimizer.m", "optimizer.v"]
    assert parts_of(grow([]), 5) == []
