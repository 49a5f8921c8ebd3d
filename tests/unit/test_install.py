"""What has to be installed: one name everywhere, and an answer where something is missing."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import holdfast
from holdfast import version

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; "
HINT = r"pip install 'holdfast-checkpoint\[torch\]'"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    holdfast.save({"weight": torch.ones(8)}, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A run: a lossless checkpoint, and a delta of it that is signed."""
    weight, key = torch.randn(64, 64), Ed25519PrivateKey.generate()
    pem = (form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*pem))
    for step in (1, 2):
        state = {"weight": weight + 1e-4 * step, "fixed": torch.ones(64, dtype=torch.bfloat16)}
        path = tmp_path / "run" / f"step-{step:08d}"
        holdfast.save(state, path, step=step, codec=holdfast.codecs.Delta())
    assert holdfast.open(path).base == "step-00000001"
    holdfast.sign(path, key=tmp_path / "key.pem")
    return path.parent


def without_torch(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def command_without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return without_torch("from holdfast.cli import main; sys.exit(main(sys.argv[1:]))", *arguments)


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


@pytest.mark.parametrize("verb", ["--version", "inspect", "ls", "verify", "scrub", "repair"])
def test_what_needs_no_torch_runs_without_it(chain: Path, verb: str) -> None:
    answer = command_without_torch(*[verb] if verb == "--version" else [verb, str(chain)])
    assert (answer.returncode, answer.stderr) == (0, "")


def test_signatures_are_made_and_checked_without_torch(chain: Path) -> None:
    key, step = str(chain.parent / "key.pem"), str(chain / "step-00000002")
    answer = command_without_torch("sign", step, "--key", key)
    assert (answer.returncode, answer.stderr) == (0, "")
    answer = command_without_torch("verify", "--signature", str(chain))
    assert (answer.returncode, answer.stderr) == (0, "")


def test_damage_of_a_base_is_found_without_torch(chain: Path) -> None:
    data = max((chain / "step-00000001").rglob("*.hf"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:5000] + b"damage" + data.read_bytes()[5006:])
    answer = command_without_torch("verify", str(chain))
    assert answer.returncode == 1
    assert re.search(r"BAD .*step-00000002: 1 fault", answer.stdout), answer.stdout
    assert re.search(r"lost: weight", answer.stdout), answer.stdout


@pytest.mark.parametrize("verb", [["verify", "--deep"], ["repair", "--to", "new"]])
def test_decoding_without_torch_says_what_to_install(chain: Path, verb: list[str]) -> None:
    place = chain if verb[0] == "verify" else chain / "step-00000002"
    answer = command_without_torch(verb[0], str(place), *verb[1:])
    assert (answer.returncode, answer.stdout) == (2, ""), "it does not say so for each step"
    assert re.search(rf"needs torch.*{HINT}.*Without torch, ", answer.stderr), answer.stderr


@pytest.mark.parametrize("verb", ["diff", "rebase", "recompress", "convert", "bench", "demo"])
def test_a_verb_that_lacks_torch_says_what_to_install(path: Path, verb: str) -> None:
    paths = {"diff": 2, "recompress": 2, "convert": 2, "demo": 0}.get(verb, 1)
    answer = command_without_torch(verb, *[str(path)] * paths)
    assert answer.returncode == 2
    assert re.search(rf"holdfast {verb} needs torch.*{HINT}", answer.stderr), answer.stderr


def test_a_function_that_lacks_torch_says_what_to_install() -> None:
    answer = without_torch("import holdfast; holdfast.save")
    assert re.search(rf"ImportError: holdfast.save needs torch.*{HINT}", answer.stderr)


def test_an_open_checkpoint_tells_all_but_tensors_without_torch(chain: Path) -> None:
    program = """
import holdfast
checkpoint = holdfast.open(sys.argv[1])
print(checkpoint.names(), checkpoint.info("weight").shape, checkpoint.verify())
try:
    checkpoint.tensor("weight")
except holdfast.errors.OptionError as error:
    print(error)
"""
    answer = without_torch(program, str(chain / "step-00000002"))
    assert answer.stdout.startswith("['weight', 'fixed'] (64, 64) []"), answer.stderr
    assert re.search(rf"reading tensors needs torch.*{HINT}", answer.stdout), answer.stdout


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
