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


@pytest.mark.parametrize("given", [("25", "--ranks", "4"), ("15", "--replace")])
def test_random_kills_lose_nothing_that_was_acknowledged(
    scratch: Path, given: tuple[str, ...]
) -> None:
    seed = os.environ.get("CRASH_SEED") or str(random.randrange(1 << 32))
    options = ["--kills", *given, "--seed", seed, "--root", scratch]
    command = [sys.executable, KILL_LOOP, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert f"{given[0]} kills" in done.stdout


@pytest.mark.parametrize("action", ["kill", "kill_after"])
def test_a_kill_at_any_call_of_a_replace_leaves_the_old_or_the_new(
    scratch: Path, action: str
) -> None:
    found = set()
    for nth in range(1, CALLS_MAX):
        place = scratch / str(nth) / "place"  # each sibling is looked at
        holdfast.save(make_state(1), place, options=OPTIONS)
        child = os.fork()
        if not child:
            with faulty(Fault("*", nth, action=action, argument=0)):
                holdfast.save(make_state(2), place, options=OPTIONS, replace=True)
            os._exit(0)
        end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        number = load_number(place)
        assert number == 2 if end == 0 else number in (1, 2)
        holdfast.save(make_state(3), place, options=OPTIONS, replace=True)
        assert load_number(place) == 3
        found.add((end, number))
        if end == 0:
            break
    assert found == {(-signal.SIGKILL, 1), (-signal.SIGKILL, 2), (0, 2)}
