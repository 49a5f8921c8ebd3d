"""Faults planted in the library: each takes out one thing that keeps a process safe.

The campaign has to notice each within some episodes. A name that is gone is an error: the plant is
then stale. Where a mend lands that a process depends on, a plant that takes it out belongs here.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

Change = tuple[str, str, Callable[[Any], Any]]  # module, name in it, what replaces what it finds


@dataclass(frozen=True)
class Plant:
    """What is changed, and what the campaign then says."""

    changes: list[Change]
    shows: str  # a regular expression: other faults may be there too


PARENT = os.getpid()


def _nothing(_: Any) -> Any:
    return lambda *given, **named: None


def _as_one_process(_: Any) -> Any:
    """Return an ``os`` in which every process is this one."""
    names = {name: getattr(os, name) for name in dir(os)}
    return SimpleNamespace(**names | {"getpid": lambda: PARENT})


def _swallowing(save: Any) -> Any:
    def swallow(*given: Any, **named: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            return save(*given, **named)

    return swallow


PLANTS: dict[str, Plant] = {
    "a handle knows no process": Plant(
        [("holdfast._handle", "os", _as_one_process)], "another process's save|asks for the save"
    ),
    "a pool knows no process": Plant(
        [("holdfast.engine.pool", "os", _as_one_process)], "in a forked child|forked child.*saves"
    ),
    "a failed save leaves its files": Plant([("holdfast._save", "discard", _nothing)], "file left"),
    "an interrupt is swallowed": Plant([("holdfast", "save", _swallowing)], "swallowed"),
}


def plant(name: str) -> None:
    """Put it into this process, and those that are forked from it."""
    for module_name, attribute, change in PLANTS[name].changes:
        module = import_module(module_name)
        setattr(module, attribute, change(getattr(module, attribute)))
