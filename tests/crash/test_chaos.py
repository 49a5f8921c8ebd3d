"""A round of a few scenarios of `make chaos`; those that this machine cannot make are skipped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS_LOOP = Path(__file__).parent / "chaos_loop.py"
SEED = os.environ.get("CRASH_SEED") or "161"  # nothing is cut off or hangs for long by it


def run_chaos_loop(*arguments: str) -> str:
    """Run it; skip the test where nothing of what was asked for can be made here."""
    command = [sys.executable, CHAOS_LOOP, "--rounds", "1", "--seed", SEED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    skipped = re.findall(r"^(\S+: skipped, .*)$", done.stdout, re.MULTILINE)
    if "in all: 0 rounds" in done.stdout:
        pytest.skip("; ".join(skipped))
    return done.stdout


@pytest.mark.slow
def test_jobs_that_lose_ranks_or_their_run_lose_no_save() -> None:
    said = run_chaos_loop("--only", "kill", "after-link", "zombie")
    assert "in all: 3 rounds" in said


@pytest.mark.slow
def test_ranks_that_are_cut_off_or_out_of_memory_or_disk_are_told_of() -> None:
    run_chaos_loop("--only", "out-of-memory", "partition", "hung-disk")


@pytest.mark.slow
def test_the_loop_notices_a_job_that_is_not_refused() -> None:
    assert "1 of 1 planted faults noticed" in run_chaos_loop("--plant", "no fencing look")
