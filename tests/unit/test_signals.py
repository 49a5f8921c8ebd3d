"""Signals that end a run: real ones, sent by processes to themselves at a known moment."""

import multiprocessing
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from distributed.ranks import start_server
from holdfast.errors import OptionError
from holdfast.runs.signals import SignalWatch

PRELUDE = """
import gc, os, signal, sys, threading
import torch
import holdfast
from holdfast.runs import signals as signals_module

options = holdfast.Options(pool_bytes=32 << 20)

def say(*words):
    print(*words, flush=True)

def state_at(step):
    return {"w": torch.full((1000,), float(step)), "step": step}

def term():
    os.kill(os.getpid(), signal.SIGTERM)

def handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
"""
LOOP = """
with holdfast.Checkpointer(run, every=2, options=options) as checkpointer:
    for step in range(1, 7):
        if step == 3:
            os.kill(os.getpid(), signal.{name})
        say(step, checkpointer.step(step, state_at(step)), checkpointer.stopping)
        if checkpointer.stopping and {aware}:
            break
say("left", handlers() == [signal.SIG_DFL] * 2)
"""


def run_script(tmp_path: Path, code: str) -> tuple[int, list[str], list[int]]:
    """Run a script; return its exit status, what it printed, and the steps of its run."""
    said = tmp_path / "said"
    context = multiprocessing.get_context("forkserver")
    start_server()
    process = context.Process(target=_script, args=(PRELUDE + code, tmp_path / "run", said))
    process.start()
    process.join()
    checkpointer = holdfast.Checkpointer(tmp_path / "run")
    for step in checkpointer.steps():
        with holdfast.open(checkpointer.path(step)) as checkpoint:
            assert checkpoint.verify() == []
            assert checkpoint.tensor("w")[0] == step
    assert process.exitcode is not None
    return process.exitcode, said.read_text().splitlines(), checkpointer.steps()


def _script(code: str, run: Path, said: Path) -> None:
    sys.stdout = said.open("w")
    # As it is when Python starts a script; the server that forks has no say in it.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    try:
        exec(code, {"run": str(run)})
    finally:
        sys.stdout.flush()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_makes_one_last_save_and_the_loop_is_left(tmp_path: Path, name: str) -> None:
    ended, said, steps = run_script(tmp_path, LOOP.format(name=name, aware=True))
    assert said == ["1 False False", "2 True False", "3 True True", "left True"]
    assert (ended, steps) == (0, [2, 3])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_script_that_does_not_look_is_ended_by_its_next_step(tmp_path: Path, name: str) -> None:
    ended, said, steps = run_script(tmp_path, LOOP.format(name=name, aware=False))
    assert said == ["1 False False", "2 True False", "3 True True"]
    assert (ended, steps) == (-signal.Signals[name], [2, 3])


def test_the_handler_of_before_gets_a_signal_that_nobody_looked_at(tmp_path: Path) -> None:
    code = """
def mine(number, frame):
    say("mine", number == signal.SIGTERM)
    sys.exit(7)

signal.signal(signal.SIGTERM, mine)
"""
    ended, said, steps = run_script(tmp_path, code + LOOP.format(name="SIGTERM", aware=False))
    assert said[-2:] == ["3 True True", "mine True"]
    assert (ended, steps) == (7, [2, 3])


def test_a_signal_after_the_last_step_ends_the_process_when_all_is_durable(tmp_path: Path) -> None:
    code = """
with holdfast.Checkpointer(run, every=1, options=options) as checkpointer:
    checkpointer.step(1, state_at(1))
    term()
    say("goes on")
say("not reached")
"""
    ended, said, steps = run_script(tmp_path, code)
    assert said == ["goes on"]
    assert (ended, steps) == (-signal.SIGTERM, [1])


def test_an_exception_under_way_is_logged_before_a_signal_ends_the_process(tmp_path: Path) -> None:
    code = """
import logging
logging.basicConfig(stream=sys.stdout, level=logging.ERROR)
with holdfast.Checkpointer(run, options=options) as checkpointer:
    checkpointer.step(1, state_at(1))
    term()
    raise KeyError("mine")
"""
    ended, said, _ = run_script(tmp_path, code)
    assert ended == -signal.SIGTERM
    assert said[-1] == "KeyError: 'mine'" and "Traceback" in said[1]


def test_a_second_signal_is_obeyed_at_once_but_a_double_of_the_first_is_not(
    tmp_path: Path,
) -> None:
    code = """
signals_module.DOUBLE_S = {seconds}
with holdfast.Checkpointer(run, options=options) as checkpointer:
    checkpointer.step(1, state_at(1))
    term()
    term()
    say("goes on")
    checkpointer.step(2, state_at(2))
"""
    ended, said, steps = run_script(tmp_path, code.format(seconds=60))
    assert (ended, said, steps) == (0, ["goes on"], [2])
    ended, said, steps = run_script(tmp_path, code.format(seconds=0))
    assert (ended, said, steps) == (-signal.SIGTERM, [], [2])


def test_a_signal_while_the_last_save_is_made_does_not_hurt_it(tmp_path: Path) -> None:
    code = """
signals_module.DOUBLE_S = 0

class Signals:
    def state_dict(self):
        term()
        return {"v": torch.ones(3)}

    def load_state_dict(self, state):
        pass

with holdfast.Checkpointer(run, every=1, options=options) as checkpointer:
    for step in range(1, 4):
        state = state_at(step) | ({"x": Signals()} if step < 3 else {})
        say(step, checkpointer.step(step, state), checkpointer.stopping)
        if checkpointer.stopping:
            break
"""
    ended, said, steps = run_script(tmp_path, code)
    assert said == ["1 True False", "2 True True"]
    assert (ended, steps) == (0, [1, 2])


@pytest.mark.parametrize("stage", ["eager", "lazy", "sync"])
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_signals_all_the_time_do_not_hurt_a_save(tmp_path: Path, stage: str, io: str) -> None:
    code = f"""
count = 0

def tick(number, frame):
    global count
    count += 1

signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
options = holdfast.Options(pool_bytes=32 << 20, io="{io}", block_bytes=1 << 16)
with holdfast.Checkpointer(run, every=1, stage="{stage}", options=options) as checkpointer:
    for step in range(1, 7):
        checkpointer.step(step, state_at(step) | {{"v": torch.randn(1 << 20)}})
signal.setitimer(signal.ITIMER_REAL, 0)
say(count > 20)
"""
    assert run_script(tmp_path, code) == (0, ["True"], [1, 2, 3, 4, 5, 6])


def test_a_child_that_was_forked_is_ended_by_a_signal_as_ever(tmp_path: Path) -> None:
    code = """
with holdfast.Checkpointer(run, options=options) as checkpointer:
    checkpointer.step(1, state_at(1))
    child = os.fork()
    if child == 0:
        term()
        os._exit(5)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    say(checkpointer.step(2, state_at(2)))
"""
    assert run_script(tmp_path, code) == (0, ["-15", "False"], [])


def test_a_checkpointer_that_does_not_step_leaves_signals_alone(tmp_path: Path) -> None:
    code = """
with holdfast.Checkpointer(run, options=options) as checkpointer:
    checkpointer.save(1, state_at(1))
    checkpointer.restore(state_at(0))
    say(handlers() == [signal.SIG_DFL] * 2)
    term()
"""
    assert run_script(tmp_path, code) == (-signal.SIGTERM, ["True"], [1])


def test_a_checkpointer_that_is_dropped_gives_signals_back(tmp_path: Path) -> None:
    code = """
checkpointer = holdfast.Checkpointer(run, options=options)
checkpointer.step(1, state_at(1))
say(handlers() == [signal.SIG_DFL] * 2)
del checkpointer
gc.collect()
say(handlers() == [signal.SIG_DFL] * 2)
"""
    assert run_script(tmp_path, code) == (0, ["False", "True"], [])


def test_a_loop_in_another_thread_saves_and_warns_once_that_no_signal_will(tmp_path: Path) -> None:
    code = """
import logging
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")

def loop():
    with holdfast.Checkpointer(run, every=1, options=options) as checkpointer:
        for step in (1, 2):
            checkpointer.step(step, state_at(step))
        say(handlers() == [signal.SIG_DFL] * 2)

thread = threading.Thread(target=loop)
thread.start()
thread.join()
"""
    ended, said, steps = run_script(tmp_path, code)
    warning = (
        "SIGTERM and SIGUSR1 will not save: step() was called outside the main thread. Call it in "
        "the main thread, or give signals=()"
    )
    assert said == [warning, "True"]
    assert (ended, steps) == (0, [1, 2])


def test_a_step_in_the_main_thread_watches_after_one_in_another(tmp_path: Path) -> None:
    code = """
with holdfast.Checkpointer(run, options=options) as checkpointer:
    thread = threading.Thread(target=lambda: checkpointer.step(1, state_at(1)))
    thread.start()
    thread.join()
    checkpointer.step(2, state_at(2))
    term()
    say(checkpointer.step(3, state_at(3)), checkpointer.stopping)
"""
    assert run_script(tmp_path, code) == (0, ["True True"], [3])


def test_without_signals_none_is_watched_for(tmp_path: Path) -> None:
    code = """
import logging
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
with holdfast.Checkpointer(run, signals=(), options=options) as checkpointer:
    checkpointer.step(1, state_at(1))
    thread = threading.Thread(target=lambda: checkpointer.step(2, state_at(2)))
    thread.start()
    thread.join()
    say(handlers() == [signal.SIG_DFL] * 2)
"""
    assert run_script(tmp_path, code) == (0, ["True"], [])


@pytest.mark.parametrize("signals", ["SIGTERM", 15, (999,), (signal.SIGKILL,), (signal.SIGSTOP,)])
def test_what_is_no_signal_to_catch_is_refused(tmp_path: Path, signals: object) -> None:
    with pytest.raises(OptionError, match="signals"):
        holdfast.Checkpointer(tmp_path / "run", signals=signals)  # type: ignore[arg-type]


def test_an_interrupt_as_handlers_are_installed_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before was not noted yet, and could not be put back."""
    before, install = signal.getsignal(signal.SIGUSR1), signal.signal

    def interrupted(*values: Any) -> None:
        install(*values)
        raise KeyboardInterrupt

    checkpointer = holdfast.Checkpointer(tmp_path, every=1, signals=(signal.SIGUSR1,))
    with monkeypatch.context() as points, pytest.raises(KeyboardInterrupt):
        points.setattr(signal, "signal", interrupted)
        checkpointer.step(1, {"n": 1})
    checkpointer.step(2, {"n": 2})
    checkpointer.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_close_that_two_interrupts_cut_off_ends_when_it_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    checkpointer = holdfast.Checkpointer(tmp_path / "run", stage="sync", signals=(signal.SIGTERM,))
    checkpointer.step(1, {"w": torch.ones(3)})

    def interrupted(_: SignalWatch) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as points:
        points.setattr(SignalWatch, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) != before
    checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) == before
