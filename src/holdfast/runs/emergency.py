"""The state to save when training fails, and whether all ranks can. Knows no files.

An optimizer that has begun a step may have changed a part of the parameters, on some ranks; until
then they are those of the step before.
"""

import time
from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import PeerError, StateError
from ..group.base import Group
from ..group.phase import Phase
from ..state.steps import before_any_step
from .signals import SignalWatch

MEETING_S = 25.0  # with the coordinator's last word, nobody waits for 30 s for ranks that go on


class Beside(Protocol):
    """What runs in a thread of its own beside training."""

    def end(self) -> None:
        """Let the thread end soon."""

    def close(self) -> None:
        """Do as `end`, and wait for it for a bounded time."""


class LastState:
    """The state last given to `step`, while no optimizer of torch has begun another step.

    Attributes:
        step: whose state it is.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._state: Mapping[Any, Any] = {}
        self._is_changed = False
        self._end = before_any_step(self._note)

    def take(self, step: int, state: Mapping[Any, Any]) -> None:
        """Take the state of a step."""
        self.step, self._state, self._is_changed = step, state, False

    def give(self) -> tuple[int, Mapping[Any, Any]]:
        """Return the step and its state.

        Raises:
            StateError: there is none, or it is not that of the step any more.
        """
        if self.step is None:
            raise StateError("there is no state of a step: step() was not called, or restore() was")
        if self._is_changed:
            raise StateError(f"an optimizer has changed the state since step {self.step}")
        return self.step, self._state

    def forget(self) -> None:
        """Let go of the state: something else is going to change it."""
        self.step, self._state = None, {}

    def close(self) -> None:
        """Let go of the state, and of the optimizers."""
        self.forget()
        self._end()

    def _note(self) -> None:
        self._is_changed = True


def meet(ranks: Group, number: int, last: LastState) -> tuple[int, Mapping[Any, Any]]:
    """Return what `LastState.give` does when all ranks give the same step.

    Args:
        number: new for every use, the same on all ranks; 0: there is none yet.

    Raises:
        StateError: this rank cannot, or the ranks are at different steps.
        PeerError: another rank cannot, or has not come in time: it has not failed.
    """
    if ranks.world_size == 1:
        return last.give()
    if number == 0:
        cause = "step() was called less than twice, and the ranks cannot meet before"
        raise PeerError(cause, rank=-1, cause=cause)
    with Phase(ranks.background(f"emergency/{number}", time.monotonic() + MEETING_S)) as met:
        step, state = last.give()
        met.answer = str(step).encode()
    if len(set(met.answers)) > 1:
        steps = ", ".join(sorted({answer.decode() for answer in met.answers}))
        raise StateError(f"the ranks are at different steps, {steps}; expected the same step")
    return step, state


def release(watch: SignalWatch, last: LastState | None, *ended: Beside) -> None:
    """Stop watching for signals, and for steps of optimizers, and end what runs beside."""
    for one in ended:
        one.end()
    if last is not None:
        last.close()
    watch.close()
