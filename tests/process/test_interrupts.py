"""A slice of the interrupt sweep: points at random, and real signals, in every verb."""

import os
import re
import subprocess
import sys
from pathlib import Path

SWEEP = Path(__file__).parent / "interrupts.py"
SEED = os.environ.get("PROCESS_SEED") or "11"
VERBS = 7


def sweep(*arguments: str) -> str:
    """Run the program; return what it says."""
    command = [sys.executable, SWEEP, "--seed", SEED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return done.stdout


def interrupts_in(said: str) -> list[int]:
    """Return how often each verb was interrupted."""
    return [int(count) for count in re.findall(r"^\w+: (\d+) interrupts", said, re.MULTILINE)]


def test_an_interrupt_at_any_point_of_any_verb_breaks_nothing_that_follows() -> None:
    assert min(interrupts_in(sweep("--sample", "40"))) >= 20


def test_a_signal_at_any_moment_of_any_verb_breaks_nothing_that_follows() -> None:
    counts = interrupts_in(sweep("--real", "30"))
    assert len(counts) == VERBS and sum(counts) >= 100
