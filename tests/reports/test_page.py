"""Pages in a real browser: nothing is asked of the network, everything is drawn, nothing is run."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Keep, Options
from holdfast.cli import main
from holdfast.report.document import page_of
from holdfast.report.page import script_json
from holdfast.report.pages import checkpoint_page, difference_page
from holdfast.report.read import read_run
from holdfast.tools.diff import diff

from .browser import Page
from .simulated_run import lines_of

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=48 << 20)
OPEN_S_MAX = 2.0
BYTES_MAX = 5_000_000
EVIL = "</script><script>document.title='run'</script><img src=x onerror=alert(1)>\x1b[31m\"'&amp;"


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with real steps, and the metrics of many ranks."""
    run = tmp_path_factory.mktemp("report") / "run"
    torch.manual_seed(1)
    model = {f"layers.{n}.{part}": torch.randn(64, 64) for n in range(4) for part in ("a", "b")}
    with Checkpointer(run, every=1, keep=Keep.latest(5), codec="delta", options=SMALL) as made:
        for step in range(1, 5):
            model["layers.0.a"][0, 0] += 1
            made.step(step, {"model": model}, metrics={"loss": 1 / step, "accuracy": step / 10})
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(5, 12):
            for row in lines_of(step, 24, slow={19: {"write": 2.0}}):
                file.write(json.dumps(row) + "\n")
    path = run.parent / "run.html"
    path.write_text(page_of(read_run(run)))
    return path


def opened(page: Page, path: Path, width: int = 1280) -> float:
    page.size(width, 800)
    seconds = page.open(path)
    assert page.errors == []
    assert page.requests == [path.resolve().as_uri()] or page.requests == [
        path.resolve().as_uri(),
        "data:,",
    ]
    return seconds


def drawn(page: Page) -> dict[str, int]:
    """Return how many shapes and letters each panel shows."""
    found: dict[str, int] = page.run(
        "Object.fromEntries([...document.querySelectorAll('section')].map(s => [s.id,"
        "s.querySelectorAll('svg rect, svg path, svg circle, td').length]))"
    )
    return found


def test_every_panel_is_drawn(html: Path, page: Page) -> None:
    opened(page, html)
    shapes = drawn(page)
    assert [*shapes] == ["overview", "time", "heat", "size", "shards", "training"]
    assert all(count > 0 for count in shapes.values()), shapes
    assert shapes["heat"] == 24
    nav = page.run("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert nav == [*shapes]


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(html: Path, page: Page, width: int) -> None:
    opened(page, html, width)
    assert page.run("document.documentElement.scrollWidth") <= width


def test_hovering_says_what_is_under_the_pointer(html: Path, page: Page) -> None:
    opened(page, html)
    assert page.hover("#waterfall rect.p-write").startswith("rank 0 on node-000\nwrite ")
    assert "rank 0 on node-000" in page.hover("#heatmap .cell")
    assert "model" in page.hover(".treemap .leaf")
    assert page.hover("h1") == ""


def view(page: Page) -> tuple[float, float]:
    low, high = page.run("(e => [+e.dataset.from, +e.dataset.to])(document.querySelector('.rows'))")
    return low, high


def test_dragging_zooms_in_and_a_double_click_shows_all_again(html: Path, page: Page) -> None:
    opened(page, html)
    low, high = view(page)
    x, y, width, height = page.place_of("#waterfall .rows svg")
    page.mouse("mouseMoved", x + width * 0.4, y + height / 2)
    page.mouse("mousePressed", x + width * 0.4, y + height / 2, down=True)
    page.mouse("mouseMoved", x + width * 0.6, y + height / 2, down=True)
    page.mouse("mouseReleased", x + width * 0.6, y + height / 2)
    left, right = view(page)
    assert low < left < right < high and right - left < 0.35 * (high - low)
    x, y, width, height = page.place_of("#waterfall .rows svg")
    page.run(
        "document.querySelector('#waterfall .rows svg')"
        ".dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))"
    )
    assert view(page) == (low, high)


def test_buttons_and_keys_zoom_too(html: Path, page: Page) -> None:
    opened(page, html)
    low, high = view(page)
    page.run("document.querySelector('[data-zoom=\"zoom in\"]').click()")
    assert view(page)[1] - view(page)[0] == pytest.approx((high - low) / 2)
    page.run("document.querySelector('[data-zoom=\"zoom out\"]').click()")
    assert view(page) == (low, high)
    page.run(
        "document.querySelector('.rows').dispatchEvent(new KeyboardEvent('keydown', {key: '+'}))"
    )
    assert view(page)[1] - view(page)[0] == pytest.approx((high - low) / 2)


def test_another_save_and_another_phase_can_be_chosen(html: Path, page: Page) -> None:
    opened(page, html)
    choose = "(e => {{ e.value = {}; e.dispatchEvent(new Event('change')) }})({})"
    before = page.run("document.querySelector('#waterfall svg').outerHTML")
    page.run(choose.format(9, "document.getElementById('save')"))
    assert page.run("document.querySelector('#waterfall svg').outerHTML") != before
    page.run(choose.format(0, "document.getElementById('phase')"))
    assert page.run("document.querySelector('#heatmap .legend').textContent").startswith("wait")
    page.run(choose.format("'compression'", "document.getElementById('colour')"))
    leaves = "[...document.querySelectorAll('.treemap .leaf')]"
    assert page.run(f"{leaves}.every(e => e.style.fill.startsWith('color-mix'))")
    assert page.errors == []


def test_ranks_are_shown_by_the_mesh_that_saved_them(
    html: Path, tmp_path: Path, page: Page
) -> None:
    found = read_run(html.parent / "run")
    assert found.contents is not None
    mesh = {"names": [EVIL, "dp", "tp"], "shape": [2, 3, 4]}
    path = tmp_path / "mesh.html"
    path.write_text(page_of(replace(found, contents=replace(found.contents, mesh=mesh))))
    opened(page, path)
    rows = "[...document.querySelectorAll('#heatmap text.end')].map(e => e.dataset.tip)"
    assert page.run(rows) == ["node-000", "node-001", "node-002"]
    page.run(
        "(e => { e.value = 1; e.dispatchEvent(new Event('change')) })"
        "(document.querySelectorAll('#heatmap select')[1])"
    )
    labels = page.run(rows)
    assert [label.rpartition(", ")[2] for label in labels] == ["dp 0", "dp 1", "dp 2"] * 2
    assert labels[5].startswith("</script>") and page.errors == []
    assert page.run("document.querySelectorAll('#heatmap .cell').length") == 24


def test_colours_follow_the_user(html: Path, page: Page) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    page.size(1280, 800)
    page.open(html)
    light = page.run(back)
    page.size(1280, 800, dark=True)
    assert page.run(back) != light


def test_it_prints(html: Path, page: Page) -> None:
    opened(page, html)
    assert len(page.call("Page.printToPDF", printBackground=True)["data"]) > 10_000


def test_a_thousand_saves_of_256_ranks_open_quickly(
    tmp_path: Path, new_path: NewPath, page: Page
) -> None:
    """Their lines are made of fifty saves, which are as good as a thousand for a browser."""
    run = new_path()
    run.mkdir()
    blocks = [
        "".join(json.dumps(row) + "\n" for row in lines_of(n, 256, slow={19: {"write": 2.2}}))
        for n in range(1, 51)
    ]
    with (run / "metrics.jsonl").open("w") as file:
        for number in range(1000):
            block = blocks[number % 50]
            step = f'"step": {number % 50 + 1},'
            file.write(block.replace(step, f'"step": {number + 1},'))
    found = read_run(run)
    assert found.timing.counts == {"save": 1000} and len(found.timing.saves) == 1000
    path = tmp_path / "big.html"
    path.write_text(page_of(found))
    assert path.stat().st_size <= BYTES_MAX
    seconds = min(opened(page, path) for _ in range(3))
    assert seconds <= OPEN_S_MAX
    assert page.run("document.querySelectorAll('#waterfall rect').length") > 256 * 4
    assert "Rank 19 on node-002" in page.run("document.querySelector('.findings').innerText")


@pytest.fixture
def evil_run(new_path: NewPath) -> Path:
    run = new_path() / "<b>run</b>&"
    state: dict[str, Any] = {EVIL: {EVIL: torch.ones(30, 30), "b": torch.ones(3)}, "text": EVIL}
    with Checkpointer(run, every=1, options=SMALL) as checkpointer:
        for step in range(1, 3):
            checkpointer.step(step, state, metrics={EVIL: 1.5 * step})
    with (run / "metrics.jsonl").open("a") as file:
        for row in lines_of(3, 4, host=EVIL[:50]):
            file.write(json.dumps(row | {"time": EVIL}) + "\n")
    return run


def check_harmless(page: Page, path: Path) -> None:
    opened(page, path)
    assert page.run("document.querySelectorAll('img, script').length") == 2  # its own two
    assert "holdfast" in page.run("document.title")
    text = path.read_text()
    assert "\x1b" not in text and "<img" not in text and text.count("</script>") == 2


def test_names_with_markup_are_shown_and_never_run(
    evil_run: Path, tmp_path: Path, page: Page
) -> None:
    path = tmp_path / "run.html"
    path.write_text(page_of(read_run(evil_run)))
    check_harmless(page, path)
    assert "<b>run</b>&" in page.run("document.querySelector('h1').innerText")
    assert "onerror=alert(1)" in page.run("document.getElementById('training').innerText")
    assert "onerror" in page.hover(".treemap .leaf")
    assert "<script>" in page.hover("#heatmap .cell")
    check_harmless(page, path)


def test_pages_of_a_checkpoint_and_a_difference_are_as_harmless(
    evil_run: Path, tmp_path: Path, page: Page
) -> None:
    step = evil_run / "step-00000001"
    path = tmp_path / "a.html"
    path.write_text(checkpoint_page(holdfast.open(step)))
    check_harmless(page, path)
    assert "onerror" in page.run("document.getElementById('tensors').innerText")
    other = evil_run / "step-00000002"
    path.write_text(difference_page(diff(step, other, with_angle=True)))
    check_harmless(page, path)
    assert "<script>document" in page.run("document.getElementById('layers').innerText")


def test_data_ends_no_script() -> None:
    assert "<" not in script_json({"a": EVIL}) and json.loads(script_json({"a": EVIL})) == {
        "a": EVIL
    }


def test_a_policy_would_stop_a_script_that_came_in(html: Path, tmp_path: Path, page: Page) -> None:
    path = tmp_path / "with-script.html"
    text = html.read_text().replace("<main>", "<main><script>window.came = 1</script>")
    path.write_text(text.replace("</main>", "<img src='http://127.0.0.1:1/x.png'></main>"))
    page.open(path)
    assert page.run("window.came") is None
    assert any("Content Security Policy" in error for error in page.errors)


def test_a_page_of_inspect_is_drawn(html: Path, tmp_path: Path, page: Page) -> None:
    path = tmp_path / "step.html"
    step = html.parent / "run" / "step-00000004"
    assert main(["inspect", str(step), "--html", str(path)]) == 0
    opened(page, path)
    shapes = drawn(page)
    assert [*shapes] == ["overview", "size", "shards", "tensors"]
    assert shapes["size"] > 8 and shapes["tensors"] == 8 * 6
    assert main(["inspect", str(step.parent), "--html", str(path)]) == 0
    opened(page, path)
    assert "time" in drawn(page)


@pytest.mark.skipif("HOLDFAST_PICTURES" not in os.environ, reason="for people to look at")
def test_pictures(html: Path, page: Page) -> None:
    folder = Path(os.environ["HOLDFAST_PICTURES"])
    for width in (1280, 390):
        for dark in (False, True):
            page.size(width, 900, dark=dark)
            page.open(html)
            name = f"report-{width}-{'dark' if dark else 'light'}.png"
            page.picture(folder / name, whole=True)
