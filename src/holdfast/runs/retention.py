"""Which checkpoints of a run are kept. Pure: steps and metrics in, steps out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import OptionError, shown

Metrics = Mapping[int, Mapping[str, float]]  # by step
_Rule = Callable[[Sequence[int], Metrics], set[int]]

LOCAL_STEPS = 2  # what a Checkpointer keeps on its local disk, unless `Keep.local` says otherwise


@dataclass(frozen=True, slots=True)
class _Latest:
    """The rule of `Keep.latest`."""

    count: int

    def __call__(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        return set(steps[-self.count :])


@dataclass(frozen=True, slots=True)
class Keep:
    """A retention policy: which checkpoints of a run are kept after each save.

    Policies are joined with ``|``: a step is kept if any of them keeps it. The newest step is
    always kept, and so are the bases of kept delta checkpoints (`holdfast.codecs.Delta`).

    A policy of your own is ``Keep((rule,), text, metrics)``. ``rule(steps, metrics)`` takes
    ascending steps and the metrics of each, and returns the steps to keep.

    Args:
        rules: functions; a step is kept if one of them returns it.
        text: what the policy is called: the same on all ranks.
        metrics: names of the metrics that the rules use.
        bests: metric and mode of each `Keep.best`.
        intervals: number of steps of each `Keep.every`.
        local_count: number of steps of `Keep.local`; 0: it is not given.

    Raises:
        OptionError: an invalid count, metric or mode.

    Example::

        keep = holdfast.Keep.latest(3) | holdfast.Keep.every(1000) | holdfast.Keep.best("loss", 2)
        everything = holdfast.Keep.all()
    """

    rules: tuple[_Rule, ...] = ()
    text: str = "Keep.all()"
    metrics: frozenset[str] = frozenset()
    bests: tuple[tuple[str, str], ...] = ()
    intervals: tuple[int, ...] = ()
    local_count: int = 0

    def __or__(self, other: "Keep") -> "Keep":
        """Keep what either policy keeps."""
        if not isinstance(other, Keep):
            raise OptionError(f"a Keep | {shown(other)} is invalid; expected Keep | Keep")
        text = f"{self.text} | {other.text}"
        local = max(self.local_count, other.local_count)
        if self._is_local and other._is_local:
            return Keep.local(local)
        if self._is_local or other._is_local:  # it says nothing of what the store keeps
            one = other if self._is_local else self
            return replace(one, text=text, local_count=local)
        if not self.rules or not other.rules:
            return Keep(text=text, local_count=local) if local else Keep()
        metrics, best = self.metrics | other.metrics, self.bests + other.bests
        intervals = self.intervals + other.intervals
        return Keep(self.rules + other.rules, text, metrics, best, intervals, local)

    def __and__(self, other: object) -> "Keep":
        raise OptionError("Keep & Keep is invalid; expected Keep | Keep: what either keeps is kept")

    def __repr__(self) -> str:
        return self.text

    @staticmethod
    def all() -> "Keep":
        """Return the policy that keeps every checkpoint."""
        return Keep()

    @staticmethod
    def latest(count: int) -> "Keep":
        """Return the policy that keeps the newest ``count`` checkpoints.

        Raises:
            OptionError: the count is not an integer above 0.
        """
        _positive("Keep.latest", count)
        return Keep((_Latest(count),), f"Keep.latest({count})")

    @staticmethod
    def every(steps: int) -> "Keep":
        """Return the policy that keeps the checkpoints whose step is a multiple of ``steps``.

        Raises:
            OptionError: ``steps`` is not an integer above 0.
        """
        _positive("Keep.every", steps)
        rule = lambda known, _: {s for s in known if s % steps == 0}  # noqa: E731
        return Keep((rule,), f"Keep.every({steps})", intervals=(steps,))

    @staticmethod
    def best(metric: str, count: int, *, mode: str = "min") -> "Keep":
        """Return the policy that keeps the ``count`` checkpoints with the best metric.

        A checkpoint without this metric, or with NaN, is not kept by this policy. Of equal values
        the newer is better. A call that saves and is not given the metric raises an OptionError.
        Saves for a signal or an exception record NaN.

        Args:
            metric: name of a metric that is given to `Checkpointer.step`.
            count: number of checkpoints.
            mode: "min" if smaller is better, "max" if larger is.

        Raises:
            OptionError: an invalid count, metric or mode.
        """
        _positive("Keep.best", count)
        if not isinstance(metric, str):
            raise OptionError(
                f'metric is {shown(metric)}; expected the name of a metric, such as "loss"'
            )
        if mode not in ("min", "max"):
            raise OptionError(f"mode is {shown(mode)}; expected one of min, max")
        sign = 1 if mode == "min" else -1

        def rule(steps: Sequence[int], metrics: Metrics) -> set[int]:
            values = {s: metrics.get(s, {}).get(metric, math.nan) for s in steps}
            known = [s for s in steps if not math.isnan(values[s])]
            return set(sorted(known, key=lambda s: (sign * values[s], -s))[:count])

        text = f"Keep.best({metric!r}, {count}, mode={shown(mode)})"
        return Keep((rule,), text, frozenset({metric}), ((metric, mode),))

    @staticmethod
    def local(count: int) -> "Keep":
        """Return how many of the newest checkpoints stay on the local disk of a Checkpointer.

        By itself it keeps all in the store; join it with a policy, which is that of the store.

        Raises:
            OptionError: the count is not an integer above 0.
        """
        _positive("Keep.local", count)
        return Keep(text=f"Keep.local({count})", local_count=count)

    @property
    def local_steps(self) -> int:
        """How many of the newest steps stay on the local disk, where there is one."""
        return self.local_count or LOCAL_STEPS

    @property
    def _is_local(self) -> bool:
        return self.text == f"Keep.local({self.local_count})"

    @property
    def keeps_all(self) -> bool:
        """True if the policy keeps every checkpoint."""
        return not self.rules

    @property
    def is_latest(self) -> bool:
        """True if nothing but `Keep.latest` keeps a checkpoint: newer ones replace each."""
        return bool(self.rules) and all(isinstance(rule, _Latest) for rule in self.rules)

    def kept(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        """Return which of ``steps`` (ascending) are kept, given the ``metrics`` of each."""
        if not self.rules or not steps:
            return set(steps)
        return {steps[-1]} | self.ruled(steps, metrics)

    def lasting(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        """Return those that another rule than `Keep.latest` keeps: newer ones replace none."""
        lasting = (rule for rule in self.rules if not isinstance(rule, _Latest))
        return set[int]().union(*(rule(steps, metrics) for rule in lasting))

    def ruled(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        """Return which steps the rules keep; the newest is kept besides."""
        return set[int]().union(*(rule(steps, metrics) for rule in self.rules))


def _positive(what: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(f"{what} is given {shown(value)}; expected an integer from 1")
