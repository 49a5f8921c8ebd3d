"""A checkpoint from a stranger may not drive the terminal, break the layout or bring us down."""

import dataclasses
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.format.manifest import decode_manifest, encode_manifest
from holdfast.tools import text

from .conftest import Command, data_files, flip_bit

NewPath = Callable[[], Path]

CLEAR = "\x1b[2J\x1b[H"  # clears the screen
TITLE = "\x1b]0;owned\x07"  # sets the window's title
C1 = "\x9b31m"  # the same as ESC [ in one character, to terminals that know C1
REVERSED = "gnp.\u202egpj.exe"  # writes from right to left from here on
HIDDEN = "a\u200bb\u2066c\u2028d\x7f"
EVIL = [CLEAR, TITLE, C1, REVERSED, HIDDEN, "line\nbreak\rhome\ttab\x08back", ""]


def check_harmless(output: str) -> None:
    """Only line ends and characters that stand still."""
    bad = {c for c in output if c != "\n" and not c.isprintable()}
    assert not bad, [unicodedata.name(c, hex(ord(c))) for c in bad]


@pytest.fixture
def path(new_path: NewPath) -> Path:
    """A checkpoint that is hostile wherever a checkpoint has text."""
    path = new_path()
    tensors = {name: torch.full((3,), float(i)) for i, name in enumerate(EVIL)}
    objects = {f"object {name}": [name, {name: name.encode()}] for name in EVIL}
    holdfast.save(tensors | objects, path, metrics=dict.fromkeys(EVIL, 1.0))
    manifest = path / "MANIFEST"
    table = decode_manifest(manifest.read_bytes(), "").table
    mesh = {"shape": [1] * len(EVIL), "names": EVIL}
    header = dataclasses.replace(table.header, written_by="".join(EVIL), mesh=mesh)
    manifest.write_bytes(encode_manifest(dataclasses.replace(table, header=header)))
    return path


@pytest.mark.parametrize("options", [[], ["--all"], ["--json"], ["--json", "--all"]])
def test_inspect_is_harmless(path: Path, holdfast_command: Command, options: list[str]) -> None:
    answer = holdfast_command("inspect", path, *options)
    assert answer.code == 0
    check_harmless(answer.out)
    assert "2J" in answer.out  # the name is there, escaped


def test_verify_is_harmless(path: Path, holdfast_command: Command) -> None:
    (file,) = data_files(path)
    flip_bit(file, file.read_bytes().index(torch.full((3,), 1.0).numpy().tobytes()))
    (path / f"stray{CLEAR}").write_text("")
    for options in ([], ["--json"]):
        answer = holdfast_command("verify", path, *options)
        assert answer.code == 1 and "tensor" in answer.out and "stray" in answer.out
        check_harmless(answer.out)


def test_diff_is_harmless(path: Path, new_path: NewPath, holdfast_command: Command) -> None:
    other = new_path()
    tensors = {name: torch.zeros(3) for name in EVIL[1:]}
    holdfast.save(tensors | {f"object {name}": f"{name}!" for name in EVIL}, other)
    for options in ([], ["--all"], ["--json"]):
        answer = holdfast_command("diff", path, other, *options)
        assert answer.code == 1
        check_harmless(answer.out)


def test_errors_are_harmless_and_one_line(
    path: Path, new_path: NewPath, holdfast_command: Command
) -> None:
    (file,) = data_files(path)
    flip_bit(file, file.read_bytes().index(torch.full((3,), 1.0).numpy().tobytes()))
    for arguments in (
        ["inspect", f"{new_path()}{CLEAR}"],
        ["inspect", "x", f"--{TITLE}"],
        ["diff", path, path],  # the text of the error names the tensor
    ):
        answer = holdfast_command(*arguments)
        assert answer.code == 2 and answer.err.startswith("holdfast: ")
        assert answer.err.count("\n") == 1
        check_harmless(answer.err)


def test_a_run_is_harmless(path: Path, new_path: NewPath, holdfast_command: Command) -> None:
    root = new_path()
    root.mkdir()
    path.rename(root / f"step-{CLEAR}")
    (root / f"step-{C1}").mkdir()
    (root / "LATEST").write_bytes(b"step-\xff" + "".join(EVIL).encode())
    for options in ([], ["--json"]):
        answer = holdfast_command("inspect", root, *options)
        assert answer.code == 0
        check_harmless(answer.out)


def test_a_latest_of_any_size_is_not_read(new_path: NewPath, holdfast_command: Command) -> None:
    root = new_path()
    (root / "step-1").mkdir(parents=True)
    (root / "LATEST").write_bytes(b"x" * 100_000)
    assert "no LATEST" in holdfast_command("inspect", root).out


def test_long_names_and_values_do_not_break_the_layout(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path = new_path()
    names = [
        "a" * 4000,
        "大" * 1000,
        ".".join("abc" * 600),
        "." * 4000,
        "1" * 3000,
        "e\u0301" * 900,
    ]
    state = {name: torch.zeros([1] * 64) for name in names}
    holdfast.save(state | {"text": "long" * 10_000, "short": torch.zeros(2)}, path)
    for options in ([], ["--all"]):
        answer = holdfast_command("inspect", path, *options)
        assert answer.code == 0
        assert max(map(text.width_of, answer.out.splitlines())) <= 100
        assert any(line.split()[:2] == ["short", "f32"] for line in answer.out.splitlines())
    found = holdfast_command("inspect", path, "--json").document
    assert [tensor["name"] for tensor in found["tensors"]] == [*names, "short"]


def test_deep_names_do_not_exhaust_the_stack(new_path: NewPath, holdfast_command: Command) -> None:
    path = new_path()
    holdfast.save({"a." * 2000 + f"{i}": torch.zeros(1) for i in range(3)}, path)
    for options in ([], ["--all"], ["--json"]):
        assert holdfast_command("inspect", path, *options).code == 0
    assert holdfast_command("diff", path, path).code == 0


@given(st.text())
def test_printable_text_stands_still(anything: str) -> None:
    shown = text.printable(anything)
    assert shown.isprintable()
    assert text.printable(shown) == shown


@given(st.text(), st.integers(1, 30))
def test_cut_text_fits(anything: str, width: int) -> None:
    shown = text.printable(anything)
    result = text.cut(shown, width)
    assert text.width_of(result) <= width
    if text.width_of(shown) <= width:
        assert result == shown


@given(st.lists(st.tuples(st.text(), st.text(max_size=5)), min_size=1, max_size=5))
def test_columns_are_straight(cells: list[tuple[str, str]]) -> None:
    rows = [(text.printable(name), text.cut(text.printable(value), 9)) for name, value in cells]
    rows = [(name, f"{value}|") for name, value in rows]
    lines = text.columns(rows, right=(1,), width=40)
    assert len({text.width_of(line) for line in lines}) == 1
    assert text.width_of(lines[0]) <= 40


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_234_567, "1.23 MB"),
        (9_994_999, "9.99 MB"),
        (9_996_000, "10.0 MB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (140_000_000_000, "140 GB"),
        (1 << 63, "9.22 EB"),
    ],
)
def test_sizes_have_three_digits(count: int, shown: str) -> None:
    assert text.show_bytes(count) == shown
