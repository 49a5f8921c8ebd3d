"""A run's saves as a Chrome trace, which Perfetto and chrome://tracing open.

A process is a host, a thread is a rank. Times are of the first rank's clock. Knows data alone.
"""

import json
from collections.abc import Iterator
from typing import Any

from ..tools.text import printable
from .data import RunData, Save


def trace_of(run: RunData) -> str:
    """Return the trace as JSON: those saves of which all ranks are known."""
    saves = [save for save in run.timing.saves if save.records]
    hosts = list(dict.fromkeys(r.host for save in saves for r in save.records))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": n, "args": {"name": printable(host) or "ranks"}}
        for n, host in enumerate(hosts)
    ]
    for place, rank in sorted({(hosts.index(r.host), r.rank) for s in saves for r in s.records}):
        args = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": place, "tid": rank, "args": args})
    for save in saves:
        events += _events(save, hosts)
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _events(save: Save, hosts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a span of the whole for each rank, and the phases within it.

    A line is written when all is over: the last span ends then.
    """
    ends = [span.end_s for record in save.records for span in record.spans]
    zero = save.time - max(ends, default=0.0)
    for record in save.records:
        where = {"pid": hosts.index(record.host), "tid": record.rank}
        for span in record.spans:
            yield {
                "ph": "X",
                "name": span.phase,
                "cat": save.verb,
                "ts": round((zero + span.start_s) * 1e6, 1),
                "dur": round((span.end_s - span.start_s) * 1e6, 1),
                **where,
                "args": {"step": save.step, "bytes": span.bytes},
            }
