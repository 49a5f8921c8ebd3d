"""Every code block of the README runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PYTHON = "\n".join(code for language, code in BLOCKS if language == "python")
COMMANDS = [
    line.split("#")[0].strip()
    for language, code in BLOCKS
    if language == "bash"
    for line in code.splitlines()
    if line.startswith("holdfast ")
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the Python blocks have been run, one after the other."""
    place = tmp_path_factory.mktemp("readme")
    subprocess.run([sys.executable, "-c", PYTHON], cwd=place, check=True, timeout=100)
    return place


def test_the_python_blocks_save_and_resume(place: Path) -> None:
    kept = sorted(path.name for path in (place / "runs" / "a").glob("step-*"))
    assert kept == ["step-00000100", "step-00000150", "step-00000200"]
    # Run again, the loop finds step 200 and has nothing left to do.
    again = subprocess.run(
        [sys.executable, "-c", PYTHON], cwd=place, capture_output=True, text=True
    )
    assert "AlreadyCommittedError" in again.stderr, "the second save to runs/b/first is refused"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(place: Path, command: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        command.split(), cwd=place, env=environment, capture_output=True, text=True
    )
    # diff finds differences: one of the two has been trained no further, but is named otherwise.
    assert done.returncode in ((0, 1) if "diff" in command else (0,)), done.stderr
    assert done.stdout


def test_every_path_of_the_map_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:src|docs|tests|core|bindings)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
