"""The examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES_MAX = 60


def run(place: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES_MAX


def test_a_run_rolls_back_leaves_out_the_bad_data_and_is_evaluated(tmp_path: Path) -> None:
    back, end = run(tmp_path, str(ROOT / "examples" / "rollback.py"), "run")
    # Step 36 is the first to read the bad data: positions 280 to 288 of 310.
    assert re.fullmatch(
        r"step 36: loss \d{5,}; back to step 30, without the data from 240 to 328", back
    )
    assert float(re.fullmatch(r"step 60: loss ([\d.]+), position 568", end)[1]) < 10  # type: ignore
    with holdfast.open(tmp_path / "run" / "step-00000060") as checkpoint:
        assert checkpoint.objects()["data.skipped"] == [[240, 328]]
    (told,) = run(tmp_path, str(ROOT / "examples" / "evaluate.py"), "run")
    assert float(re.fullmatch(r"step 60: loss ([\d.]+)", told)[1]) < 10  # type: ignore
