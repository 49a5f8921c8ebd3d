"""A round of a few scenarios of `make chaos`; those that this machine cannot make are skipped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS_LOOP = Path(__file__).parent / "chaos_loop.py"
SEED = os.environ.get("CRASH_SEED") or "161"  # nothing is cut off or hangs for long by it


def play(*names: str) -> None:
    """Play a round of each scenario that can be made here; skip the test where none can."""
    said, skipped = run_chaos_loop("--only", *names)
    if len(skipped) == len(names):
        pytest.skip("; ".join(skipped))
    done = re.search(r"^in all: (\d+) rounds, .*, (\d+) faults$", said, re.MULTILINE)
    assert done is not None and (int(done[1]), done[2]) == (len(names) - len(skipped), "0")


def run_chaos_loop(*arguments: str) -> tuple[str, list[str]]:
    """Run it; return what it says, and what it says that it cannot make here."""
    command = [sys.executable, CHAOS_LOOP, "--rounds", "1", "--seed", SEED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return done.stdout, re.findall(r"^(\S+: skipped, .*)$", done.stdout, re.MULTILINE)


def test_jobs_that_lose_ranks_or_their_run_lose_no_save() -> None:
    play("kill", "after-link", "zombie")


def test_ranks_that_are_cut_off_or_out_of_memory_or_disk_are_told_of() -> None:
    play("out-of-memory", "partition", "hung-disk")


def test_the_loop_notices_a_job_that_is_not_refused() -> None:
    said, _ = run_chaos_loop("--plant", "no fencing look")
    assert "1 of 1 planted faults noticed" in said
