"""Faults planted in the library: each takes out one thing that keeps a process safe.

A plant is a list of (module, name of what stands there, what stands there instead). The campaign
has to notice each within some episodes. A name that is gone is an error: the plant is then stale.
"""

import contextlib
import os
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

Plant = list[tuple[str, str, Callable[[Any], Any]]]

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
    "a handle knows no process": [("holdfast._handle", "os", _as_one_process)],
    "a pool knows no process": [("holdfast.engine.pool", "os", _as_one_process)],
    "a failed save leaves its files": [("holdfast._save", "discard", _nothing)],
    "an interrupt is swallowed": [("holdfast", "save", _swallowing)],
}


def plant(name: str) -> None:
    """Put it into this process, and those that are forked from it."""
    for module_name, attribute, change in PLANTS[name]:
        module = import_module(module_name)
        setattr(module, attribute, change(getattr(module, attribute)))
