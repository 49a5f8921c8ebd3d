"""What all cases share: two clients, a directory, and turns that processes give each other."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crash_content import State, load_number, make_state
from forked_ranks import OPTIONS

import holdfast
from holdfast.errors import NotCommittedError

from .machine import RUN, Client


@dataclass(frozen=True, slots=True)
class Lab:
    """Two clients, and a directory of this case's own.

    Attributes:
        scale: of the whole campaign; 0.1: a tenth of what it does.
    """

    a: Client
    b: Client
    name: str
    rng: random.Random
    scale: float

    @property
    def root(self) -> Path:
        """Where a process of a client finds this case's directory."""
        return RUN / self.name

    def times(self, count: int) -> int:
        """Return how often something is to be done, of so many times in the whole campaign."""
        return max(1, round(count * self.scale))


Case = Callable[[Lab], str]


class Turn:
    """What one process waits for, and another gives; both are forked from here."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def give(self) -> None:
        """Let the other one go on."""
        os.write(self._writing, b"1")

    def take(self) -> None:
        """Wait until the other one says so."""
        os.read(self._reading, 1)

    def __del__(self) -> None:
        for end in (self._reading, self._writing):
            os.close(end)


def save(
    path: Path, number: int, make: Callable[[int], State] = make_state, *, replace: bool = False
) -> None:
    """Save the state of a number."""
    holdfast.save(make(number), path, options=OPTIONS, replace=replace)


def load(path: Path) -> int:
    """Load a state, and compare every bit."""
    return load_number(path, OPTIONS)


def is_there(path: Path) -> bool:
    """Look for a checkpoint as a user does."""
    try:
        with holdfast.open(path, options=OPTIONS):
            return True
    except NotCommittedError:
        return False


def latest(run: Path) -> int | None:
    """Return the newest step of a run, as a process that has just begun sees it."""
    return holdfast.Checkpointer(run, options=OPTIONS).latest()
