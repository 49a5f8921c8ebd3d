"""No code of a checkpoint is ever run: nothing unpickles, evaluates or starts anything.

Shown twice: by the source, and by Python's own audit events while a checkpoint is read.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast

from .lies import save_truth

NewPath = Callable[[], Path]
SOURCE = Path(holdfast.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# `demo` runs training, `bench` fio.
STARTERS = {
    "tools/demo.py",
    "tools/demo_run.py",
    "tools/demo_timing.py",
    "tools/bench_contenders.py",
}
EVALUATORS = {"eval", "exec", "compile", "__import__"}
PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def faults_of(name: str, text: str) -> Iterator[str]:
    """Calls that run what they are given, or may."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [module] if module else [alias.name for alias in node.names]
            for top in {each.split(".")[0] for each in names}:
                if top in PICKLERS:
                    yield f"{name}:{node.lineno}: imports {top}"
                if top == "subprocess" and name not in STARTERS:
                    yield f"{name}:{node.lineno}: imports subprocess"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {each.arg: ast.unparse(each.value) for each in node.keywords}
        if called in EVALUATORS:
            yield f"{name}:{node.lineno}: calls {called}"
        if called == "torch.load" and options.get("weights_only") != "True":
            yield f"{name}:{node.lineno}: torch.load without weights_only=True"
        if "allow_pickle" in options or called in ("os.system", "os.popen", "yaml.load"):
            yield f"{name}:{node.lineno}: {called} with {options}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_runs_nothing_that_it_reads(path: Path) -> None:
    assert list(faults_of(path.relative_to(SOURCE).as_posix(), path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "import subprocess",
        "eval(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "os.system(x)",
    ],
)
def test_each_rule_fails_when_it_is_broken(text: str) -> None:
    assert len(list(faults_of("engine/read.py", text))) == 1


READ = """
import json, sys
import torch, holdfast
from holdfast.cli import main

path, plant = sys.argv[1], sys.argv[2]

def read(path):
    state = holdfast.open(path).state()
    holdfast.load(path, into=state)
    assert holdfast.open(path).verify(deep=True) == []
    assert main(["inspect", path, "--all"]) == main(["verify", path, "--deep"]) == 0
    assert main(["diff", path, path]) == 0
    if plant:
        exec(plant)

read(sys.argv[3])  # what is imported by this is code of ours, and not of the checkpoint
seen = []
WATCHED = ("pickle.", "exec", "compile", "import", "subprocess.", "os.system", "os.exec", "os.fork",
           "os.posix_spawn", "socket.connect", "ctypes.dlopen", "marshal.", "code.")
WRITING = 3  # O_WRONLY | O_RDWR
here = True

def watch(event, arguments):
    if here and (event.startswith(WATCHED) or event == "open" and arguments[2] & WRITING):
        seen.append(f"{event} {arguments!r:.80}")

sys.addaudithook(watch)
read(path)
here = False
print("SEEN" + json.dumps(seen))
"""


def seen_by_the_interpreter(path: Path, again: Path, plant: str = "") -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", READ, str(again), plant, str(path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seen: list[str] = json.loads(out.split("SEEN")[-1])
    return seen


@pytest.mark.timeout(300)
def test_the_interpreter_sees_nothing_run_while_a_checkpoint_is_read(new_path: NewPath) -> None:
    first, second = new_path(), new_path()
    save_truth(first)
    save_truth(second)
    assert seen_by_the_interpreter(first, second) == []


@pytest.mark.timeout(300)
def test_the_interpreter_would_see_a_pickle(new_path: NewPath) -> None:
    path = new_path()
    save_truth(path)
    found = seen_by_the_interpreter(path, path, r"import pickle; pickle.loads(b'cos\ngetcwd\n.')")
    assert any(event.startswith("pickle.find_class") for event in found)
