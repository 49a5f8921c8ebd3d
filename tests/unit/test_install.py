"""What has to be installed: one name everywhere, and an answer where something is missing."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import version

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; "
HINT = r"pip install 'holdfast-checkpoint\[torch\]'"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    holdfast.save({"weight": torch.ones(8)}, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def without_torch(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_hint_names_the_distribution_that_is_ours() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]
    hints = [
        (path.name, match[0])
        for path in texts
        for match in re.finditer(r"pip install[^`\n]*\bholdfast\b[^`\n]*", path.read_text())
    ]
    assert [hint for hint in hints if not re.search("holdfast-checkpoint", hint[1])] == []
    assert version.install_hint("sign") == "pip install 'holdfast-checkpoint[sign]'"
    assert f'name = "{version.DISTRIBUTION}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("verb", ["--version", "inspect", "verify", "repair"])
def test_what_needs_no_torch_runs_without_it(path: Path, verb: str) -> None:
    arguments = [verb] if verb == "--version" else [verb, str(path)]
    program = "from holdfast.cli import main; sys.exit(main(sys.argv[1:]))"
    answer = without_torch(program, *arguments)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["diff", "rebase", "recompress", "convert", "bench", "demo"])
def test_a_verb_that_lacks_torch_says_what_to_install(path: Path, verb: str) -> None:
    paths = {"diff": 2, "recompress": 2, "convert": 2, "demo": 0}.get(verb, 1)
    program = "from holdfast.cli import main; sys.exit(main(sys.argv[1:]))"
    answer = without_torch(program, verb, *[str(path)] * paths)
    assert answer.returncode == 2
    assert re.search(rf"holdfast {verb} needs torch.*{HINT}", answer.stderr), answer.stderr


def test_a_function_that_lacks_torch_says_what_to_install() -> None:
    answer = without_torch("import holdfast; holdfast.save")
    assert re.search(rf"ImportError: holdfast.save needs torch.*{HINT}", answer.stderr)


@pytest.mark.parametrize("found", ["holdfast-0.3.dist-info", "holdfast-0.3-py3.11.egg-info"])
def test_the_other_project_of_this_name_is_reported(tmp_path: Path, found: str) -> None:
    (tmp_path / found).mkdir()
    with pytest.warns(RuntimeWarning, match=r"another project.*pip uninstall holdfast holdfast-"):
        version.warn_of_other(str(tmp_path))


@pytest.mark.parametrize("found", ["holdfast_checkpoint-0.1.0.dist-info", "holdfast"])
def test_our_own_installation_is_not_reported(tmp_path: Path, found: str) -> None:
    (tmp_path / found).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        version.warn_of_other(str(tmp_path))
        version.warn_of_other(str(tmp_path / "absent"))
