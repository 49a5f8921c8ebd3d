"""The demo from end to end, in its quick form: what it leaves, what it says, how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # torchrun starts five times
CLAIMS = 9
LINES_MAX = 60  # on a terminal of 80 columns


@pytest.fixture(scope="module")
def demo(
    tmp_path_factory: pytest.TempPathFactory,
) -> "tuple[subprocess.CompletedProcess[str], Path]":
    out = tmp_path_factory.mktemp("demo") / "out"
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", "demo", "--quick", "--out", str(out)],
        capture_output=True,
        text=True,
        # Whoever runs the tests under torchrun has these; the demo's own runs must not see them.
        env={**os.environ, "WORLD_SIZE": "7", "RANK": "6", "COLUMNS": "80"},
    )
    return ended, out


def test_the_quick_demo_ends_well_and_leaves_three_files(demo) -> None:
    ended, out = demo
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(path.name for path in out.iterdir()) == ["demo.png", "report.md", "results.json"]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_results_prove_every_claim(demo) -> None:
    results = json.loads((demo[1] / "results.json").read_text())
    assert len(results["claims"]) == CLAIMS
    assert [claim["text"] for claim in results["claims"] if not claim["holds"]] == []
    after = {step: loss for step, loss in results["resumed"].items()}
    assert list(map(int, after)) == list(range(results["restored"] + 1, results["steps"] + 1))
    for step, loss in after.items():
        assert loss.hex() == results["unbroken"][step].hex()


def test_the_kill_left_data_and_no_manifest(demo) -> None:
    kill = json.loads((demo[1] / "results.json").read_text())["kill"]
    assert any(name.endswith(".hf") and size > 0 for name, size in kill["files"].items())
    assert "MANIFEST" not in kill["files"]
    assert kill["processes"] == 3
    assert kill["written_bytes"] > 0


def test_the_report_says_what_it_must(demo) -> None:
    report = (demo[1] / "report.md").read_text()
    for text in (
        "the loss is the same, bit for bit",
        "![",
        "step killed",
        "MANIFEST: no",
        "step restored",
        "Bits of the loss",
        "GB/s",
        "holdfast.save",
        "torch.save + fsync",
        "DCP, 1 thread",
        "1 process, plain",
        "3 processes, FSDP2",
        "CorruptError",
        "tolerance 5e-06",
    ):
        assert text in report, text
    assert "NO:" not in report


def test_the_terminal_shows_the_table_and_no_moving_line(demo) -> None:
    shown = demo[0].stdout
    assert "| holdfast.save " in shown
    assert "\r" not in shown and "\x1b" not in shown


def test_the_terminal_shows_little_and_begins_with_what_will_happen(demo) -> None:
    lines = demo[0].stdout.splitlines()
    assert len(lines) <= LINES_MAX
    assert max(len(line) for line in lines if "/" not in line) <= 80
    opening = " ".join(lines[: lines.index("")])
    assert opening.startswith("holdfast demo: train a small GPT on 2 processes, kill it")
    assert opening.endswith("On 2 cores this takes one to two minutes.")
    assert sum(line.startswith("   yes: ") for line in lines) == CLAIMS
