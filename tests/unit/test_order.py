"""Positions dealt to readers: each to one of them, whatever happens; shuffled alike for ever."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.permutation import END, EVERYTHING, dealt, left_over, merged, nth, shuffled

checked = settings(max_examples=200, deadline=None, derandomize=True)


def order(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return shuffled(np.arange(size) + size * epoch, size, seed).tolist()


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097, 65536])
def test_an_epoch_has_every_sample_once(size: int) -> None:
    for seed, epoch in [(0, 0), (0, 1), (7, 0), (-3, 5)]:
        assert sorted(order(size, seed, epoch)) == list(range(size))


def test_the_order_never_changes() -> None:
    """Checkpoints say how far it was read: another order would repeat samples and lose others."""
    assert order(10) == [8, 3, 0, 5, 7, 2, 9, 6, 1, 4]
    assert shuffled(np.array([0, 1, 10**12 - 1]) + 3 * 10**12, 10**12, 1234).tolist() == [
        *(394847638387, 586911597703, 164171747788)
    ]


def test_orders_of_seeds_and_epochs_look_random() -> None:
    """Each sample is as often at each place: chi² with 81 degrees of freedom, 5 sigma wide."""
    trials = 4000
    for kind in ("seed", "epoch"):
        table = np.zeros((10, 10))
        for n in range(trials):
            found = order(10, n, 0) if kind == "seed" else order(10, 0, n)
            table[np.arange(10), found] += 1
        chi2 = ((table - trials / 10) ** 2 / (trials / 10)).sum()
        assert abs(chi2 - 81) < 5 * (2 * 81) ** 0.5, kind
    neighbours = np.abs(np.diff(order(100_000)))
    assert abs(neighbours.mean() / 100_000 - 1 / 3) < 0.01


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6).map(
    lambda pairs: merged([*((min(pair), max(pair)) for pair in pairs), (80, END)])
)


@checked
@given(RANGES, st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_what_is_left_is_what_nobody_took(
    ranges: tuple[tuple[int, int], ...], taken: list[int]
) -> None:
    everything = [p for p in range(200) if any(a <= p < b for a, b in ranges)]
    stride = len(taken)
    for n, position in enumerate(everything):
        assert nth(ranges, n) == position
    gone = [
        position
        for s, count in enumerate(taken)
        for position in itertools.islice(dealt(ranges, s, stride), count)
    ]
    assert gone == [p for s, n in enumerate(taken) for p in everything[s::stride][:n]]
    left = left_over(ranges, taken)
    assert left == merged(left) and left[-1][1] == END
    assert Counter(p for a, b in left for p in range(a, min(b, 200))) == Counter(
        set(everything) - set(gone)
    )


def test_readers_in_step_leave_one_range() -> None:
    assert left_over(EVERYTHING, [250] * 4) == ((1000, END),)
    assert left_over(EVERYTHING, [3, 2, 2, 3]) == ((9, 11), (12, END))
