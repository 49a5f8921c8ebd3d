"""Two clients and a server of NFS: what one does is seen by the other, and no reply is needed.

`make nfs` plays more of it, and fetches the server that this needs.
"""

import subprocess
import sys
from pathlib import Path

import nfs_play
import pytest

PLAY = Path(__file__).parent / "nfs_play.py"
CASES = ("looks", "a new step", "a checkpoint that goes", "an open file", "an older job")
LIMIT_S = 600


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("version", nfs_play.VERSIONS)
def test_two_machines_see_what_the_other_one_does(version: str) -> None:
    if reason := nfs_play.missing():
        pytest.skip(reason)
    command = [sys.executable, PLAY, "--versions", version, "--scale", "0.1", "--only", *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.count(": ok ") == len(CASES)
