"""A slice of the campaign of processes: some episodes, and a fault that is planted."""

import os
import re
import subprocess
import sys
from pathlib import Path

CAMPAIGN = Path(__file__).parent / "campaign.py"
SEED = os.environ.get("PROCESS_SEED") or "1"
EPISODES = 40


def play(*arguments: str) -> str:
    """Run the program; return what it says."""
    command = [sys.executable, CAMPAIGN, "--seed", SEED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return done.stdout


def test_processes_to_which_things_happen_lose_nothing_and_end() -> None:
    said = play("--episodes", str(EPISODES))
    done = re.search(r"(\d+) acknowledged saves, 0 episodes with faults$", said, re.MULTILINE)
    assert done is not None and int(done[1]) > 3 * EPISODES


def test_the_campaign_notices_a_pool_that_a_forked_child_shares() -> None:
    assert "1 of 1 planted faults noticed" in play("--plant", "a pool knows no process")
