"""Which step goes up next, and which stay on the local disk. Pure: steps in, steps out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .retention import Keep, Metrics


@dataclass(frozen=True, slots=True)
class Tiers:
    """What is where.

    Attributes:
        local: committed steps of the local disk, ascending.
        store: those of the store.
        metrics: of the steps, where the policy looks at them.
        bases: of each local delta, the step that it is made from.
    """

    local: Sequence[int]
    store: Sequence[int]
    metrics: Metrics
    bases: Mapping[int, int]


def wanted(tiers: Tiers, keep: Keep) -> list[int]:
    """Return the local steps that the store lacks and the policy keeps, newest first.

    As soon as a newer step is there that makes the policy let go of one, it is no longer wanted.
    """
    every = sorted({*tiers.local, *tiers.store})
    missing = keep.kept(every, tiers.metrics) & set(tiers.local) - set(tiers.store)
    return sorted(missing, reverse=True)


def lasting(tiers: Tiers, keep: Keep) -> list[int]:
    """Return those of `wanted` that the policy keeps however many newer ones come.

    None, if it keeps every step: then none is worth more than another.
    """
    every = sorted({*tiers.local, *tiers.store})
    stay = keep.lasting(every, tiers.metrics)
    return [step for step in wanted(tiers, keep) if step in stay]


def spared(tiers: Tiers, keep: Keep) -> set[int]:
    """Return the steps of the store that stay, though the policy of its steps alone lets them go.

    The policy keeps them among all steps of both, or what is still to go up is made from them. Else
    they would go up again, for ever.
    """
    stay = keep.kept(sorted({*tiers.local, *tiers.store}), tiers.metrics)
    for step in wanted(tiers, keep):
        while (base := tiers.bases.get(step)) is not None:
            stay, step = stay | {base}, base
    return stay & set(tiers.store)


def next_up(tiers: Tiers, keep: Keep) -> int | None:
    """Return the step that goes up next: the newest, but no delta before its base.

    A step that lasts goes first when the store has a newer one: else it might wait for ever.
    """
    newest = max(tiers.store, default=-1)
    passed = [step for step in lasting(tiers, keep) if step < newest]
    for step in (*passed, *wanted(tiers, keep)):
        while (base := tiers.bases.get(step)) is not None and base not in tiers.store:
            if base not in tiers.local:
                break  # it never can
            step = base
        else:
            return step
    return None


def wait_s(age_s: float, interval_s: float, took_s: float) -> float:
    """Return how long an upload of the newest step waits for the next step, to upload that one.

    Where uploads take longer than the interval, one ends at any time between two saves. If the next
    save is nearer than the last one, its step is worth the wait: the step in the store is then
    replaced a little later, by one that is newer by a whole interval. Where uploads are faster, a
    step goes up as soon as it is saved, and there is nothing to win.

    Args:
        age_s: since the newest step was saved.
        interval_s: between that save and the one before it; 0: there was none.
        took_s: the last upload; 0: there was none.

    Returns:
        0: the upload begins now. Never more than three quarters of the interval: a save that is
        later than by a quarter of it is not waited for.
    """
    is_worth_it = interval_s < took_s and age_s > interval_s / 2
    return max(0.0, interval_s * 5 / 4 - age_s) if is_worth_it else 0.0


def stays(tiers: Tiers, keep: Keep, going_up: int | None, *, is_full: bool) -> set[int]:
    """Return the steps that stay on the local disk; the bases of deltas stay besides.

    The newest `Keep.local`, as many of the newest that wait for their upload, as many of those that
    last (`lasting`), and the one that is going up. So there are at most three times `Keep.local`,
    and two, where one is being written.

    Args:
        is_full: the disk has no room for another step: those that wait make room.
    """
    count = 1 if is_full else keep.local_steps
    kept = set(tiers.local[-count:]) | ({going_up} if going_up is not None else set())
    if is_full:
        return kept
    return kept.union(wanted(tiers, keep)[:count], lasting(tiers, keep)[:count])
