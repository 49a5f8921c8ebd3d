"""Seconds of many rounds → which settings win, and one screen that says so. Measures nothing."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..options import Options
from .text import columns, printable, screen_size, show_bytes, show_count

Document = dict[str, Any]

FINE_SHARE = 0.95  # of the fastest; what is nearer is not worth a setting, nor sure to be slower
STEADY_SPREAD_MAX = 1.5  # slowest by fastest round of one setting


@dataclass(frozen=True, slots=True)
class Figures:
    """What one contender took in each round.

    Attributes:
        options: of holdfast; None of anything else.
    """

    name: str
    options: Options | None = None
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)

    @property
    def both_s(self) -> float:
        """Seconds of a save and a load, medians; what contenders are compared by."""
        return median(self.save_s) + median(self.load_s)

    @property
    def spread(self) -> float:
        """Seconds of the slowest round by those of the fastest; 1 if all are equal."""
        rounds = [save + load for save, load in zip(self.save_s, self.load_s, strict=True)]
        return max(rounds) / min(rounds)


def fastest(figures: Sequence[Figures]) -> Figures:
    """Return the one whose save and load together take least."""
    return min(figures, key=lambda one: one.both_s)


def conclude(figures: Sequence[Figures], default: Options, size_bytes: int) -> Document:
    """Compare contenders that were measured in the same rounds; say which settings win.

    Args:
        default: what holdfast takes here without being told; one of the contenders has it.
        size_bytes: moved by each contender in each direction.
    """
    ours = [one for one in figures if one.options is not None]
    best, best_of_all = fastest(ours), fastest(figures)
    assert best.options is not None
    (default_one,) = (one for one in ours if one.options == default)
    default_share = best.both_s / default_one.both_s
    spread = max(one.spread for one in ours) if len(best.save_s) > 1 else None
    settings = [
        {
            "name": one.name,
            "options": _chosen(one.options) if one.options else None,
            "default": one is default_one,
            "save_gbps": size_bytes / median(one.save_s) / 1e9,
            "load_gbps": size_bytes / median(one.load_s) / 1e9,
            "share": best_of_all.both_s / one.both_s,
            "save_s": one.save_s,
            "load_s": one.load_s,
        }
        for one in sorted(figures, key=lambda one: one.both_s)
    ]
    return {
        "settings": settings,
        "best": _chosen(best.options),
        "default": _chosen(default),
        "default_share": default_share,
        "default_is_fine": default_share >= FINE_SHARE,
        "spread": spread,
        "steady": spread <= STEADY_SPREAD_MAX if spread else None,  # one round does not tell
    }


def render(document: Document) -> list[str]:
    """Return a document of `bench` as lines: where, the table, what was left out, who wins."""
    rounds = show_count(document["rounds"], "round")
    disk = document["disk"]
    where = [document["path"], f"{disk['file_system']} on {disk['device']}", disk["model"]]
    rows = [("", "save GB/s", "rounds", "load GB/s", "rounds", "of the best")]
    for setting in document["settings"]:
        name = f"{setting['name']}{' (default)' if setting['default'] else ''}"
        save, load = (f"{setting[key]:.2f}" for key in ("save_gbps", "load_gbps"))
        saves, loads = (
            _range(document["size_bytes"], setting[key]) for key in ("save_s", "load_s")
        )
        rows.append((name, save, saves, load, loads, f"{setting['share']:.0%}"))
    return [
        printable(", ".join(fact for fact in where if fact)),
        printable(document["machine"]),
        f"{show_bytes(document['size_bytes'])} saved until durable, and loaded from the disk, not "
        "from memory;",
        f"medians of {rounds}, beside the slowest and the fastest",
        "",
        *columns(rows, right=(1, 2, 3, 4, 5), width=screen_size()[0]),
        *(printable(f"not measured: {name}: {why}") for name, why in document["skipped"].items()),
        "",
        *_verdict(document),
    ]


def _verdict(document: Document) -> list[str]:
    best, share, spread = document["best"], document["default_share"], document["spread"]
    rounds = show_count(document["rounds"], "round")
    # A round of the default may have been as fast as the best one's median.
    may_be_chance = best != document["default"] and (spread is None or share * spread > 1)
    doubt = ", perhaps by chance" if may_be_chance else ""
    lines = [f"Fastest in {rounds}{doubt}: {_call(best)}"]
    if best == document["default"]:
        lines.append("That is the default here: nothing to set.")
    elif document["default_is_fine"]:
        lines.append(f"The default is fine here: it has {share:.0%} of that speed.")
    else:
        lines.append(f"The default here, {_call(document['default'])}, has {share:.0%} of that.")
    if spread is None:
        lines.append("One round does not tell speed from chance; more --rounds do.")
    elif not document["steady"]:
        lines.append(
            f"The disk is not steady: rounds of one setting differ by a factor of {spread:.1f}."
        )
        lines.append("Who is first may be chance; more --rounds tell more.")
    else:
        lines.append(f"Rounds of one setting differ by a factor of {spread:.2f} at most.")
        lines.append("A smaller difference between two settings may be chance.")
    return lines


def _range(size_bytes: int, seconds: Sequence[float]) -> str:
    """Show the rates of the slowest and the fastest round: ``0.81-0.97``."""
    if len(seconds) < 2:
        return ""
    return f"{size_bytes / max(seconds) / 1e9:.2f}-{size_bytes / min(seconds) / 1e9:.2f}"


def _chosen(options: Options) -> Document:
    """Return the settings that were varied."""
    every = dataclasses.asdict(options)
    return {name: every[name] for name in ("io", "block_bytes", "queue_depth")}


def _call(chosen: Document) -> str:
    """Return settings as Python to paste."""
    block = f"{chosen['block_bytes'] >> 20} << 20"
    return f'Options(io="{chosen["io"]}", block_bytes={block}, queue_depth={chosen["queue_depth"]})'
