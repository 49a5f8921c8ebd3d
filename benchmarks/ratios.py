"""Seconds of shuffled rounds → medians and ratios paired round by round. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

Rounds = Sequence[float]  # seconds, one for each round
Quartiles = tuple[float, float]  # 25 % and 75 %


@dataclass(frozen=True, slots=True)
class Ratio:
    """A contender's rate as a share of the limit's.

    Attributes:
        paired: median of the ratios of the two rates in the same round.
        quartiles: of those ratios.
        to_best: the same median, against whichever fio setting was fastest in each round. It asks
            more than the limit: one chance against the best of several.
    """

    paired: float
    quartiles: Quartiles
    to_best: float


@dataclass(frozen=True, slots=True)
class Row:
    """One contender's result in one direction.

    Attributes:
        seconds: median over the rounds.
        quartiles: of the seconds.
        gbps: 10^9 bytes a second at the median.
        ratio: to the limit; None where there is none.
    """

    name: str
    seconds: float
    quartiles: Quartiles
    gbps: float
    ratio: Ratio | None


def rows(
    seconds: Mapping[str, Rounds], size_bytes: Mapping[str, int], limits: Sequence[str]
) -> list[Row]:
    """Summarise one direction, fastest first.

    Args:
        seconds: for each contender, the seconds of each round; all have the same rounds.
        size_bytes: what each moved in a round.
        limits: names of the contenders that are settings of fio; the one with the smallest median
            is the limit.
    """
    rates = {
        name: [size_bytes[name] / taken for taken in rounds] for name, rounds in seconds.items()
    }
    fastest = min(limits, key=lambda name: median(seconds[name]), default=None)
    best = [max(of_round) for of_round in zip(*(rates[name] for name in limits), strict=True)]
    found = [
        Row(
            name=name,
            seconds=median(rounds),
            quartiles=quartiles(rounds),
            gbps=size_bytes[name] / median(rounds) / 1e9,
            ratio=None if fastest is None else _ratio(rates[name], rates[fastest], best),
        )
        for name, rounds in seconds.items()
    ]
    return sorted(found, key=lambda row: -row.gbps)


def limit_of(found: Sequence[Row], limits: Sequence[str]) -> Row | None:
    """Return the row of the limit: the fio setting with the smallest median."""
    return next((row for row in found if row.name in limits), None)


def table(found: Sequence[Row], limits: Sequence[str]) -> str:
    """Return the rows as a Markdown table."""
    limit = limit_of(found, limits)
    lines = [
        "| | median s (quartiles) | GB/s | of the limit (quartiles) | of each round's best fio |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        name = f"{row.name}, the limit" if row is limit else row.name
        cells = [name, f"{row.seconds:.3f} ({_span(row.quartiles, 3)})", f"{row.gbps:.2f}"]
        if row.ratio is None:
            cells += ["", ""]
        else:
            paired = f"{row.ratio.paired:.2f} ({_span(row.ratio.quartiles, 2)})"
            cells += [paired, f"{row.ratio.to_best:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_sizes(by_size: Mapping[str, Sequence[Row]], limits: Sequence[str]) -> str:
    """Return rows of several sizes as one Markdown table, fastest at the last size first."""
    heads = [f"{size}: GB/s | of the limit (quartiles)" for size in by_size]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + 2 * len(by_size)) + "|"]
    tables = list(by_size.values())
    for name in dict.fromkeys(row.name for found in reversed(tables) for row in found):
        cells = [name]
        for found in tables:
            row = next((row for row in found if row.name == name), None)
            cells += ["", ""] if row is None else [f"{row.gbps:.2f}", _share(row, found, limits)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(row: Row, found: Sequence[Row], limits: Sequence[str]) -> str:
    if row.ratio is None:
        return ""
    if row is limit_of(found, limits):
        return "the limit"
    return f"{row.ratio.paired:.2f} ({_span(row.ratio.quartiles, 2)})"


def _ratio(rates: Rounds, limit: Rounds, best: Rounds) -> Ratio:
    paired = [mine / other for mine, other in zip(rates, limit, strict=True)]
    to_best = [mine / other for mine, other in zip(rates, best, strict=True)]
    return Ratio(median(paired), quartiles(paired), median(to_best))


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the 25 % and 75 % quantiles."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def _span(quartiles: Quartiles, digits: int) -> str:
    low, high = quartiles
    return f"{low:.{digits}f} to {high:.{digits}f}"
