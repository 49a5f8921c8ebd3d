"""What is wrong with a run, in plain words: pure functions of its data.

Each rule is robust: it compares with the median and the median distance from it (MAD), so that one
slow rank, save or value does not hide itself by moving the mean.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..format.local_room import LOCAL_ROOM
from ..format.measured import FAILURE
from ..format.names import some, step_of
from ..format.stragglers import Straggler, robust, stragglers
from ..format.unfinished import ELSEWHERE
from .data import Finding, HeatRow, RunData, Save, Step
from .words import show_age, show_bytes, show_seconds

STRAGGLERS_MAX = 3  # named in one line
STALL_SHARE_MAX = 0.05
SLOWER_FACTOR = 2.0
COSTS_S_MIN = 0.05  # of a save: what is less costs nobody anything
RECENT_SAVES = 5
SPIKE_SIGMAS = 10.0
SPIKE_FACTOR = 3.0
SPIKE_VALUES_MIN = 4
CLOCKS_S_MAX = 1.0
BEHIND_S_MAX, BEHIND_SAVES = 600.0, 5  # a store is late after both
LEVELS = ("bad", "warn", "note", "good")


@dataclass(frozen=True, slots=True)
class Spike:
    """A metric that left its range, and has not come back."""

    metric: str
    step: int
    value: float
    usual: float
    back_to: int | None


def findings_of(run: RunData) -> list[Finding]:
    """Return what there is to know, the worst first; if nothing is wrong, it says so."""
    found = [
        *_damage(run),
        *_disk(run),  # which is why saves fail, where it is full
        *_failures(run),
        *_behind(run),
        *_training(run),
        *_stragglers(run),
        *_speed(run),
        *_notes(run),
    ]
    if not any(finding.level in ("bad", "warn") for finding in found):
        found.append(_all_well(run))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _all_well(run: RunData) -> Finding:
    good = [step for step in run.steps if step.state == "committed"]
    text = "No straggler, no known damage, room on the disk, and no metric out of its range."
    if not good:
        is_known = not any(step.unfinished == ELSEWHERE for step in run.steps)
        title = "No step is committed yet" if is_known else "The committed steps are unknown"
        return Finding("note", "empty", title, "")
    return Finding("good", "well", "All is well", text)


def _damage(run: RunData) -> Iterator[Finding]:
    broken = [step for step in run.steps if step.state in ("damaged", "unreadable") or step.fault]
    good = [step for step in run.steps if step.state == "committed"]
    for step in reversed(broken[-5:]):
        newest = not any(_number(other) > _number(step) for other in good)
        falls = f" restore() takes {good[-1].name} instead." if newest and good else ""
        word = "cannot be read" if step.state == "unreadable" else "is damaged"
        yield Finding(
            "bad",
            "damage",
            f"{step.name} {word}",
            f"{step.fault or 'Its MANIFEST is damaged'}.{falls}".replace("..", "."),
            f"holdfast repair {run.path}/{step.name}",
        )
    if len(broken) > 5:
        yield Finding("bad", "damage", f"{len(broken) - 5:,} more steps are damaged", "")


def _number(step: Step) -> float:
    number = step.step if step.step is not None else step_of(step.name)
    return number if number is not None else -math.inf


def _failures(run: RunData) -> Iterator[Finding]:
    timing = run.timing
    if not timing.failures:
        return
    newest, count = timing.failures[-1], (timing.counts or {}).get(FAILURE, 0)
    if timing.is_failing:
        yield Finding("bad", "failed", f"The newest save failed: step {newest.step}", newest.error)
        count -= 1
    if count > 0:
        text = "" if timing.is_failing else f"The newest was step {newest.step}: {newest.error}"
        many = "s" * (count != 1)
        yield Finding("note", "failures", f"{count:,} earlier save{many} failed", text)


def _behind(run: RunData) -> Iterator[Finding]:
    if run.behind is None or run.behind["since"] is None:
        return
    waits_s = run.made - run.behind["since"]
    usual = intervals(run.timing.saves)
    is_late = waits_s > max(BEHIND_S_MAX, BEHIND_SAVES * median(usual) if usual else 0.0)
    there = run.behind["uploaded"]
    waiting = some([f"{step:,}" for step in run.behind["waiting"]])
    yield Finding(
        "warn" if is_late else "note",
        "behind",
        f"The store is {show_age(waits_s)} behind this disk",
        ("It has no step yet. " if there is None else f"Its newest step is {there:,}. ")
        + (f"Not there yet: {waiting}." if waiting else ""),
        "Look for events of the kind behind in the log of the job" if is_late else "",
    )


def next_save_bytes(run: RunData) -> int:
    """Estimate what the next save takes on the disk: as much as the largest of the newest."""
    if run.room is not None and run.room.step_bytes:  # other hosts may have further files
        return run.room.step_bytes
    kept = [step.disk_bytes for step in run.steps if step.state == "committed"][-3:]
    saves = [save.stored_bytes for save in run.timing.saves if save.verb == "save"][-3:]
    return max([*kept, *saves], default=0)


def room_bytes(run: RunData) -> int | None:
    """Return what saves may take on the disk; None: not known. A full local disk deletes steps."""
    old_bytes = 0 if run.room is None else run.room.old_bytes
    return None if run.free_bytes is None else run.free_bytes + old_bytes


def _disk(run: RunData) -> Iterator[Finding]:
    needed, room = next_save_bytes(run), room_bytes(run)
    if room is None or not needed:
        return
    advice = "Free space, or keep fewer steps: Keep.latest(n) needs room for n + 1"
    sizes = f"A save takes {show_bytes(needed)}, and {show_bytes(run.free_bytes or 0)} are free"
    if run.room is not None:
        advice = LOCAL_ROOM
        if run.room.old_bytes:
            sizes += f"; old steps of {show_bytes(run.room.old_bytes)} are deleted for it"
    if room < needed:
        title = "The disk is full: the next save has no room"
        yield Finding("bad", "disk", title, f"{sizes}.", advice)
    elif room < 3 * needed and not (run.room is not None and run.room.is_shared):
        count = room // needed
        title = f"The disk has room for {count} more save{'s' * (count != 1)}"
        yield Finding("warn", "disk", title, f"{sizes}.", advice)


def stragglers_of(heat: Sequence[HeatRow]) -> list[Straggler]:
    """Return ranks that stand out in phases, by the rule that alerts have too."""
    return stragglers({row.rank: row.seconds for row in heat})


def _stragglers(run: RunData) -> Iterator[Finding]:
    found = stragglers_of(run.timing.heat)
    if not found:
        return
    worst = [one for one in found if one.rank == found[0].rank]
    others = {one.rank: one.phase for one in reversed(found) if one.rank != worst[0].rank}
    named = ", ".join(f"{r} ({p})" for r, p in [*reversed(others.items())][: STRAGGLERS_MAX - 1])
    more = len(others) - STRAGGLERS_MAX + 1
    named += f" and {more:,} more" if more > 0 else ""
    name = next((row.host for row in run.timing.heat if row.rank == worst[0].rank), "")
    host = f" on {name}" if name else ""
    slow, usual = (sum(getattr(s, name) for s in worst) for name in ("seconds", "median_s"))
    times = f"{slow / usual:.1f}x as long" if usual > 0.001 else "longer"
    verbs = " and ".join(verb_of(one.phase) for one in worst[:2])
    yield Finding(
        "warn",
        "straggler",
        f"Rank {worst[0].rank}{host} is a straggler: it takes {times} to {verbs}",
        f"It takes {show_seconds(slow)}; the median rank takes {show_seconds(usual)}. Every save "
        "waits for it." + (f" Also slow: rank {named}." if named else ""),
        "Check that machine's disk, network and load",
    )


def verb_of(phase: str) -> str:
    """Return what a rank does in a phase."""
    return {"stage": "copy (stage)", "place": "fill tensors (place)"}.get(phase, phase)


def intervals(saves: Sequence[Save]) -> list[float]:
    """Return the times between saves that follow each other, without jumps of the clock."""
    times = [save.time for save in saves if save.verb == "save" and save.time]
    return [b - a for a, b in pairwise(times) if b > a]


def stall_share(saves: Sequence[Save]) -> float | None:
    """Return the share of the time that saves held up training; None: not known."""
    made = [save for save in saves if save.verb == "save"]
    between = intervals(made)
    if len(between) < 2:
        return None
    return median(save.stall_s for save in made) / median(between)


def _speed(run: RunData) -> Iterator[Finding]:
    saves = [save for save in run.timing.saves if save.verb == "save"]
    share = stall_share(saves)
    stall = median(save.stall_s for save in saves) if saves else 0.0
    if share is not None and share > STALL_SHARE_MAX and stall > COSTS_S_MIN:
        yield Finding(
            "warn",
            "stall",
            f"Saves hold up training for {100 * min(share, 1):.0f} % of the time",
            f"A save holds it up for {show_seconds(stall)}.",
            'Use stage="lazy", save less often, or every="auto"',
        )
    recent, before = saves[-RECENT_SAVES:], saves[-10 * RECENT_SAVES : -RECENT_SAVES]
    if len(before) >= RECENT_SAVES:
        now, then = (median(save.total_s for save in part) for part in (recent, before))
        if now > SLOWER_FACTOR * then and now - then > COSTS_S_MIN:
            yield Finding(
                "warn",
                "slower",
                f"Saves have become {now / then:.1f}x slower",
                f"The newest {len(recent)} take {show_seconds(now)}; those before took "
                f"{show_seconds(then)}.",
            )


def spikes(steps: Sequence[Step]) -> list[Spike]:
    """Return metrics whose newest value is not finite, or far from all that came before."""
    found = []
    shown = [step for step in steps if step.step is not None and step.state == "committed"]
    for name in dict.fromkeys(name for step in shown for name in step.metrics):
        series = [(step.step, step.metrics[name]) for step in shown if name in step.metrics]
        bad_from = len(series)
        while bad_from and _is_out(series[bad_from - 1][1], [v for _, v in series[: bad_from - 1]]):
            bad_from -= 1
        if bad_from == len(series):
            continue
        step, value = series[bad_from]
        before = [v for _, v in series[:bad_from] if math.isfinite(v)]
        assert step is not None
        back_to = series[bad_from - 1][0] if bad_from else None
        found.append(Spike(name, step, value, median(before) if before else math.nan, back_to))
    return found


def _is_out(value: float, before: Sequence[float]) -> bool:
    finite = [v for v in before if math.isfinite(v)]
    if not math.isfinite(value):
        return bool(finite)
    if len(finite) < SPIKE_VALUES_MIN:
        return False
    # Training moves metrics, so the step from one value to the next is what is compared.
    moves = [abs(b - a) for a, b in pairwise(finite)]
    middle, spread = robust(moves)
    usual = max(abs(median(finite)), 1e-12)
    move = abs(value - finite[-1])
    return move > middle + SPIKE_SIGMAS * spread and abs(value) > SPIKE_FACTOR * usual


def _training(run: RunData) -> Iterator[Finding]:
    for spike in spikes(run.steps)[:3]:
        usual = "" if math.isnan(spike.usual) else f"; {spike.usual:.4g} is usual"
        back = f"Step {spike.back_to} is the newest before it." if spike.back_to is not None else ""
        yield Finding(
            "bad",
            "training",
            f"{spike.metric} left its range at step {spike.step}",
            f"It is {spike.value:.4g}{usual}. {back}".strip(),
            f"checkpointer.retire_after({spike.back_to}) goes back to it"
            if spike.back_to is not None
            else "",
        )


def _notes(run: RunData) -> Iterator[Finding]:
    timing = run.timing
    if timing.problem:
        yield Finding("note", "metrics", "Times are incomplete", timing.problem)
    if timing.skipped_lines:
        many = timing.skipped_lines != 1
        lines = f"{timing.skipped_lines:,} line{'s' * many}"
        text = "A job was killed while it wrote, or the run is being written."
        yield Finding("note", "torn", f"{lines} of the metrics cannot be used", text)
    if timing.clocks > CLOCKS_S_MAX:
        yield Finding(
            "note",
            "clocks",
            f"Clocks of the machines differ by {show_seconds(timing.clocks)}",
            "Times below are corrected.",
        )
    times = [save.time for save in timing.saves if save.verb == "save"]
    ahead_s = times[-1] - run.made if times else 0.0
    if ahead_s > CLOCKS_S_MAX:
        text = "The clock of the machine that wrote it, or of this one, is wrong."
        title = f"The newest save is dated {show_age(ahead_s)} in the future"
        yield Finding("note", "future", title, text)
    if timing.jumps:
        often = f"{timing.jumps} time{'s' * (timing.jumps != 1)}"
        yield Finding("note", "jumps", f"The clock went backwards {often}", "Saves stay in order.")
    pending = [step for step in run.steps if step.state == "uncommitted"]
    if pending:
        for why in dict.fromkeys(step.unfinished for step in pending):
            names = ", ".join([s.name for s in pending if s.unfinished == why][-3:])
            text = f"{why[:1].upper()}{why[1:]}."
            if why == ELSEWHERE:
                yield Finding("note", "elsewhere", f"{names}: no MANIFEST on this host", text)
                continue
            text += " The next job goes on with it, or removes it."
            yield Finding("note", "uncommitted", f"{names}: not committed", text)
    if timing.unread_files:
        files = f"{timing.unread_files:,} older file{'s' * (timing.unread_files != 1)} of metrics"
        count = f"{sum((timing.counts or {}).values()):,} newest saves and restores"
        yield Finding("note", "unread", f"{files} were not read", f"Times are of the {count}.")
    if run.earlier_steps:
        text = f"The newest {len(run.steps):,} are shown."
        yield Finding("note", "many", f"{run.earlier_steps:,} older steps were not opened", text)


def typical(saves: Sequence[Save]) -> Mapping[str, float]:
    """Return the median of each phase over saves: of their slowest rank."""
    made = [save for save in saves if save.verb == "save"]
    names = dict.fromkeys(phase for save in made for phase in save.phases)
    return {
        phase: median(s.phases[phase].max_s if phase in s.phases else 0.0 for s in made)
        for phase in names
    }


def at_stake(run: RunData) -> str:
    """Say what a crash now would lose."""
    times = {save.step: save.time for save in run.timing.saves if save.verb == "save"}
    good = [step for step in run.steps if step.state == "committed" and step.step is not None]
    if not good:
        return "everything: no step is committed"
    newest = good[-1]
    when = times.get(newest.step or 0, 0.0)
    age = f"{show_age(run.made - when)} of training" if 0 < when <= run.made else "training"
    pending = sum(step.disk_bytes for step in run.steps if step.state == "uncommitted")
    more = f", and {show_bytes(pending)} that are being written" if pending else ""
    return f"{age} since step {newest.step}{more}"
