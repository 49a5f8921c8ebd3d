"""A save in the background and the end of its process."""

import subprocess
import sys

import pytest

SAVING = """
import threading
import time
from holdfast.saving import handle as handle_module
from holdfast.engine.ledger import Ledger

def work():
    WORK
    print("ended", flush=True)

handle_module.OUTCOME_GRACE_S = 0.1
handle = handle_module.SaveHandle("runs/a", None, Ledger(), DEADLINE_S)
handle_module.take_flight(handle)
handle.start(work)
"""
AS_CHILD = """
import multiprocessing
import sys
child = multiprocessing.get_context("fork").Process(target=exec, args=(sys.argv[1], {}))
child.start()
child.join()
sys.exit(child.exitcode)
"""


def run(work: str, deadline_s: float, *, child: bool) -> tuple[str, str]:
    """Run a program that ends with a save in flight; return what it has printed."""
    program = SAVING.replace("WORK", work).replace("DEADLINE_S)", f"{deadline_s})")
    command = [sys.executable, "-c", *([AS_CHILD, program] if child else [program])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout, done.stderr


@pytest.mark.parametrize("child", [False, True])
def test_a_process_ends_when_its_save_has(child: bool) -> None:
    assert run("time.sleep(1)", 60, child=child) == ("ended\n", "")


@pytest.mark.parametrize("child", [False, True])
def test_a_process_ends_by_the_deadline_though_its_save_hangs(child: bool) -> None:
    printed, told = run("threading.Event().wait()", 0.1, child=child)
    assert not printed and "runs/a did not end by its deadline" in told
