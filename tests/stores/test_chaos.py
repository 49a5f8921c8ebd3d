"""A slice of `make stores-chaos`, against each S3 server that is given with --store."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from namespaces import needs_namespaces

TESTS = Path(__file__).parents[1]
SERVERS = ("moto", "seaweedfs")
SEED = os.environ.get("CRASH_SEED") or "161"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--store")
    metafunc.parametrize("server", [kind for kind in SERVERS if kind in given])


def play(server: str, *arguments: str) -> str:
    """Play part of the campaign; return what it says."""
    paths = os.pathsep.join(map(str, (TESTS, TESTS / "crash")))
    done = subprocess.run(
        [sys.executable, "-m", "stores.chaos_loop", "--server", server, "--seed", SEED, *arguments],
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return done.stdout


def test_requests_that_are_harmed_lose_no_save(server: str) -> None:
    said = play(server, "--only", "random", "--rounds", "10")
    done = re.search(r"^in all: 10 rounds, (\d+) requests harmed, .* 0 faults", said, re.MULTILINE)
    assert done is not None and int(done[1]) > 5


@needs_namespaces
def test_ranks_with_a_local_disk_that_are_harmed_in_an_upload_lose_no_save(server: str) -> None:
    said = play(server, "--only", "tiers-random", "--rounds", "3")
    done = re.search(r"^in all: 3 rounds, (\d+) requests harmed, .* 0 faults", said, re.MULTILINE)
    assert done is not None and int(done[1]) > 0


def test_of_sixteen_who_race_one_wins(server: str) -> None:
    said = play(server, "--only", "races", "--rounds", "1")
    assert re.search(r"^in all: 3 rounds, .* 0 faults", said, re.MULTILINE)


def test_the_loop_notices_planted_faults(server: str) -> None:
    plants = (
        "replaced data goes before MANIFEST",
        "no look at the epoch",
        "told before the store has it",
    )
    assert "3 of 3 planted faults noticed" in play(server, "--plant", *plants)
