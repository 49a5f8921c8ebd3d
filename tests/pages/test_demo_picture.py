"""The README's picture of the demo shows what a real run printed, and nothing else."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from holdfast.tools.demo_results import Results, judge

from .blocks import ROOT

SCRIPT = ROOT / "scripts" / "draw-demo"
CAST = ROOT / "docs" / "pictures" / "demo.cast"
PICTURE = CAST.with_suffix(".svg")
LINES_MAX, SECONDS_MAX = 60, 240  # of a demo, on two cores


def printed() -> list[tuple[float, str]]:
    """Return the lines of the recording, each with the seconds until it was printed."""
    _, *events = map(json.loads, CAST.read_text().splitlines())
    return [(at_s, text.removesuffix("\n")) for at_s, _, text in events]


def test_the_picture_is_drawn_from_the_recording(tmp_path: Path) -> None:
    drawn = tmp_path / "demo.svg"
    command = [sys.executable, str(SCRIPT), "--cast", str(CAST), "--svg", str(drawn)]
    subprocess.run(command, check=True)
    assert drawn.read_text() == PICTURE.read_text(), "run scripts/draw-demo"


def test_the_picture_shows_all_lines_of_the_recording_and_no_others() -> None:
    picture = ElementTree.fromstring(PICTURE.read_text())
    shown = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    took_s = printed()[-1][0]
    title = re.fullmatch(r"(\d+) min (\d+) s, shown \d+ times as fast", shown.pop(0) or "")
    assert title and int(title[1]) * 60 + int(title[2]) == round(took_s)
    assert shown == ["$ make demo", *[text for _, text in printed() if text]]


def test_the_recording_is_of_the_demo_as_it_is() -> None:
    lines = [text for _, text in printed()]
    source = (ROOT / "src" / "holdfast" / "tools" / "demo.py").read_text()
    headings = re.findall(r'screen\.heading\("(.+)"\)', source)
    assert [line for line in lines if line in headings] == headings and len(headings) == 8
    claims = [claim.text for claim in judge(Results("small", 13, 2, ""))]
    assert [line.removeprefix("   yes: ") for line in lines if line[:7] == "   yes:"] == claims


def test_the_recorded_demo_is_short() -> None:
    assert len(printed()) <= LINES_MAX
    assert printed()[-1][0] <= SECONDS_MAX


def test_the_picture_loads_nothing_and_fits_light_and_dark() -> None:
    text = PICTURE.read_text()
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "<script" not in text and "url(#screen)" in text
    assert "prefers-color-scheme:dark" in text and "prefers-reduced-motion:reduce" in text
