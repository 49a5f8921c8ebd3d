"""Jobs of several ranks on one store: any layout to any layout, and ranks that are killed."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.stores.url import open_store
from stores.places import Place

PROGRAM, LIMIT_S = Path(__file__).parent / "ranks_program.py", 100
RUN = (
    Path(__file__).parents[1] / "integrations" / "run_example.py"
)  # or gloo may abort it at its end


@pytest.fixture
def path(new_place: Place) -> str:
    return new_place()


def job(verb: str, path: str, ranks: int, scratch: Path) -> list["subprocess.Popen[str]"]:
    meeting = scratch / f"meeting-{time.time_ns()}"
    command = [sys.executable, str(RUN), str(PROGRAM), verb, path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]


def ended(processes: list["subprocess.Popen[str]"]) -> list[str]:
    texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(texts)
    return texts


def test_any_layout_loads_in_any_other(path: str, tmp_path: Path) -> None:
    if path.startswith("memory"):
        pytest.skip("the memory of a process has one rank")
    ended(job("save", path, 2, tmp_path))
    for ranks in (3, 1):
        ended(job("load", path, ranks, tmp_path))
    assert not holdfast.verify(path).damage


def test_the_memory_of_one_process_is_not_shared_by_ranks(tmp_path: Path) -> None:
    processes = job("save", "memory://x/a", 2, tmp_path)
    texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert all(process.returncode for process in processes)
    assert "on the rank that wrote it, but is not there on rank 0" in texts[0], texts[0]


def test_a_killed_job_loses_no_step_that_it_has_told(path: str, tmp_path: Path) -> None:
    if path.startswith("memory"):
        pytest.skip("its objects end with the process")
    done = 0
    for seed in range(4):
        processes = job("run", path, 1 + seed % 2, tmp_path)
        text = ""
        while not re.findall(r"step (\d+)", text):
            line = processes[0].stdout.readline()  # type: ignore[union-attr]
            assert line, text
            text += line
        time.sleep(random.Random(seed).uniform(0.05, 1.5))
        for process in processes:
            process.send_signal(signal.SIGKILL)
        text += processes[0].communicate()[0]
        newest = int(re.findall(r"step (\d+)", text)[-1])
        with holdfast.Checkpointer(path) as checkpointer:
            steps = checkpointer.steps()
        # A step is told before it is saved, and the save of the last but one has ended then.
        assert max(steps, default=0) >= max(newest - 2, done), (newest, steps)
        for step in steps:
            state = holdfast.open(f"{path}/step-{step:08}")
            assert state["n"] == step and state["w"].eq(step).all()
            assert not holdfast.verify(f"{path}/step-{step:08}").damage
        done = max(steps, default=0)
    assert open_store(path).exists("")
