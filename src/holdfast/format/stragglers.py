"""Which ranks are slower than the others: one rule, for reports and for alerts. Pure.

A rank stands out in a phase of its own work. It is compared with the median of all ranks, and with
their median distance from it (MAD), so that slow ranks do not hide themselves by moving the mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

WORK = ("plan", "stage", "encode", "write", "sync", "read", "place")  # each rank does its own
FACTOR = 1.5  # of the median, at least
SIGMAS = 6.0
LEAST_S = 0.2  # above the median: what is less costs nobody anything
RANKS_MIN = 3  # of two, nobody can tell which is the slow one
MAD_TO_SIGMA = 1.4826  # of a normal distribution

Phases = Mapping[str, float]  # phase → seconds


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that takes longer than the others in one phase."""

    rank: int
    phase: str
    seconds: float
    median_s: float


def typical(saves: Sequence[Mapping[int, Phases]]) -> dict[int, dict[str, float]]:
    """Return the median of each rank and phase, over saves by the same ranks as the newest.

    Args:
        saves: for each rank, the seconds of its phases; the newest save last.
    """
    alike = [ranks for ranks in saves if ranks.keys() == saves[-1].keys()]
    return {
        rank: {
            phase: median(ranks[rank].get(phase, 0.0) for ranks in alike)
            for phase in dict.fromkeys(phase for ranks in alike for phase in ranks[rank])
        }
        for rank in (saves[-1] if saves else ())
    }


def stragglers(ranks: Mapping[int, Phases], factor: float = FACTOR) -> list[Straggler]:
    """Return ranks that stand out in phases: those that cost most first, and so their phases.

    Seconds that are not finite, or below 0, count as none.
    """
    found: list[Straggler] = []
    if len(ranks) < RANKS_MIN:
        return []
    for phase in WORK:
        values = [_seconds(phases.get(phase, 0.0)) for phases in ranks.values()]
        middle, spread = robust(values)
        least = max(factor * middle, middle + max(SIGMAS * spread, LEAST_S))
        found += [
            Straggler(rank, phase, value, middle)
            for rank, value in zip(ranks, values, strict=True)
            if value > least
        ]
    cost: dict[int, float] = {}
    for one in found:
        cost[one.rank] = cost.get(one.rank, 0.0) + _excess(one)
    return sorted(found, key=lambda one: (-cost[one.rank], one.rank, -_excess(one)))


def robust(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the median distance from it as a standard deviation."""
    middle = median(values)
    return middle, MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def _seconds(value: float) -> float:
    return value if 0.0 < value < float("inf") else 0.0  # NaN is in no range


def _excess(straggler: Straggler) -> float:
    return straggler.seconds - straggler.median_s
