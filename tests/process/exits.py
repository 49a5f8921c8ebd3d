"""How a process ends: with a save in flight perhaps, in every way that Python has."""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import holdfast
from holdfast.testing import Fault, faulty

from .episode import Episode
from .states import OPTIONS, make_state

FLIGHT_MS = 40  # of one fsync of the save in flight
FLIGHT, WHOLE = "flight", "whole end"  # a save is in flight at the end; torch is torn down too


@dataclass(frozen=True)
class Ending:
    """One way to end.

    Attributes:
        begin: what is done before; it may not return.
        status: what the process ends with.
        is_graceful: Python's own end is walked through: it waits for the save in flight.
        may_leave: a save may be cut off in the middle.
    """

    begin: Callable[[Episode], None]
    status: int = 0
    is_graceful: bool = True
    may_leave: bool = False


class Unhandled(Exception):
    """Ends a process as a bug of a program's does."""


def fly(episode: Episode) -> None:
    """Leave a slow save in flight."""
    state, path = make_state(4), episode.new_path("last")
    saved = episode.begin(path, state)
    with faulty(Fault("sync", persistent=True, action="delay", argument=FLIGHT_MS)):
        done, _ = episode.guard(
            "save_async", lambda: holdfast.save_async(state, path, options=OPTIONS)
        )
    if done:
        episode.say(flight=str(path), digest=saved[2])


def _exit(episode: Episode) -> None:
    sys.exit(3)


def _raise(episode: Episode) -> None:
    raise Unhandled("the program fails")


def _save_at_exit(episode: Episode) -> None:
    state = make_state(11)
    way = episode.save if episode.rng.random() < 0.5 else episode.save_async
    atexit.register(way, state, episode.new_path("atexit"))


def _save_in_thread(*, daemon: bool, late: bool) -> Callable[[Episode], None]:
    def begin(episode: Episode) -> None:
        # What a daemon thread of the program computes in torch may abort when Python ends.
        state = episode.spare if daemon else make_state(12)
        begun = threading.Event()

        def work() -> None:
            begun.set()
            if late:
                threading.main_thread().join()
            for _ in range(3):
                episode.save(state, episode.new_path("thread"))
                episode.save_async(state, episode.new_path("thread"))

        threading.Thread(target=work, daemon=daemon).start()
        begun.wait()

    return begin


ENDINGS: dict[str, Ending] = {
    "return": Ending(lambda episode: None),
    "sys.exit": Ending(_exit, status=3),
    "os._exit": Ending(lambda episode: os._exit(4), 4, is_graceful=False, may_leave=True),
    "unhandled": Ending(_raise, status=1),
    "atexit saves": Ending(_save_at_exit),
    "thread saves": Ending(_save_in_thread(daemon=False, late=False)),
    "daemon saves": Ending(_save_in_thread(daemon=True, late=False), may_leave=True),
    "saves after the main thread": Ending(_save_in_thread(daemon=False, late=True)),
    "SIGTERM": Ending(
        lambda episode: os.kill(os.getpid(), signal.SIGTERM), -15, is_graceful=False, may_leave=True
    ),
    "SIGKILL": Ending(
        lambda episode: os.kill(os.getpid(), signal.SIGKILL), -9, is_graceful=False, may_leave=True
    ),
}


def end_soon(status: int) -> NoReturn:
    """Do what Python does first at its end, and end: wait for threads, call what atexit has."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(status)


def told(error: BaseException) -> str:
    """Return an error in a line."""
    return "".join(traceback.format_exception(error))[-600:].replace("\n", " | ")
