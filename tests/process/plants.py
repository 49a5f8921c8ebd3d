"""Faults planted in the library: each takes out one thing that keeps a process safe.

The campaign has to notice each within some episodes, in which that happens what shows it. A name
that is gone is an error: the plant is then stale. Where a mend lands that a process depends on, a
plant that takes it out belongs here.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from . import ambient, events, exits, training

Change = tuple[str, str, Callable[[Any], Any]]  # module, name in it, what replaces what it finds


@dataclass(frozen=True)
class Plant:
    """What is changed, and what the campaign then says.

    Attributes:
        shows: a regular expression: other faults may be there too.
        only: what has to happen in the episodes.
    """

    changes: list[Change]
    shows: str
    only: tuple[str, ...] = ()


PARENT = os.getpid()
LATE_S = 0.005
NAMES = sorted(
    {
        *training.WAYS,
        *training.STAGES,
        *training.BUSY,
        *ambient.AROUND,
        *ambient.SUDDEN,
        *events.EVENTS,
        *events.CHILDREN,
        *exits.ENDINGS,
        exits.FLIGHT,
        exits.WHOLE,
    }
)


class _Empty(set[Any]):
    """Takes everything, and has nothing."""

    def __contains__(self, _: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _nothing(_: Any) -> Any:
    return lambda *given, **named: None


def _no_context(_: Any) -> Any:
    return contextlib.nullcontext


def _empty(_: Any) -> Any:
    return _Empty()


def _as_one_process(_: Any) -> Any:
    """Return an ``os`` in which every process is this one."""
    names = {name: getattr(os, name) for name in dir(os)}
    return SimpleNamespace(**names | {"getpid": lambda: PARENT})


def _right_here(_: Any) -> Any:
    return lambda body, dropped=None: body()


def _late(copy: Any) -> Any:
    """Copy later: what happens meanwhile gets in."""

    def late(*given: Any) -> Any:
        time.sleep(LATE_S)
        return copy(*given)

    return late


def _claim_of_nobody(_: Any) -> Any:
    """Look for a save in flight, and reserve nothing."""
    handles = import_module("holdfast.saving.handle")
    return lambda place: handles.in_flight() is None


def _swallowing(save: Any) -> Any:
    def swallow(*given: Any, **named: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            return save(*given, **named)

    return swallow


PLANTS: dict[str, Plant] = {
    "a handle knows no process": Plant(
        [("holdfast.saving.handle", "os", _as_one_process)],
        "another process's save|asks for the save",
        ("fork", "asks for the save"),
    ),
    "a pool knows no process": Plant(
        [("holdfast.engine.pool", "os", _as_one_process)],
        "in a forked child|forked child.*saves",
        ("fork", "saves"),
    ),
    "a failed save leaves its files": Plant(
        [("holdfast.saving.save", "discard", _nothing)], "file left", ("failing disk",)
    ),
    "an interrupt is swallowed": Plant(
        [("holdfast", "save", _swallowing)], "swallowed", ("save", "struck")
    ),
    "two threads share one staging pool": Plant(
        [
            ("holdfast.saving.handle", "_claim", _claim_of_nobody),
            ("holdfast.engine.pool", "_lent", _empty),
        ],
        "other bits",
        ("threads", "eager"),
    ),
    "a verb runs in the thread that calls it": Plant(
        [("holdfast.worker", "run", _right_here)],
        r"\bhang|(file|descriptor|thread) left|a later|broke",
        ("save", "injected in waits", "load"),
    ),
    "a body does not ask whether its caller waits": Plant(
        [
            ("holdfast.worker", "check", _nothing),
            ("holdfast.engine.staging", "copy_from_host", _late),
        ],
        "visible with other bits than were saved: step-",
        ("save_async", "Checkpointer", "eager", "struck twice", "injected twice"),
    ),
    "Python ends without a wait": Plant(
        [("holdfast.worker", "_waits", lambda _: [])],
        "last-.* was acknowledged, and is not there|ended with -6, not",
        (exits.FLIGHT, "return", "sys.exit", "unhandled"),
    ),
    "a daemon thread is not stopped at the end": Plant(
        [("holdfast.worker", "_jobs", _empty)], "ended with -6, not", ("daemon saves", exits.WHOLE)
    ),
    "a relative path is one of the working directory": Plant(
        [("holdfast.stores.url", "absolute", lambda _: lambda path, *_: os.fspath(path))],
        "FileNotFoundError|deleted working directory|is not there",
        ("move",),
    ),
    "an interrupted load says nothing of its target": Plant(
        [("holdfast.loading.load", "_saying_what_is_filled", _no_context)],
        "does not say so",
        ("load", "injected", "struck"),
    ),
    "a lazy copy is judged without samples": Plant(
        [
            ("holdfast.engine.staging", "Sampled.compare", _nothing),
            ("holdfast.engine.staging", "copy_held", _late),
        ],
        "other bits than were saved: changed",
        ("numpy", "data"),
    ),
    "torch's modes reach what holdfast computes": Plant(
        [
            ("holdfast.state.ambient", "_disable_current_modes", _no_context),
            ("holdfast.state.ambient", "temporarily_clear_interpreter_stack", _no_context),
            # Modes belong to a thread: they are met where no worker can be had.
            ("holdfast.worker", "_start_worker", lambda _: lambda: False),
        ],
        "ended with -11|TensorWrapper|data pointer",
        ("func.grad",),
    ),
    "targets may share bytes": Plant(
        [("holdfast.state.target", "find_overlaps", lambda _: lambda targets: [])],
        "overlapping targets are filled",
        ("overlap",),
    ),
    "a thread waits for an Event": Plant(
        [("holdfast.worker", "Latch", lambda _: threading.Event)],
        r"\bhang|a later",
        ("save_async", "Checkpointer", "injected in waits"),
    ),
}


def plant(name: str) -> None:
    """Put it into this process, and those that are forked from it."""
    for module_name, dotted, change in PLANTS[name].changes:
        *owners, attribute = dotted.split(".")
        owner: Any = import_module(module_name)
        try:
            for part in owners:
                owner = getattr(owner, part)
            found = getattr(owner, attribute)
        except AttributeError as error:
            raise SystemExit(
                f"the plant '{name}' is stale: {module_name} has no {dotted}; take out what does "
                "its work now"
            ) from error
        setattr(owner, attribute, change(found))
