"""A slice of the campaign of `tiers_loop.py`: ranks and hosts that die while steps go up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = Path(__file__).parent / "tiers_loop.py"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_what_each_tier_has_acknowledged_survives_kills(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, LOOP, "--kills", "12", "--seed", "5", "--root", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 faults" in done.stdout
