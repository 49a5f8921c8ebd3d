"""The panels of a run's report as HTML and SVG: overview, time, heat map, training.

Knows data and words; not how a page is put together, and no store.
"""

import re
import time
from collections.abc import Iterator, Sequence
from statistics import median

from ..tools.behind import behind_text
from ..tools.text import printable
from .charts import Line, bar_chart, legend, line_chart, stacked_bar, stacked_columns, svg, tip
from .contents import OTHERS
from .data import PHASES, Finding, RunData, Save, Step
from .rules import at_stake, intervals, next_save_bytes, room_bytes, spikes, stall_share, typical
from .words import short, show_age, show_bytes, show_seconds, shown

CHAIN_MAX = 40
PART_STEPS_MAX = 60
METRICS_MAX = 8
SLOWEST_ROWS = 8

Fact = tuple[str, str]
_UNIT = re.compile(r"(\d) ([A-Za-z%µ]+)\b")


def findings(found: Sequence[Finding]) -> str:
    """Say what is wrong, or that nothing is: the first thing on the page."""
    parts = []
    for finding in found:
        advice = f'<p class="advice">{shown(finding.advice)}</p>' if finding.advice else ""
        text = f"<p>{shown(finding.text)}</p>" if finding.text else ""
        parts.append(
            f'<li class="{finding.level}" data-kind="{shown(finding.kind)}">'
            f"<h3>{shown(finding.title)}</h3>{text}{advice}</li>"
        )
    return f'<ul class="findings">{"".join(parts)}</ul>'


def facts(found: Sequence[Fact]) -> str:
    """Show pairs of a label and a value."""
    return (
        '<dl class="facts">'
        + "".join(f"<div><dt>{shown(k)}</dt><dd>{_whole(shown(v))}</dd></div>" for k, v in found)
        + "</dl>"
    )


def _whole(text: str) -> str:
    """Keep numbers and their units on one line."""
    return _UNIT.sub(r"\1&nbsp;\2", text)


def panel(name: str, title: str, body: str, lead: str = "") -> str:
    """Frame one panel; the page's navigation names it."""
    text = f'<p class="lead">{shown(lead)}</p>' if lead else ""
    return f'<section id="{name}"><h2>{shown(title)}</h2>{text}{body}</section>'


def figure(title: str, body: str) -> str:
    """Frame one chart with its title."""
    return f"<figure><figcaption>{shown(title)}</figcaption>{body}</figure>"


def overview(run: RunData) -> str:
    """Show which steps there are, and what is at stake."""
    return panel(
        "overview", "Overview", facts(list(_overview_facts(run))) + _chain(run.steps, run.latest)
    )


def _overview_facts(run: RunData) -> Iterator[Fact]:
    good = [step for step in run.steps if step.state == "committed"]
    saves = [save for save in run.timing.saves if save.verb == "save"]
    size = sum(step.disk_bytes for step in run.steps)
    if good:
        span = good[0].name if len(good) == 1 else f"{good[0].name} to {good[-1].name}"
        more = f" and {run.earlier_steps:,} older" if run.earlier_steps else ""
        yield "Steps kept", f"{len(good):,}{more}: {span}, {show_bytes(size)}"
    retired = run.timing.steps_saved - len(good) - run.earlier_steps
    if retired > 0:
        yield "Steps retired", f"{'at least ' * bool(run.timing.unread_files)}{retired:,}"
    if saves and saves[-1].time:
        newest = saves[-1]
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(newest.time))
        before = run.made - newest.time
        age = (
            f"{show_age(before)} before this report"
            if before >= 0
            else "in the future: a clock is wrong"
        )
        yield "Newest durable", f"step {newest.step}, {made} ({age})"
        yield (
            "A save takes",
            f"{show_seconds(median(s.total_s for s in saves[-20:]))} on {_ranks(newest)}",
        )
        if before >= 0 and (between := intervals(saves[-20:])):
            pause = median(between)
            due = newest.time + pause - run.made
            when = f"due in {show_age(due)}" if due > 0 else f"was due {show_age(-due)} ago"
            yield "Next save", f"{when}, as one came every {show_seconds(pause)}"
    yield "If killed now, lost", at_stake(run)
    if run.behind is not None:
        (line,) = behind_text(run.behind)
        yield "Store", line.removeprefix("behind it: ")
        there = run.behind["uploaded"]
        lost = "all steps" if there is None else f"what is newer than step {there:,}"
        yield "If this disk is lost", lost if run.behind["since"] else "nothing"
    if run.free_bytes is not None:
        needed, room_there = next_save_bytes(run), room_bytes(run) or 0
        room = f", room for {room_there // needed:,} saves" if needed else ""
        yield "Free on the disk", f"{show_bytes(run.free_bytes)}{room}"
    if run.scrubbed:
        yield "Last scrubbed", f"{run.scrubbed} UTC"
    loads = (run.timing.counts or {}).get("load", 0)
    if loads:
        yield "Restores", f"{loads:,}"


def _ranks(save: Save) -> str:
    return f"{save.ranks:,} rank{'s' * (save.ranks != 1)}"


def _chain(steps: Sequence[Step], latest: str | None) -> str:
    """Draw the newest steps: full ones, and deltas with an arrow to their base."""
    if not steps:
        return ""
    shown_steps = steps[-CHAIN_MAX:]
    place = {step.name: 34 + 64 * n for n, step in enumerate(shown_steps)}
    parts = []
    for step in shown_steps:
        x = place[step.name]
        css = "good" if step.state == "committed" else "bad" if step.fault else "pending"
        if step.base in place:
            left = place[step.base]
            rise = min(10 + (x - left) / 64 * 4, 30)
            parts.append(
                f'<path class="arrow" marker-end="url(#head)" d="M{x} 33Q{(x + left) / 2:.0f} '
                f'{33 - rise:.0f} {left + 4} 31"/>'
            )
        codecs = ", ".join(step.codecs) or step.state
        about = f"{step.name}: {show_bytes(step.disk_bytes)}, {codecs}"
        about += f", delta of {step.base}" if step.base else ""
        about += f", {step.fault}" if step.fault else f", {step.state}"
        if step.base:
            parts.append(f'<circle class="step {css} delta" cx="{x}" cy="44" r="9" {tip(about)}/>')
        else:
            parts.append(
                f'<rect class="step {css}" x="{x - 9}" y="35" width="18" height="18" rx="3" '
                f"{tip(about)}/>"
            )
        if css == "bad":
            parts.append(f'<path class="cross" d="M{x - 4} 40l8 8m0-8l-8 8"/>')
        label = str(step.step) if step.step is not None else short(step.name, 9)
        strong = " strong" if step.name == latest else ""
        parts.append(f'<text class="axis middle{strong}" x="{x}" y="72">{shown(label)}</text>')
    head = (
        '<defs><marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" '
        'markerHeight="6" orient="auto"><path class="tip" d="M0 0L6 3L0 6z"/></marker></defs>'
    )
    wide = 64 * len(shown_steps) + 10
    drawn = svg(wide, 80, head + "".join(parts), "steps and their bases", "chain")
    hidden = len(steps) - len(shown_steps)
    title = "Steps" + (f", the newest {len(shown_steps)}" if hidden else "")
    drawn = drawn.replace("<svg ", f'<svg width="{wide}" height="80" ', 1)
    names = legend([("full", "k-full"), ("delta, with its base", "k-delta"), ("damaged", "k-bad")])
    return figure(title, f'<div class="scroll">{drawn}</div>{names}')


def timing(run: RunData) -> str:
    """Show how long saves take, and where the time goes."""
    saves = [save for save in run.timing.saves if save.verb == "save"]
    if not saves:
        text = run.timing.problem or "No save has been measured yet."
        return panel("time", "Time", f'<p class="empty">{shown(text)}</p>')
    usual = typical(saves[-100:])
    parts = [(phase, f"p-{phase}", usual[phase]) for phase in PHASES if usual.get(phase)]
    share = stall_share(saves)
    stall = median(save.stall_s for save in saves)
    lead = f"A save holds up training for {show_seconds(stall)}"
    lead += f", {100 * share:.2g} % of the time between saves." if share is not None else "."
    names = [f"step {save.step}" for save in saves]
    lines = [
        Line("whole save", "l-total", [save.total_s for save in saves]),
        Line("training held up", "l-stall", [save.stall_s for save in saves]),
    ]
    where = stacked_bar(parts, show_seconds, "phases of a typical save")
    keys = legend([(f"{name} {show_seconds(s)}", css) for name, css, s in parts])
    chart = line_chart(names, lines, show_seconds, "seconds of each save")
    chart += legend([("whole save, slowest rank", "l-total"), ("training held up", "l-stall")])
    body = (
        figure(
            "Where the time of a save goes (the longest of any rank, median of the newest 100)",
            where + keys,
        )
        + '<div class="pair">'
        + figure("Every save", chart)
        + figure("Slowest saves", _slowest(saves))
        + "</div>"
        + figure("One save, a row for each rank", '<div id="waterfall"></div>')
    )
    return panel("time", "Time", body, lead)


def _slowest(saves: Sequence[Save]) -> str:
    rows = []
    for save in sorted(saves, key=lambda save: -save.total_s)[:SLOWEST_ROWS]:
        slow = {p: s for p, s in save.phases.items() if p != "wait"}
        phase = max(slow, key=lambda name: slow[name].max_s, default="")
        what = ""
        if phase:
            what = f"{phase} {show_seconds(slow[phase].max_s)}, rank {slow[phase].slowest_rank}"
        rows.append(
            f'<tr><td>{save.step}</td><td class="end">{shown(show_seconds(save.total_s))}</td>'
            f"<td>{shown(what)}</td></tr>"
        )
    head = '<tr><th>step</th><th class="end">seconds</th><th>longest phase</th></tr>'
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def heat(run: RunData) -> str:
    """Leave room for the map of hosts and ranks, which the page's script draws."""
    if not run.timing.heat:
        text = "No save has been measured yet."
        return panel("heat", "Ranks", f'<p class="empty">{shown(text)}</p>')
    count = run.timing.heat_saves
    lead = (
        f"The median of the newest {count:,} save{'s' * (count != 1)}, for each rank and phase. "
        "Stragglers have a border."
    )
    return panel("heat", "Ranks", '<div id="heatmap"></div>', lead)


def training(run: RunData) -> str:
    """Show the metrics that were given at the saves, and where a rollback should go."""
    kept = [step for step in run.steps if step.metrics and step.step is not None]
    if not kept:
        text = 'No metrics. step(…, metrics={"loss": 0.1}) stores some in each checkpoint.'
        return panel("training", "Training", f'<p class="empty">{shown(text)}</p>')
    bad = {spike.metric: spike for spike in spikes(run.steps)}
    names = list(dict.fromkeys(name for step in kept for name in step.metrics))
    figures = []
    for name in sorted(names, key=lambda name: name not in bad)[:METRICS_MAX]:
        steps = [step for step in kept if name in step.metrics]
        places = [f"step {step.step}" for step in steps]
        values = [step.metrics[name] for step in steps]
        spike = bad.get(name)
        mark = None
        title = name
        if spike is not None and spike.back_to is not None:
            mark = next(n for n, step in enumerate(steps) if step.step == spike.back_to)
            title = f"{name}: go back to step {spike.back_to}"
        line = Line(name, "l-total", values)
        drawn = line_chart(
            places, [line], lambda v: f"{v:.4g}", f"{name} at each step", mark, from_zero=False
        )
        figures.append(figure(title, drawn))
    lead = "The metrics of the steps that are kept."
    if len(names) > METRICS_MAX:
        lead += f" {METRICS_MAX} of {len(names):,} are drawn."
    return panel("training", "Training", f'<div class="pair">{"".join(figures)}</div>', lead)


def sizes_over_steps(steps: Sequence[Step]) -> str:
    """Draw the bytes of each step on the disk."""
    names = [step.name if step.step is None else f"step {step.step}" for step in steps]
    values = [float(step.disk_bytes) for step in steps]
    css = {"committed": "bar", "uncommitted": "bar pending"}
    drawn = bar_chart(
        names,
        values,
        lambda v: show_bytes(int(v)),
        "bytes of each step",
        lambda n: css.get(steps[n].state, "bar bad"),
    )
    return figure("Every step on the disk", drawn) + _parts_over_steps(steps)


def _parts_over_steps(steps: Sequence[Step]) -> str:
    """Draw what each part of the state takes in the newest steps: which grows, or shrinks less."""
    drawn = [step for step in steps if step.parts][-PART_STEPS_MAX:]
    if len(drawn) < 2:
        return ""
    names = dict.fromkeys(name for step in reversed(drawn) for name in step.parts)
    ordered = sorted(names, key=lambda name: (name == OTHERS, -drawn[-1].parts.get(name, 0)))
    parts = [
        (printable(name), f"d-{n % 6}", [float(step.parts.get(name, 0)) for step in drawn])
        for n, name in enumerate(ordered)
    ]
    places = [step.name if step.step is None else f"step {step.step}" for step in drawn]
    chart = stacked_columns(
        places, parts, lambda v: show_bytes(int(v)), "bytes stored of each part, by step"
    )
    keys = legend([(f"{short(name, 40)} {show_bytes(int(v[-1]))}", css) for name, css, v in parts])
    return figure("Parts of the newest steps, as stored", chart + keys)
