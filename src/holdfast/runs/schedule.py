"""When a save is due: by steps, by time, or by what saves have cost. Pure, but for its clock.

Knows no ranks and no files. What the clock decides is asked on one rank, and told to the others.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median, median_low
from typing import Literal, TypeVar

from ..arguments import is_positive
from ..errors import OptionError, shown

Every = int | timedelta | Literal["auto"] | None
Result = TypeVar("Result")

RECENT_STEPS = 64
RECENT_SAVES = 5
FREE_STEPS = 3  # between saves of "auto": without any, what a save slows down cannot be seen
UNMEASURED_S = 60.0  # what a save is taken to last until one has been measured
LAST_SAVE_FACTOR = 1.5  # the last save may take so much longer than the longest measured
STEPS_AHEAD = 3  # one to ask, one to be told, one to spare
MARGIN_S = 5.0


def interval_s(cost_s: float, duration_s: float, *, overhead: float, mtbf_s: float | None) -> float:
    """Return the time from the start of a save to the start of the next.

    Long enough that saves take no more than a share of training (C / overhead: the bound of
    CheckFreq, FAST'21), that they do not overlap, and, when failures come every M seconds on
    average, that no more is spent on saves than they save (√(2 C M): Young 1974, Daly 2006).

    Args:
        cost_s: C, what a save costs training.
        duration_s: from the start of a save until it is durable.
    """
    bounds = [cost_s / overhead, duration_s]
    if mtbf_s is not None:
        bounds.append(math.sqrt(2 * cost_s * mtbf_s))
    return max(bounds)


@dataclass(slots=True)
class _Save:
    """A measured save; of the steps taken during it, the number and the time."""

    duration_s: float = 0.0
    stall_s: float = 0.0
    held_s: float = 0.0  # of the stall, what fell into those steps
    steps: int = 0
    steps_s: float = 0.0
    cost_s: float = 0.0  # to training
    free_steps: int = 0  # taken since, while the cost was not settled


class UploadTimes:
    """How long uploads take: their thread measures it, the last save leaves time for its own.

    Attributes:
        limit_s: nobody waits longer for one; 0: nobody waits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.limit_s = 0.0
        self._clock = clock
        self._has_begun = False
        self._began: float | None = None  # the one that is under way
        self._longest_s = 0.0

    def measure(self, upload: Callable[[int], Result], step: int) -> Result:
        """Upload a step, and note how long that took; one that fails says nothing of others."""
        self._has_begun, self._began = True, self._clock()
        try:
            result = upload(step)
            self._longest_s = max(self._longest_s, self._clock() - self._began)
            return result
        finally:
            self._began = None

    def needed_s(self, unmeasured_s: float, *, is_saving: bool) -> float:
        """Return how long it may take until a step that is saved now is up.

        When it is durable on the local disk, the upload of another may just have begun.

        Args:
            unmeasured_s: what an upload is taken to last until one has been measured.
            is_saving: whether a save is in flight, whose step goes up first.
        """
        began = self._began  # once: the thread of uploads may end it meanwhile
        going_s = 0.0 if began is None else self._clock() - began
        longest_s = max(self._longest_s or unmeasured_s, going_s)
        count = 2 if self._has_begun or is_saving else 1
        return min(count * longest_s * LAST_SAVE_FACTOR, self.limit_s)


class Schedule:
    """Counts steps and saves; says when the next save is due.

    Attributes:
        uploads: those of the steps that are saved, where they are saved to a local disk first.
    """

    def __init__(
        self,
        every: Every,
        *,
        overhead: float = 0.03,
        mtbf_s: float | None = None,
        ends_in_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count; see `holdfast.Checkpointer` for what the arguments mean.

        Raises:
            OptionError: an invalid argument.
        """
        _check(every, overhead, mtbf_s, ends_in_s)
        self._every = every
        self._overhead = overhead
        self._mtbf_s = mtbf_s
        self._clock = clock
        self._made = clock()
        self._ends = None if ends_in_s is None else self._made + ends_in_s
        self._began: float | None = None  # the last save
        self._flight: _Save | None = None
        self._saves: deque[_Save] = deque(maxlen=RECENT_SAVES)
        self._longest_s = 0.0  # of all saves
        self._step_ended: float | None = None
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._free_steps_s: deque[float] = deque(maxlen=RECENT_STEPS)  # while none is saved
        self.uploads = UploadTimes(clock)

    @property
    def by_clock(self) -> bool:
        """Whether the clock has a say, so that ranks have to agree."""
        return self._every == "auto" or isinstance(self._every, timedelta) or self._ends is not None

    @property
    def left_s(self) -> float:
        """Time until the job ends; without a known end, for ever."""
        return math.inf if self._ends is None else self._ends - self._clock()

    def due_at(self, step: int) -> bool:
        """Return whether a save is due whatever the clock says: the same on every rank."""
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._every == "auto" and self._began is None  # to measure

    def due_now(self) -> bool:
        """Return whether a save is due by this rank's clock."""
        if isinstance(self._every, timedelta):
            since = self._made if self._began is None else self._began
            return self._clock() - since >= self._every.total_seconds()
        if self._every != "auto" or self._began is None or self._flight is not None:
            return False
        if self._saves and self._saves[-1].free_steps < FREE_STEPS:
            return False
        return self._clock() - self._began >= self.interval_s()

    def next_due(self, step: int) -> tuple[int, float]:
        """Return the step at which the next save is due, or the time of it; for another thread.

        Returns:
            (step, seconds since 1970); -1, 0.0: that is not known.
        """
        if isinstance(self._every, int):
            return (max(step, 0) // self._every + 1) * self._every, 0.0
        if self._every is None or (self._every == "auto" and not self._saves):
            return -1, 0.0
        since = self._made if self._began is None else self._began
        timed = self._every if isinstance(self._every, timedelta) else None
        after_s = self.interval_s() if timed is None else timed.total_seconds()
        return -1, time.time() + max(0.0, since + after_s - self._clock())

    def ending(self) -> bool:
        """Return whether the last save has to begin now, by this rank's clock, to end in time."""
        if self._ends is None:
            return False
        unmeasured_s = min(UNMEASURED_S, (self._ends - self._made) / 10)
        needed_s = (self._longest_s or unmeasured_s) * LAST_SAVE_FACTOR
        if self._flight is not None:
            needed_s *= 2  # the one in flight has to end first
        needed_s += self.uploads.needed_s(unmeasured_s, is_saving=self._flight is not None)
        step_s = median(self._steps_s) if self._steps_s else 0.0
        return self.left_s <= needed_s + STEPS_AHEAD * step_s + MARGIN_S

    def interval_s(self) -> float:
        """Return the time between saves that ``every="auto"`` has come to."""
        if not self._saves:
            return UNMEASURED_S
        # The first save touches new memory, and one of the others may have met an evaluation.
        cost_s = median_low([save.cost_s for save in self._saves])
        duration_s = median_low([save.duration_s for save in self._saves])
        return interval_s(cost_s, duration_s, overhead=self._overhead, mtbf_s=self._mtbf_s)

    def begin_step(self) -> None:
        """Note that training has taken a step since the last `end_step`."""
        if self._step_ended is None:
            return
        taken_s = self._clock() - self._step_ended
        self._steps_s.append(taken_s)
        if self._flight is not None:
            self._flight.steps += 1
            self._flight.steps_s += taken_s
            return
        self._free_steps_s.append(taken_s)
        if self._saves and self._saves[-1].free_steps < FREE_STEPS:
            self._saves[-1].free_steps += 1
            self._saves[-1].cost_s = self._cost_s(self._saves[-1])

    def end_step(self) -> None:
        """Note that training goes on."""
        self._step_ended = self._clock()

    def try_save(self) -> None:
        """Note that a save is tried: one that fails or is skipped is tried again in its time."""
        self._began = self._clock()

    def begin_flight(self) -> None:
        """Note that the save is in flight."""
        self._flight = _Save()

    def measure(self, duration_s: float) -> None:
        """Note how long a save took, from start to durable."""
        self._longest_s = max(self._longest_s, duration_s)

    def end_flight(self, duration_s: float | None, stall_s: float, held_s: float = 0.0) -> None:
        """Note that the save in flight has ended.

        Args:
            duration_s: from start to durable; None: it failed, and says nothing about others.
            stall_s: how long training was held up; ``held_s`` of it in steps taken meanwhile.
        """
        save, self._flight = self._flight, None
        if save is not None and duration_s is not None:
            save.duration_s, save.stall_s, save.held_s = duration_s, stall_s, held_s
            save.cost_s = self._cost_s(save)
            self._saves.append(save)
            self.measure(duration_s)

    def _cost_s(self, save: _Save) -> float:
        """Return what a save cost: the stall, and what it slowed down the steps beside it."""
        if not self._free_steps_s:
            return save.stall_s
        slowed_s = save.steps_s - save.steps * median(self._free_steps_s) - save.held_s
        return save.stall_s + max(0.0, slowed_s)


def _check(every: object, overhead: object, mtbf_s: object, ends_in_s: object) -> None:
    is_steps = type(every) is int and every >= 1
    is_time = isinstance(every, timedelta) and every > timedelta(0)
    if not (every is None or every == "auto" or is_steps or is_time):
        raise OptionError(
            f"every is {shown(every)}; expected a number of steps from 1, a timedelta, "
            '"auto", or None'
        )
    if not is_positive(overhead):
        raise OptionError(
            f"overhead is {shown(overhead)}; expected the share of training time that saves may "
            "cost, such as 0.03"
        )
    for name, value in (("mtbf_s", mtbf_s), ("ends_in_s", ends_in_s)):
        if value is not None and not is_positive(value):
            raise OptionError(
                f"{name} is {shown(value)}; expected a number of seconds above 0, or None"
            )
    if mtbf_s is not None and every != "auto":
        raise OptionError(f'mtbf_s is given, but every is {shown(every)}; it needs every="auto"')
