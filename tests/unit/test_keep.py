"""Which steps a retention policy keeps: pure, steps and metrics in, steps out."""

import math

import pytest

from holdfast import Keep
from holdfast.errors import OptionError

STEPS = [100, 200, 300, 1000, 1100]
LOSSES = {100: 3.0, 200: 1.0, 300: math.nan, 1000: 1.0, 1100: 2.0}
METRICS = {step: {"loss": loss} for step, loss in LOSSES.items()}

POLICIES: list[tuple[Keep, set[int]]] = [
    (Keep.all(), set(STEPS)),
    (Keep.latest(1), {1100}),
    (Keep.latest(3), {300, 1000, 1100}),
    (Keep.latest(99), set(STEPS)),
    (Keep.every(500), {1000, 1100}),
    (Keep.every(7), {1100}),
    (Keep.latest(2) | Keep.every(100), set(STEPS)),
    (Keep.latest(2) | Keep.every(200), {200, 1000, 1100}),
    (Keep.latest(1) | Keep.all(), set(STEPS)),
    (Keep.all() | Keep.latest(1), set(STEPS)),
    (Keep.best("loss", 1), {1000, 1100}),  # of equal losses the newer is better
    (Keep.best("loss", 2), {200, 1000, 1100}),
    (Keep.best("loss", 1, mode="max"), {100, 1100}),
    (Keep.best("loss", 9), {100, 200, 1000, 1100}),  # NaN is never best
    (Keep.best("accuracy", 2), {1100}),  # what no step has, keeps no step
    (Keep.best("loss", 1) | Keep.latest(2) | Keep.every(100), set(STEPS)),
]


@pytest.mark.parametrize(("policy", "kept"), POLICIES, ids=[repr(policy) for policy, _ in POLICIES])
def test_a_policy_keeps_what_it_says_and_always_the_newest(policy: Keep, kept: set[int]) -> None:
    assert policy.kept(STEPS, METRICS) == kept
    assert policy.kept([], METRICS) == set()
    assert policy.kept([5], {}) == {5}


def test_a_policy_knows_its_metrics_and_shows_itself() -> None:
    policy = Keep.latest(3) | Keep.best("loss", 2) | Keep.best("f1", 1, mode="max")
    assert policy.metrics == {"loss", "f1"}
    expected = "Keep.latest(3) | Keep.best('loss', 2, mode='min') | Keep.best('f1', 1, mode='max')"
    assert repr(policy) == expected
    assert repr(Keep.all()) == "Keep.all()"


@pytest.mark.parametrize("count", [0, -1, 1.0, "1", True, None])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    for make in (Keep.latest, Keep.every, lambda n: Keep.best("loss", n)):
        with pytest.raises(OptionError, match="expected an integer from 1"):
            make(count)
    with pytest.raises(OptionError, match="expected one of min, max"):
        Keep.best("loss", 1, mode="lowest")


@pytest.mark.parametrize("metric", [None, 1, ["loss"], b"loss"])
def test_a_metric_is_given_by_its_name(metric: str) -> None:
    with pytest.raises(OptionError, match=r"^metric is .*expected the name of a metric"):
        Keep.best(metric, 1)


def test_policies_that_are_joined_otherwise_are_refused() -> None:
    with pytest.raises(OptionError, match=r"expected Keep \| Keep"):
        Keep.latest(1) & Keep.every(2)
    with pytest.raises(OptionError, match=r"expected Keep \| Keep"):
        Keep.latest(1) | 3  # type: ignore[operator]
