"""Each verb on a terminal of 80 x 24 and of 200 x 50, to the letter: `tests/cli/screens/`.

`make screens` runs the same commands in a real tmux, and compares. Snapshots are written anew with
HOLDFAST_SCREENS=write; look at each that changes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import cli
from holdfast.tools import text

from .screens import COMMANDS, SIZES, fly, make_runs, tmux, without_moments

FOLDER = Path(__file__).parent / "screens"
HAS_TMUX = shutil.which("tmux") is not None
IN_TMUX = os.environ.get("HOLDFAST_SCREENS") == "tmux"
WRITES = os.environ.get("HOLDFAST_SCREENS") == "write"
ONE_SCREEN = {name for name in COMMANDS if name.endswith("help") or name.startswith("watch")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("w")
    make_runs(place)
    return place


@pytest.fixture
def place(runs: Path) -> Iterator[Path]:
    """A copy of the runs, which a command may change; its path is always as long."""
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir="/tmp") as above:
        shutil.copytree(runs, above, dirs_exist_ok=True)
        fly(Path(above))
        yield Path(above)


def snapshot(name: str, columns: int, lines: int) -> Path:
    return FOLDER / f"{name}-{columns}x{lines}.txt"


def check(name: str, size: tuple[int, int], found: list[str]) -> None:
    columns, lines = size
    assert max(map(text.width_of, found)) <= columns
    assert name not in ONE_SCREEN or len(found) < lines
    path = snapshot(name, columns, lines)
    if WRITES:
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([*found, ""]))
    assert found == path.read_text().splitlines()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_screen_is_as_it_was_looked_at(
    place: Path,
    name: str,
    size: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    columns, lines = size
    for variable, value in (("COLUMNS", columns), ("LINES", lines), ("NO_COLOR", 1)):
        monkeypatch.setenv(variable, str(value))
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if name.startswith("no-"):  # on a busy machine, others would draw a bar there
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    cli.main(COMMANDS[name].split())
    printed = capsys.readouterr()
    check(name, size, without_moments(printed.out + printed.err, place))


@pytest.mark.skipif(not IN_TMUX, reason="make screens")
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_screen_is_the_same_in_tmux(place: Path, name: str, size: tuple[int, int]) -> None:
    with tmux(place, *size) as terminal:
        found = terminal.run(f"holdfast {COMMANDS[name]}")
    check(name, size, without_moments(found, place))


@pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed: make screens")
@pytest.mark.parametrize(("how", "code"), [("C-c", 130), ("TERM", 143), ("deleted", 2)])
def test_watch_leaves_the_terminal_as_it_was(place: Path, how: str, code: int) -> None:
    with tmux(place, 80, 24) as terminal:
        terminal.keys("echo was here before", "Enter")
        before = terminal.shows("^was here before$")
        watch = "holdfast watch runs/flight & echo $! > pid; fg" if how == "TERM" else ""
        terminal.keys(f"{watch or 'holdfast watch runs/flight'}; echo [exit $?]", "Enter")
        shown = terminal.shows("^saving step 1,200")
        assert "was here before" not in shown and not terminal.cursor_is_shown()
        assert re.search("^rank 0  node-0  █+.* 25 %  writing$", shown, re.MULTILINE)
        if how == "TERM":
            os.kill(int((place / "pid").read_text()), signal.SIGTERM)
        elif how == "deleted":
            shutil.rmtree(place / "runs/flight")
        else:
            terminal.keys(how)
        after = terminal.shows(rf"\[exit {code}\]$")
        assert after.startswith(before.rstrip()[:-1].rstrip()), after
        assert "saving step" not in after and terminal.cursor_is_shown()
        terminal.keys("clear; stty -a | grep -o -- '-\\?echo\\b'", "Enter")
        terminal.shows("^echo$")  # what is typed is shown


def test_a_line_is_whole_where_no_terminal_is(place: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "verify", "runs/bad"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    (fault,) = [line for line in done.stdout.splitlines() if "MANIFEST says" in line]
    assert re.search("data/[0-9a-f]{32}/", fault) and len(fault) > 200


@pytest.mark.parametrize("width", [40, 47, 80, 200])
def test_what_is_broken_into_lines_says_the_same(width: int) -> None:
    lines = [
        "good /tmp/run: every byte",
        "  " + "/".join(["a-long-directory"] * 30) + "/file and more words after it",
        "x" * 500,
        "     lost: " + " ".join(f"tensor.{n}" for n in range(99)),
        "",
        "表" * 130,
    ]
    found = text.fit(lines, width)
    assert max(map(text.width_of, found)) <= width
    assert "".join("".join(found).split()) == "".join("".join(lines).split())


def test_parts_are_left_out_whole_and_words_are_not_cut() -> None:
    parts = ["lossless on 300", "val_loss 0.1", "accuracy 0.5"]
    assert text.join_fitting(parts, 50, "  ") == "lossless on 300  val_loss 0.1  accuracy 0.5"
    assert text.join_fitting(parts, 40, "  ") == "lossless on 300  val_loss 0.1  …"
    assert text.join_fitting(parts, 31, "  ") == "lossless on 300  …"
    assert text.join_fitting(["damaged: its data is gone"], 20, "  ") == "damaged: its data …"
    assert text.clip("one two", 6) == "one …" and text.clip("onetwothree", 6) == "one…ee"
    assert text.cut_name("model.layers.0.weight", 14) == "mode….0.weight"
    assert text.join_fitting([], 20, " ") == ""
