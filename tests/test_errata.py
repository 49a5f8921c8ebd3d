"""Every test that docs/errata.md names exists, and most of them are in `make test`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from long import CASES_AFTER_THE_FIRST, LONG, SLOW, reason_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errata.md"
SHARE_IN_MAKE_TEST = 0.9


def named(page: str) -> Iterator[str]:
    """Give every test of the table's last column; one without a file is of the file before it."""
    for line in page.splitlines():
        if not line.startswith("| ") or line.startswith("| what "):
            continue
        file = ""
        for name in re.findall(r"`([^`]+)`", line.rsplit(" | ", 1)[1]):
            if name.startswith("test_"):
                yield f"{file}::{name}"
                continue
            file = name.split("::")[0]
            yield name


def is_missing(name: str) -> bool:
    """Return whether there is no such file, or no such test in it."""
    file, _, test = name.partition("::")
    path = ROOT / file
    return not path.exists() or (bool(test) and test not in functions_of(path))


def functions_of(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_errata_exists() -> None:
    names = list(named(PAGE.read_text()))
    assert len(names) > 70
    assert [name for name in names if is_missing(name)] == []


def test_a_test_that_does_not_exist_is_missed() -> None:
    row = "| x | y | z | `tests/test_tidy.py::test_a_circle_is_found`, `test_of_nothing` |"
    here, gone = named(row)
    assert not is_missing(here) and is_missing(gone)
    assert is_missing("tests/unit/test_nothing.py")


def test_make_test_runs_nearly_all_of_them() -> None:
    names = [name for name in named(PAGE.read_text()) if name.startswith("tests/")]
    long = [name for name in names if reason_of(name, is_first_case=True)]
    print("only in make test-all:", *long, sep="\n")
    assert len(long) <= (1 - SHARE_IN_MAKE_TEST) * len(names)
    assert set(long) == ERRATA_OF_TEST_ALL


# What was found, and is looked for by `make test-all` alone.
ERRATA_OF_TEST_ALL = {"tests/process/test_interrupts.py", "tests/crash/test_nfs.py"}


@pytest.mark.parametrize("name", [*LONG, *SLOW])
def test_what_is_long_exists(name: str) -> None:
    assert not is_missing(f"tests/{name.removesuffix(CASES_AFTER_THE_FIRST)}")


def test_the_first_case_of_some_is_kept() -> None:
    name = next(name for name in LONG if name.endswith(CASES_AFTER_THE_FIRST))
    node = name.removesuffix(CASES_AFTER_THE_FIRST)
    assert reason_of(f"tests/{node}[b]") and not reason_of(f"tests/{node}[a]", is_first_case=True)


def test_all_cases_of_a_long_test_are_long() -> None:
    assert reason_of("tests/process/test_campaign.py::test_x[a/b::c]")
    assert reason_of("tests/crash/test_kill.py::test_x")
    assert not reason_of("tests/crash/test_killed.py::test_x")
    assert not reason_of("tests/unit/test_ambient.py::test_x")
