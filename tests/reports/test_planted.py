"""Faults that are planted in real runs: the report names each on its first screen.

Real processes, disks and damage; a real browser looks at the page.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from distributed.ranks import run_ranks
from holdfast import Checkpointer, Keep, Options
from holdfast.cli import main
from holdfast.report.document import page_of
from holdfast.report.read import read_run
from holdfast.testing.faults import Fault, faulty

from .browser import Page

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=48 << 20)
SLOW_RANK, SLOW_MS = 5, 400
SCREEN = (1280, 800)


def first_screen(page: Page, path: Path) -> list[str]:
    """Open a page; return the findings that are whole on its first screen."""
    page.size(*SCREEN)
    page.open(path)
    assert page.errors == []
    assert [request for request in page.requests if not request.startswith("data:")] == [
        path.resolve().as_uri()
    ]
    found: list[str] = page.run(
        "[...document.querySelectorAll('.findings li')]"
        f".filter(e => e.getBoundingClientRect().bottom < {SCREEN[1]}).map(e => e.innerText)"
    )
    return found


def state_of(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    names = ["embed", *(f"layers.{n}.{part}" for n in range(6) for part in ("attn", "mlp"))]
    return {"model": {name: torch.randn(128, 128) for name in names}}


def slow_disk(rank: int, run: str) -> None:
    state = {f"w{n}": torch.full((64, 1000), float(n)) for n in range(8)}
    slow = [Fault("write", persistent=True, action="delay", argument=SLOW_MS)]
    with (
        faulty(*(slow if rank == SLOW_RANK else [])),
        Checkpointer(run, every=1, keep=Keep.latest(2), options=SMALL) as checkpointer,
    ):
        for step in range(1, 6):
            checkpointer.step(step, state, metrics={"loss": 2.0 / step})


def test_a_rank_with_a_slow_disk_is_named(tmp_path: Path, page: Page) -> None:
    run = tmp_path / "run"
    run_ranks(8, slow_disk, str(run))
    html = tmp_path / "run.html"
    assert main(["report", str(run), "-o", str(html)]) == 0
    said = first_screen(page, html)
    assert f"Rank {SLOW_RANK} " in said[0] and "straggler" in said[0] and "write" in said[0]
    slow = page.run("[...document.querySelectorAll('#heatmap .slow')].map(e => e.dataset.tip)")
    assert list({tip.split(" on ")[0] for tip in slow}) == [f"rank {SLOW_RANK}"]
    rows = json.loads(page.run("document.getElementById('data').textContent"))["waterfalls"][0]
    assert [row[0] for row in rows["rows"]] == list(range(8))


def test_no_rank_of_even_ones_is_a_straggler(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(4, even, str(run))
    assert [f.kind for f in read_run(run).findings if f.kind == "straggler"] == []


def even(rank: int, run: str) -> None:
    state = {f"w{n}": torch.full((64, 1000), float(n)) for n in range(4)}
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        for step in range(1, 4):
            checkpointer.step(step, state)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named(small_disk: Path, tmp_path: Path, page: Page) -> None:
    run = small_disk / "run"
    state = {"w": torch.zeros(700_000)}
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        checkpointer.step(1, state)
        checkpointer.wait()
        checkpointer.step(2, state)
        checkpointer.wait()
        with pytest.raises(holdfast.errors.NoSpaceError):
            checkpointer.save(3, state)
    html = tmp_path / "run.html"
    main(["report", str(run), "-o", str(html)])
    assert "The disk is full" in first_screen(page, html)[0]


@pytest.mark.parametrize("how", ["manifest", "cut", "scrub"])
def test_a_damaged_step_is_named(new_path: NewPath, tmp_path: Path, page: Page, how: str) -> None:
    run = new_path()
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        for step in range(1, 4):
            checkpointer.step(step, state_of(step))
    step = run / "step-00000003"
    (file,) = step.glob("data/*/*.hf")
    if how == "manifest":
        data = bytearray((step / "MANIFEST").read_bytes())
        data[len(data) // 2] ^= 1
        (step / "MANIFEST").write_bytes(data)
    elif how == "cut":
        os.truncate(file, file.stat().st_size - 4096)
    else:
        with file.open("r+b") as opened:
            opened.seek(5000)
            opened.write(b"\xff\x00\xff")
        holdfast.scrub(run)
    html = tmp_path / "run.html"
    assert main(["report", str(run), "-o", str(html)]) == 1
    said = first_screen(page, html)[0]
    assert "step-00000003 is damaged" in said
    assert "restore() takes step-00000002 instead" in said
    assert "All is well" not in page.run("document.body.innerText")


@pytest.mark.parametrize("how", ["large", "nan"])
def test_an_exploding_layer_is_named(
    new_path: NewPath, tmp_path: Path, page: Page, how: str
) -> None:
    run = new_path()
    before, after = state_of(), state_of()
    for tensor in after["model"].values():
        tensor += 0.001 * torch.randn_like(tensor)
    after["model"]["layers.4.mlp"].mul_(30.0 if how == "large" else 1.0)
    if how == "nan":
        after["model"]["layers.4.mlp"][3, 5] = float("nan")
    holdfast.save(before, run / "a")
    holdfast.save(after, run / "b")
    html = tmp_path / "diff.html"
    assert main(["diff", str(run / "a"), str(run / "b"), "--html", str(html)]) == 1
    said = first_screen(page, html)
    assert "model.layers.4 " in said[0]
    assert ("exploded" if how == "large" else "not finite") in said[0]
    bad = page.run("[...document.querySelectorAll('tr.exploded th')].map(e => e.innerText)")
    assert bad == ["model.layers.4"]


def test_a_metric_that_jumps_is_named_with_the_step_before(
    new_path: NewPath, tmp_path: Path, page: Page
) -> None:
    run = new_path()
    losses = [2.0, 1.8, 1.7, 1.62, 1.58, 1.55, 9.4, 30.0]
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        for step, loss in enumerate(losses, 1):
            checkpointer.step(step, {"w": torch.ones(10)}, metrics={"loss": loss})
    html = tmp_path / "run.html"
    html.write_text(page_of(read_run(run)))
    said = first_screen(page, html)[0]
    assert "loss left its range at step 7" in said
    assert "retire_after(6)" in said


def test_a_run_in_which_nothing_is_wrong_says_so(
    new_path: NewPath, tmp_path: Path, page: Page
) -> None:
    run = new_path()
    with Checkpointer(run, every=1, stage="lazy", options=SMALL) as checkpointer:
        for step in range(1, 3):
            checkpointer.step(step, state_of(step), metrics={"loss": 1 / step})
    html = tmp_path / "run.html"
    assert main(["report", str(run), "-o", str(html)]) == 0
    assert first_screen(page, html)[0].startswith("All is well")
    if keep := os.environ.get("HOLDFAST_PICTURES"):
        shutil.copy(html, keep)
