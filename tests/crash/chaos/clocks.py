"""Clocks that are wrong, in the process of one rank.

Linux has no wall clock of a process's own (time name spaces shift the monotonic one alone), and
that of the machine is not ours to set. So what Python's `time` and `datetime` tell here is wrong,
and with it all that holdfast asks; the times of files stay those of the file system, as they would
on a shared one. The monotonic clock goes on evenly: on no machine does it do otherwise.
"""

import datetime
import random
import time

import holdfast.runs.directory
import holdfast.runs.fence

from .ranks import Prepare

HOUR_S, DAY_S = 3600.0, 86400.0
OFFSETS_S = (0.0, HOUR_S, -HOUR_S, DAY_S, -DAY_S)


def strange_clocks(seed: int) -> Prepare:
    """Return what makes the clock of a rank wrong: by a constant, or another at each look."""

    def prepare(rank: int) -> None:
        rng = random.Random(seed * 100 + rank)
        jumps, constant = rng.random() < 0.5, rng.choice(OFFSETS_S)
        real, real_ns = time.time, time.time_ns

        def offset_s() -> float:
            return rng.choice(OFFSETS_S) if jumps else constant

        class Shifted(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> "datetime.datetime":
                return super().now(tz) + datetime.timedelta(seconds=offset_s())

        time.time = lambda: real() + offset_s()
        time.time_ns = lambda: real_ns() + int(offset_s() * 1e9)
        for module in (holdfast.runs.fence, holdfast.runs.directory):
            module.datetime = Shifted  # type: ignore[attr-defined]

    return prepare
