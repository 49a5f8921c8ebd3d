"""The demo's results as a picture: loss across kill and resume, and bars of the save times."""

from pathlib import Path
from typing import Any

from .demo_report import gigabytes_per_second
from .demo_results import Losses, Results

# Okabe and Ito's colours, told apart by every kind of colour vision.
GREY, BLUE, ORANGE, GREEN, PURPLE = "#BBBBBB", "#0072B2", "#D55E00", "#009E73", "#CC79A7"
INK = "#333333"


def draw(results: Results, title: str, path: Path) -> bool:
    """Draw to a PNG; return False, and draw nothing, where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(13, 5.6), dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=15, fontweight="bold", color=INK)
    loss, saves = figure.subplots(1, 2, width_ratios=(1.75, 1))
    _draw_losses(loss, results)
    _draw_saves(saves, results)
    for axes in (loss, saves):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=10)
    figure.savefig(path)
    return True


def _draw_losses(axes: Any, results: Results) -> None:
    def line(losses: Losses, **style: Any) -> None:
        axes.plot(list(losses), list(losses.values()), solid_capstyle="round", **style)

    killed_at = results.kill.step if results.kill else max(results.killed, default=0)
    line(results.unbroken, color=GREY, linewidth=9, label="unbroken run")
    line(results.killed, color=BLUE, linewidth=3.2, label="run that is killed")
    line(results.resumed, color=ORANGE, linewidth=1.4, label="resumed run")
    for processes, marker, color in ((1, "D", GREEN), (3, "s", PURPLE)):
        if processes in results.next_losses:
            axes.plot(
                [results.final_step + 1],
                [results.next_losses[processes]],
                linestyle="none",
                marker=marker,
                markersize=13 if processes == 3 else 7,
                markerfacecolor="none" if processes == 3 else color,
                markeredgecolor=color,
                markeredgewidth=2,
                label=f"next step on {processes} process{'es' if processes > 1 else ''}",
            )
    axes.axvspan(results.restored, killed_at, color=ORANGE, alpha=0.08, linewidth=0, zorder=0)
    top = max(results.unbroken.values())
    _mark(axes, killed_at, f"SIGKILL while\nsaving step {killed_at}", BLUE, "left", top)
    _mark(axes, results.restored, f"restored\nfrom step {results.restored}", ORANGE, "right", top)
    axes.set_xlabel("training step", fontsize=11, color=INK)
    axes.set_ylabel("loss, nats per byte", fontsize=11, color=INK)
    axes.set_title("Loss across kill and resume", fontsize=12, loc="left", color=INK)
    # Half way up: the labels of the two moments are above, and by then the loss is below.
    axes.legend(
        fontsize=10,
        labelcolor=INK,
        loc="center right",
        edgecolor="none",
        framealpha=1,
        borderpad=0.8,
    )


def _mark(axes: Any, step: int, text: str, color: str, side: str, top: float) -> None:
    """Draw a dashed line at a step, with its text at the given side."""
    axes.axvline(step, color=color, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        text,
        (step, top),
        xytext=(6 if side == "left" else -6, 0),
        textcoords="offset points",
        ha=side,
        va="top",
        fontsize=10,
        color=color,
    )


def _draw_saves(axes: Any, results: Results) -> None:
    timings = sorted(results.timings, key=lambda timing: timing.median_s, reverse=True)
    names = [timing.name for timing in timings]
    seconds = [timing.median_s for timing in timings]
    below = [timing.median_s - min(timing.seconds) for timing in timings]
    above = [max(timing.seconds) - timing.median_s for timing in timings]
    colors = [BLUE if name.startswith("holdfast") else GREY for name in names]
    whiskers = {"ecolor": INK, "elinewidth": 1.2, "capsize": 4}
    axes.barh(names, seconds, color=colors, height=0.62, xerr=[below, above], error_kw=whiskers)
    for row, timing in enumerate(timings):
        speed = gigabytes_per_second(timing, results)
        text = f"{timing.median_s:.3f} s\n{speed:.2f} GB/s"
        axes.annotate(
            text,
            (max(timing.seconds), row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color=INK,
        )
    axes.set_xlim(0, max(max(timing.seconds) for timing in timings) * 1.28)
    axes.set_xlabel(
        "seconds until durable: median, fastest and slowest",
        fontsize=11,
        color=INK,
    )
    axes.set_title(
        f"Saving {results.state_bytes / 1e6:.0f} MB durably: shorter is better",
        fontsize=12,
        loc="left",
        color=INK,
    )
