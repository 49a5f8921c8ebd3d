"""Exit codes, errors and pipes: what holds for every verb."""

import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import cli

from .conftest import Command, start_python

NewPath = Callable[[], Path]


@pytest.fixture
def path(new_path: NewPath) -> Path:
    path = new_path()
    holdfast.save({"w": torch.zeros(10)}, path)
    return path


def check_usage_error(answer: object, pattern: str) -> None:
    """One line on the standard error, nothing else, exit 2."""
    assert (answer.code, answer.out) == (2, "")
    assert re.fullmatch(r"holdfast: .+\n", answer.err), answer.err
    assert re.search(pattern, answer.err), answer.err


def test_the_version_with_what_a_bug_report_needs(holdfast_command: Command) -> None:
    answer = holdfast_command("--version", "--verbose")
    facts = dict(re.split(r" {2,}", line, maxsplit=1) for line in answer.out.splitlines())
    assert answer.code == 0
    assert facts["holdfast"] == f"{holdfast.__version__} (holdfast-checkpoint)"
    assert facts["torch"] == version("torch")
    assert facts["instruction set"] in ("AVX-512", "AVX2", "baseline")
    assert facts["writes by"] in ("io_uring", "direct", "buffered")
    assert {"python", "system", "file system", "disk"} <= facts.keys()


def test_the_version(holdfast_command: Command) -> None:
    answer = holdfast_command("--version")
    assert (answer.code, answer.out) == (0, f"holdfast {holdfast.__version__}\n")


def test_alone_it_prints_help(holdfast_command: Command) -> None:
    answer = holdfast_command()
    assert answer.code == 2 and answer.out.startswith("usage: holdfast ")
    for verb in ("inspect", "ls", "verify", "diff", "convert", "bench", "demo"):
        assert re.search(rf"^[a-z ]{{7}}  {verb}  ", answer.out, re.MULTILINE)


def test_the_help_of_each_verb_is_one_screen_with_an_example(holdfast_command: Command) -> None:
    verbs = re.findall(r"^[a-z ]{7}  ([a-z-]+)  ", holdfast_command().out, re.MULTILINE)
    assert sorted(verbs) == sorted(v for v in verb_names() if v != "report" or v in verbs)
    for arguments in ([], *([verb] for verb in verbs if verb != "demo")):
        lines = run_narrow(*arguments, "--help").splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80, arguments
        assert not arguments or f"Example: holdfast {arguments[0]} " in "\n".join(lines)


def verb_names() -> list[str]:
    from holdfast.tools.parser import make_parser

    return [name for a in make_parser()._actions for name in a.choices or ()]


def run_narrow(*arguments: str) -> str:
    """Run the command on a screen of 80 columns and 24 lines."""
    environment = os.environ | {"COLUMNS": "80", "LINES": "24"}
    done = start_python("-m", "holdfast", *arguments, capture_output=True, env=environment)
    return str(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["inspct"], "'inspect'"),
        (["verify", "x", "--depe"], "'--deep'"),
        (["inspect", "{above}/stp-7"], "{above}/step-7"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_likely_one(
    tmp_path: Path, holdfast_command: Command, arguments: list[str], meant: str
) -> None:
    (tmp_path / "step-7").mkdir()
    answer = holdfast_command(*(word.format(above=tmp_path) for word in arguments))
    assert f"Did you mean {meant.format(above=tmp_path)}?" in answer.err and answer.code == 2


def test_a_completion_script_knows_the_verbs(holdfast_command: Command) -> None:
    answer = holdfast_command("completion", "bash")
    assert answer.code == 0 and "check-run" in answer.out and "--durable-min" in answer.out
    check_usage_error(holdfast_command("completion", "fish"), "invalid choice: 'fish'")


def test_colours_are_for_terminals_alone_and_not_with_no_color(path: Path) -> None:
    import pty

    def shown(**environment: str) -> str:
        here, there = pty.openpty()
        known = os.environ | {"TERM": "xterm", "NO_COLOR": ""} | environment
        start_python("-m", "holdfast", "verify", path, stdout=there, env=known)
        os.close(there)
        try:
            return os.read(here, 65536).decode()
        finally:
            os.close(here)

    assert "\x1b[" in shown()
    assert "\x1b[" not in shown(NO_COLOR="1") and "\x1b[" not in shown(TERM="dumb")


def test_ls_of_a_checkpoint_is_inspect(path: Path, holdfast_command: Command) -> None:
    assert holdfast_command("ls", path, "--json") == holdfast_command("inspect", path, "--json")


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff", "convert", "bench"])
def test_help_is_no_error(holdfast_command: Command, verb: str) -> None:
    answer = holdfast_command(verb, "--help")
    assert answer.code == 0 and answer.out.startswith(f"usage: holdfast {verb} ")


def test_a_machine_without_memory_is_told_in_one_line(
    path: Path, holdfast_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr(cli, "_run", run)
    answer = holdfast_command("verify", path)
    assert (answer.code, answer.err) == (2, "holdfast: verify: out of memory\n")


def test_python_may_run_without_docstrings(path: Path) -> None:
    for arguments in (["demo", "--help"], ["inspect", str(path), "--json"]):
        command = ["-m", "holdfast", *arguments]
        done = start_python("-OO", *command, capture_output=True, check=True)
        assert done.stdout.startswith("usage: holdfast demo" if "demo" in arguments else "{")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["inspect"], "required: PATH; see 'holdfast inspect --help'"),
        (["inspect", "x", "--unknown"], "unrecognized arguments: --unknown"),
        (["verify", "x", "y"], "unrecognized arguments: y"),
        (["diff", "x"], "required: B"),
        (["convert", "x"], "required: TARGET"),
        (["convert", "x", "y"], "holds neither MANIFEST nor .metadata"),
        (["convert", "/etc/passwd", "y"], "Run 'holdfast import /etc/passwd y'"),
        (["explode"], "invalid choice: 'explode'"),
        (["inspect", "ftp://bucket/x"], "There is no store for ftp://"),
        (["inspect", ""], "expected the path of a directory"),
    ],
)
def test_usage_errors(holdfast_command: Command, arguments: list[str], pattern: str) -> None:
    check_usage_error(holdfast_command(*arguments), pattern)


@pytest.mark.parametrize("verb", ["inspect", "verify", "scrub"])
def test_a_path_that_is_no_checkpoint(
    new_path: NewPath, holdfast_command: Command, verb: str
) -> None:
    nowhere = new_path()
    check_usage_error(holdfast_command(verb, nowhere), "does not exist")
    nowhere.mkdir()
    check_usage_error(holdfast_command(verb, nowhere), "is not a checkpoint")
    (nowhere / "file").write_text("x")
    check_usage_error(holdfast_command(verb, nowhere / "file"), "is not a directory")
    (nowhere / "data").mkdir()
    check_usage_error(holdfast_command(verb, nowhere), "has data files but no MANIFEST")


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_newer_version(path: Path, holdfast_command: Command, verb: str) -> None:
    with (path / "MANIFEST").open("r+b") as manifest:
        manifest.seek(8)
        manifest.write(b"\x02")
    check_usage_error(holdfast_command(verb, path), "format version 2.*Upgrade holdfast")


def test_inspect_of_a_broken_manifest(path: Path, holdfast_command: Command) -> None:
    (path / "MANIFEST").write_bytes(b"x" * 200)
    answer = holdfast_command("inspect", path)
    assert (answer.code, answer.out) == (1, "")
    assert re.fullmatch(r"holdfast: .+MANIFEST cannot be read: .+\n", answer.err)


def test_interruption(
    path: Path, holdfast_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import holdfast.tools.verify

    def interrupted(path: str, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(holdfast.tools.verify, "verify", interrupted)
    answer = holdfast_command("verify", path)
    assert (answer.code, answer.out, answer.err) == (130, "", "")


def test_demo_gets_its_arguments(
    holdfast_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    demo = types.ModuleType("holdfast.tools.demo")
    demo.main = lambda arguments: seen.append(arguments) or 7
    monkeypatch.setitem(sys.modules, "holdfast.tools.demo", demo)
    assert holdfast_command("demo", "--out", "x", "--help").code == 7
    assert seen == [["--out", "x", "--help"]]


def test_a_reader_that_goes_away_is_no_error(path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = start_python("-m", "holdfast", "inspect", path, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_installed_script_and_the_module_are_the_same(path: Path) -> None:
    by_module = start_python("-m", "holdfast", "verify", path, capture_output=True)
    script = Path(sys.executable).with_name("holdfast")
    by_script = subprocess.run([script, "verify", path], capture_output=True, text=True, timeout=60)
    assert by_module.returncode == by_script.returncode == 0
    assert by_module.stdout == by_script.stdout != ""


def test_a_latin_terminal_gets_what_it_can_show(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"größe": torch.zeros(1), "大きさ": torch.zeros(1)}, path)
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "holdfast", "inspect", path]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "größe".encode("latin-1") in done.stdout and rb"\u5927" in done.stdout


def test_main_reads_the_arguments_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["holdfast", "--version"])
    assert cli.main() == 0
    assert capsys.readouterr().out.startswith("holdfast ")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["inspect", "nowhere"], "NotCommittedError"),
        (["verify", "nowhere"], "NotCommittedError"),
        (["scrub", "ftp://bucket/x"], "OptionError"),
        (["repair", "nowhere"], "NotCommittedError"),
        (["diff", "nowhere", "nowhere"], "NotCommittedError"),
        (["rebase"], "OptionError"),
    ],
)
def test_with_json_an_error_is_a_document_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holdfast_command: Command,
    arguments: list[str],
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = holdfast_command(*arguments, "--json")
    assert answer.code == 2 and answer.document["error"]["type"] == kind
    assert answer.err == f"holdfast: {answer.document['error']['message']}\n"
