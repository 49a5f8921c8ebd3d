"""Calls of the command line inside the test's process, and of the real one in its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import cli


@dataclass(frozen=True)
class Answer:
    """What one command said."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON on the standard output, which must be strict."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


Command = Callable[..., Answer]


@pytest.fixture
def holdfast_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run `holdfast` in this process, on a screen of 100 columns and 40 lines."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")

    def run(*arguments: object) -> Answer:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return Answer(code, *capsys.readouterr())

    return run


def start_python(*arguments: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run Python in a process of its own."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, text=True, timeout=60, **options)


def flip_bit(file: Path, offset: int) -> None:
    """Flip the lowest bit of one byte."""
    with file.open("r+b") as data:
        data.seek(offset)
        (byte,) = data.read(1)
        data.seek(offset)
        data.write(bytes([byte ^ 1]))


def data_files(checkpoint: Path) -> list[Path]:
    """The data files of a checkpoint."""
    return sorted(checkpoint.glob("data/*/*.hf"))


def let_everybody_in(path: Path) -> None:
    """Let every user read a directory of a test, and all above it up to the system's own.

    How many that are depends: each of several processes of pytest has one more.
    """
    for directory in (path, *path.parents):
        if directory.stat().st_mode & 0o1005 == 0o1005 or directory == directory.parent:
            return  # /tmp: everybody's, and sticky
        directory.chmod(0o755)
