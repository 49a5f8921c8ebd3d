"""A run's data → a document for `--json`, the data that the page's script draws, and the page."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..tools.text import printable
from . import content_panels, panels
from .data import PHASES, RankRecord, RunData, Save, Span
from .metrics import FULL_SAVES
from .page import page
from .rules import stragglers_of
from .words import show_seconds

Document = dict[str, Any]

ROWS_MAX = 256  # ranks in one waterfall; of more, the slowest and some between
SPANS_WANTED = 60_000  # in all waterfalls; else the spans of one phase are joined


def document_of(run: RunData) -> Document:
    """Return everything as values of JSON; a number that is not finite is null."""
    found: Document = {"kind": "report"} | _plain(asdict(run))
    found["stragglers"] = [asdict(straggler) for straggler in stragglers_of(run.timing.heat)]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def page_of(run: RunData) -> str:
    """Return the report as HTML."""
    over_steps = panels.sizes_over_steps(run.steps) if run.steps else ""
    sections = [
        ("overview", "Overview", panels.overview(run)),
        ("time", "Time", panels.timing(run)),
        ("heat", "Ranks", panels.heat(run)),
        ("size", "Size", content_panels.sizes(run.contents, over_steps)),
        ("shards", "Shards", content_panels.shards(run.contents)),
        ("training", "Training", panels.training(run)),
    ]
    return page(
        kind="Checkpoints of a run",
        heading=run.path,
        found=run.findings,
        sections=sections,
        data=_drawn(run),
        made=run.made,
    )


def _drawn(run: RunData) -> Document:
    """Return what the script draws: waterfalls, and the map of ranks."""
    heat = run.timing.heat
    hosts = list(dict.fromkeys(row.host for row in heat))
    full = [save for save in run.timing.saves if save.records]
    hosts += list(dict.fromkeys(r.host for s in full for r in s.records if r.host not in hosts))
    place = {host: n for n, host in enumerate(hosts)}
    phases = [p for p in PHASES if any(row.seconds.get(p) for row in heat)]
    slow = stragglers_of(heat)
    first = phases.index(slow[0].phase) if slow else 0
    if not slow and phases:
        first = max(
            range(len(phases)), key=lambda n: sum(r.seconds.get(phases[n], 0) for r in heat)
        )
    mesh = run.contents.mesh if run.contents else None
    is_mesh = mesh is not None and math.prod(mesh["shape"]) == len(heat) and len(mesh["shape"]) > 1
    rows = [
        [
            row.rank,
            place[row.host],
            row.local_rank,
            [float(f"{row.seconds.get(phase, 0.0):.4g}") for phase in phases],
        ]
        for row in heat
    ]
    by_time = sorted(full, key=lambda save: -save.total_s)
    spans = sum(len(record.spans) for save in full for record in save.records[:ROWS_MAX])
    return {
        "phases": list(PHASES),
        "hosts": [printable(host) for host in hosts],
        "heat": {
            "phases": phases,
            "first": first,
            "rows": rows if phases else [],
            "slow": [[s.rank, phases.index(s.phase)] for s in slow],
            "mesh": _named(mesh) if is_mesh else None,
        },
        "waterfalls": [
            _waterfall(save, place, by_time.index(save), joins=spans > SPANS_WANTED)
            for save in reversed(full)
        ],
    }


def _named(mesh: Any) -> Document:
    return {
        "names": [printable(str(name)) for name in mesh["names"]],
        "shape": [int(size) for size in mesh["shape"]],
    }


def _waterfall(save: Save, place: dict[str, int], slowness: int, *, joins: bool) -> Document:
    records = _chosen(save.records)
    rows: list[list[Any]] = []
    commit = min((s.start_s for r in records for s in r.spans if s.phase == "commit"), default=None)
    for record in records:
        spans = [*record.spans]
        own_end = max((span.end_s for span in spans), default=0.0)
        if commit is not None and own_end < commit:  # others wait until rank 0 commits
            spans.append(Span("wait", own_end, commit, 0))
        spans = _joined(spans) if joins else spans
        flat: list[int] = []
        # What overlaps is drawn last, above what is beneath it.
        for span in sorted(spans, key=lambda s: (s.phase in ("stage", "encode"), s.start_s)):
            start, end = round(span.start_s * 1e6), round(span.end_s * 1e6)
            flat += [PHASES.index(span.phase), start, end, round(span.bytes / 1000)]
        rows.append([record.rank, place[record.host], flat])
    times = [s for record in records for span in record.spans for s in (span.start_s, span.end_s)]
    low, high = min(times, default=0.0), max(times, default=1.0)
    is_slow = slowness < FULL_SAVES // 4
    label = f"{'restore' if save.verb == 'load' else 'step'} {save.step}: "
    label += show_seconds(save.total_s) + (" (slow)" if is_slow and save.verb == "save" else "")
    notes = []
    if any(record.is_estimated for record in records):
        notes.append("Its order is estimated: an older holdfast wrote sums alone.")
    if len(records) < len(save.records):
        notes.append(f"{len(records)} of {len(save.records):,} ranks: the slowest, and others.")
    overlaps = any(_overlaps(record) for record in records)
    if overlaps:
        notes.append("Thin bars ran while the bytes were written.")
    return {
        "label": label,
        "rows": rows,
        "range": [math.floor(low * 1e6), max(math.ceil(high * 1e6), math.floor(low * 1e6) + 10)],
        "note": " ".join(notes),
        "overlaps": any(_overlaps(record, "stage") for record in records),
    }


def _overlaps(record: RankRecord, *phases: str) -> bool:
    """Whether staging or encoding ran while it wrote."""
    writes = [span for span in record.spans if span.phase == "write"]
    return bool(writes) and any(
        span.start_s < writes[-1].end_s and span.end_s > writes[0].start_s + 1e-5
        for span in record.spans
        if span.phase in (phases or ("stage", "encode"))
    )


def _chosen(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return all ranks, or of very many the slowest and some between, in order."""
    if len(records) <= ROWS_MAX:
        return list(records)
    slowest = sorted(records, key=lambda record: -record.total_s)[: ROWS_MAX // 8]
    chosen = {record.rank: record for record in slowest}
    stride = len(records) / (ROWS_MAX - len(chosen))
    for n in range(ROWS_MAX - len(chosen)):
        record = records[int(n * stride)]
        chosen[record.rank] = record
    return [chosen[rank] for rank in sorted(chosen)]


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Join the spans of one phase that follow each other."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda s: (PHASES.index(s.phase), s.start_s)):
        last = found[-1] if found else None
        if last and last.phase == span.phase and span.start_s - last.end_s < 0.001:
            both = last.bytes + span.bytes
            found[-1] = Span(span.phase, last.start_s, max(last.end_s, span.end_s), both)
        else:
            found.append(span)
    return found
