"""The contenders: each module has `peers()`; an ImportError there says why one is missing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training_state import State


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to save and load a state.

    Attributes:
        settings: what is not its default, in words.
        save: make a checkpoint at a path that does not exist, in a directory that does; when it
            returns, everything is durable, the path's own entry in its directory included.
        load: fill a state of the same shapes in place.
    """

    name: str
    settings: str
    save: Callable[[State, Path], None]
    load: Callable[[Path, State], None]
