"""Saves as spans and metrics of OpenTelemetry. Needs the API alone: the program sets up the rest.

``Checkpointer("runs/a", observe=[OpenTelemetry()])``
"""

from typing import Any

from opentelemetry import metrics, trace  # type: ignore[import-not-found, unused-ignore]
from opentelemetry.trace import (  # type: ignore[import-not-found, unused-ignore]
    Span,
    Status,
    StatusCode,
)

from ... import Event

NAME = "holdfast"
_NANO = 10**9


class OpenTelemetry:
    """An observer: a span for each save and restore of this rank, and metrics.

    Spans are ``holdfast.save`` and ``holdfast.restore``, with the stages of a save as their events.
    Metrics are ``holdfast.saves``, by outcome; ``holdfast.save.duration`` and
    ``holdfast.save.stall`` in seconds; and ``holdfast.save.stored`` in bytes.

    Args:
        tracer_provider, meter_provider: default: those of the program.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        self._tracer = trace.get_tracer(NAME, tracer_provider=tracer_provider)
        meter = metrics.get_meter(NAME, meter_provider=meter_provider)
        self._saves = meter.create_counter("holdfast.saves", "{save}", "saves that ended")
        self._duration = meter.create_histogram("holdfast.save.duration", "s", "until durable")
        self._stall = meter.create_histogram("holdfast.save.stall", "s", "training was held up")
        self._stored = meter.create_counter("holdfast.save.stored", "By", "bytes written")
        self._spans: dict[int | None, Span] = {}

    def __call__(self, event: Event) -> None:
        """See `holdfast.Checkpointer`."""
        now = int(event.time_s * _NANO)
        if event.kind == "planned":
            self._spans[event.step] = self._begin("holdfast.save", event, now)
        elif event.kind in ("staged", "written") and (span := self._spans.get(event.step)):
            span.add_event(event.kind, {"holdfast.stored_bytes": event.stored_bytes}, now)
        elif event.kind in ("committed", "failed"):
            span = self._spans.pop(event.step, None) or self._begin("holdfast.save", event, now)
            self._end(span, event, now)
        elif event.kind == "restored":
            started = now - int(event.seconds.get("total", 0.0) * _NANO)
            self._begin("holdfast.restore", event, started).end(now)

    def _begin(self, name: str, event: Event, now: int) -> Span:
        known = {"holdfast.run": event.run, "holdfast.rank": event.rank}
        known |= {"holdfast.step": -1 if event.step is None else event.step}
        return self._tracer.start_span(
            name, attributes=known | {"holdfast.bytes": event.bytes}, start_time=now
        )

    def _end(self, span: Span, event: Event, now: int) -> None:
        for part, seconds in event.seconds.items():
            span.set_attribute(f"holdfast.seconds.{part}", seconds)
        span.set_attribute("holdfast.stored_bytes", event.stored_bytes)
        span.set_attribute("holdfast.stall_s", event.stall_s)
        if event.kind == "failed":
            span.set_status(Status(StatusCode.ERROR, event.text))
        span.end(now)
        labels = {"outcome": event.kind, "rank": event.rank}
        self._saves.add(1, labels)
        if event.kind == "committed":
            self._duration.record(event.seconds.get("total", 0.0), {"rank": event.rank})
            self._stall.record(event.stall_s, {"rank": event.rank})
            self._stored.add(event.stored_bytes, {"rank": event.rank})
