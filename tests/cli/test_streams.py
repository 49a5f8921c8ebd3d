"""Where the answer goes: no terminal, a closed stream, a full disk, a run that is read-only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

COMMAND = f"{sys.executable} -m holdfast"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    for step in (1, 2):
        holdfast.save({"n": step}, root / f"step-{step:08d}", step=step)
    return root


def shell(line: str, where: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=where)


@pytest.mark.parametrize("verb", ["ls run", "watch run", "report run", "check-run run"])
def test_a_closed_stream_is_no_crash(run: Path, verb: str) -> None:
    for closed in (">&-", "2>&-", "<&-", ">&- 2>&-"):
        done = shell(f"{COMMAND} {verb} {closed}", run.parent)
        assert done.returncode == 0 and done.stderr == "", (closed, done.stderr)


def test_an_answer_that_cannot_be_written_is_an_error(run: Path) -> None:
    done = shell(f"{COMMAND} ls run > /dev/full", run.parent)
    assert done.returncode == 2
    assert done.stderr == "holdfast: cannot write the answer: No space left on device\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a run to another user")
def test_a_run_of_another_user_is_looked_at(run: Path, tmp_path: Path) -> None:
    for path in (run, *run.rglob("*")):
        os.chown(path, 1234, 1234)
    os.chmod(run / "step-00000001", 0o700)
    # Without its capabilities, root is one user among others.
    bare = f"setpriv --bounding-set=-all {COMMAND}"
    for verb in ("ls run", "watch run", "check-run run", "report run -o page.html"):
        done = shell(f"{bare} {verb}", tmp_path)
        assert done.returncode == 0 and done.stderr == "", (verb, done.stderr)
    listed = shell(f"{bare} ls run", tmp_path).stdout
    assert "unreadable: stat MANIFEST: Permission denied; give this user access" in listed
    os.chmod(run, 0o755)
    done = shell(f"{bare} report . -o page.html", run)
    assert done.returncode == 2 and "cannot write page.html: Permission denied" in done.stderr
