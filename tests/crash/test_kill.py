"""SIGKILL at every call of a save, and at random moments of ranks that save again and again."""

import os
import random
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_state

import holdfast
from holdfast.testing import Fault, faulty

CALLS_MAX = 200  # of one save; far more than there are
KILL_LOOP = Path(__file__).parent / "kill_loop.py"


def save_in_a_child(root: Path, fault: Fault) -> int:
    """Save step 2 and retire step 1 in a process of its own; return how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        with faulty(fault):
            run = holdfast.Checkpointer(root, keep=holdfast.Keep.latest(1), options=OPTIONS)
            run.save(2, make_state(2))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def restored_step(root: Path) -> int | None:
    """Restore a run, of which every visible step must be whole."""
    run = holdfast.Checkpointer(root, options=OPTIONS)
    for step in run.steps():
        assert load_number(Path(run.path(step))) == step
    return run.restore(make_state(-1))


@pytest.mark.parametrize("action", ["kill", "kill_after"])
def test_a_kill_at_any_call_loses_nothing(scratch: Path, action: str) -> None:
    ends, steps = set(), set()
    for nth in range(1, CALLS_MAX):
        root = scratch / f"run-{nth}"
        run = holdfast.Checkpointer(root, options=OPTIONS)
        run.save(1, make_state(1))
        end = save_in_a_child(root, Fault("*", nth, action=action, argument=0))
        step = restored_step(root)
        assert step in ((2,) if end == 0 else (1, 2))
        run = holdfast.Checkpointer(root, options=OPTIONS)  # the child was the newer job
        run.save(3, make_state(3))
        assert restored_step(root) == 3
        ends.add(end)
        steps.add(step)
        if end == 0:
            break
    assert ends == {-signal.SIGKILL, 0} and steps == {1, 2}
    assert nth > 30


def test_random_kills_lose_nothing_that_was_acknowledged(scratch: Path) -> None:
    seed = os.environ.get("CRASH_SEED") or str(random.randrange(1 << 32))
    options = ["--kills", "25", "--ranks", "4", "--seed", seed, "--root", scratch]
    command = [sys.executable, KILL_LOOP, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "25 kills" in done.stdout
