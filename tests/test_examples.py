"""The examples: numbered from 01, short, and run as they stand."""

import ast
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import holdfast

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES_MAX = 60
RUNNERS = {"run", "start", "torchrun"}  # functions that run an example by its name
TESTS = [
    Path(__file__),
    ROOT / "tests" / "integrations" / "test_dcp_examples.py",
    ROOT / "tests" / "integrations" / "test_clusters.py",
]


def start(place: Path, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / example), *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=100,
    )


def run(place: Path, example: str, *arguments: str) -> list[str]:
    done = start(place, example, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_by(text: str) -> Iterator[str]:
    """Name every example that a test of this source runs."""
    tests = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for test in [node for node in tests if node.name.startswith("test_")]:
        for call in [node for node in ast.walk(test) if isinstance(node, ast.Call)]:
            if getattr(call.func, "id", "") in RUNNERS:
                names = [word.value for word in call.args if isinstance(word, ast.Constant)]
                yield from (name for name in names if str(name).endswith(".py"))


def faults_of(examples: Sequence[Path], tests: Sequence[str]) -> list[str]:
    """Say which examples are out of line, too long, or run by no test."""
    faults, tried = [], {name for text in tests for name in run_by(text)}
    for number, path in enumerate(examples, 1):
        if not re.fullmatch(rf"{number:02d}_[a-z_]+\.py", path.name):
            faults.append(f"{path.name} is not called {number:02d}_….py")
        if (lines := len(path.read_text().splitlines())) > LINES_MAX:
            faults.append(f"{path.name}: {lines} lines, at most {LINES_MAX}")
        if path.name not in tried:
            faults.append(f"{path.name} is run by no test")
    return faults


def test_the_examples_are_numbered_short_and_run_by_tests() -> None:
    assert faults_of(EXAMPLES, [path.read_text() for path in TESTS]) == []


def test_an_example_that_is_out_of_line_is_found(tmp_path: Path) -> None:
    first, third = tmp_path / "01_a.py", tmp_path / "03_b.py"
    first.write_text("x = 1\n" * 61)
    third.write_text("x = 1\n" * 60)
    tested = 'def test_a():\n    run(place, "03_b.py")\n\ndef other():\n    run(place, "01_a.py")\n'
    assert faults_of([first, third], [tested]) == [
        "01_a.py: 61 lines, at most 60",
        "01_a.py is run by no test",
        "03_b.py is not called 02_….py",
    ]


def test_a_state_is_saved_and_loaded_and_read_in_part(tmp_path: Path) -> None:
    assert run(tmp_path, "01_save_and_load.py", "a") == ["step 10, epoch 3: 16 tensors"]


def test_a_killed_run_resumes_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    (unbroken,) = run(tmp_path, "02_resume.py", "unbroken")
    assert start(tmp_path, "02_resume.py", "killed", "35").returncode == -signal.SIGKILL
    (resumed,) = run(tmp_path, "02_resume.py", "killed")
    # The save of step 30 was under way when the signal came, or had ended.
    first = re.fullmatch(r"steps (21|31) to 60, loss (0x\S+)", resumed)
    assert first is not None, resumed
    assert unbroken == f"steps 1 to 60, loss {first[2]}"


def test_a_run_rolls_back_leaves_out_the_bad_data_and_is_evaluated(tmp_path: Path) -> None:
    back, end = run(tmp_path, "06_rollback.py", "run")
    # Step 36 is the first to read the bad data: positions 280 to 288 of 310.
    assert re.fullmatch(
        r"step 36: loss \d{5,}; back to step 30, without the data from 240 to 328", back
    )
    assert float(re.fullmatch(r"step 60: loss ([\d.]+), position 568", end)[1]) < 10  # type: ignore
    with holdfast.open(tmp_path / "run" / "step-00000060") as checkpoint:
        assert checkpoint.objects()["data.skipped"] == [[240, 328]]
    (told,) = run(tmp_path, "07_evaluate.py", "run")
    assert float(re.fullmatch(r"step 60: loss ([\d.]+)", told)[1]) < 10  # type: ignore


def test_a_webhook_is_told_of_alerts_without_names(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *given: object) -> None:
            """Nothing on the standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/hook"
        (told,) = run(tmp_path, "09_webhook.py", url, "secret")
        server.shutdown()
    assert told == "steps [10, 20, 30] are there"
    (alert,) = map(json.loads, bodies)
    assert (alert["kind"], alert["rule"], alert["step"]) == ("alert", "stall", 10)
    assert b"secret" not in bodies[0]
