"""What observers of a run are told: one frozen record for each thing that happened.

Knows no files and no threads; those who deliver events are in `observers.py`.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from ..brief import brief
from ..format.names import step_name

KINDS = (
    *("planned", "staged", "written", "committed", "failed"),
    *("retired", "restored", "alert", "uploaded", "behind"),
)
_DIGITS = 8  # of a digest that stands for a name


def _nothing() -> Mapping[str, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a step of a run, as one rank saw it.

    Attributes:
        kind: "planned", "staged", "written", "committed", "failed" (a save); "retired" (a step
            was deleted, told on rank 0); "restored"; "alert" (see `holdfast.Alerts`). With a local
            disk, on rank 0: "uploaded" (a step is durable in the store); "behind" (an upload
            failed, or a step will not be uploaded).
        run: directory of the run.
        step: number of the step; None: the event is of no step.
        rank, world_size: which rank tells it, of how many.
        time_s: when it happened, in seconds since 1970.
        bytes: of this rank: size of the elements to save, or bytes that were read.
        stored_bytes: of this rank: bytes written so far.
        seconds: of this rank: seconds for each part of the save, and ``total`` so far.
        stall_s: how long this rank's training was held up so far.
        metrics: with "committed": the numbers that were given to the save.
        ranks: with "committed" on rank 0: what each rank measured, as in metrics.jsonl.
        rule: with "alert": the name of the rule.
        text: with "failed", "alert" and "behind": what is wrong.

    Example::

        def tell(event: holdfast.Event) -> None:
            if event.kind == "failed":
                print(f"{event.path} was not saved: {event.text}", event.as_dict())

        checkpointer = holdfast.Checkpointer("runs/a", every=100, observe=[tell])
    """

    kind: str
    run: str
    step: int | None
    rank: int
    world_size: int
    time_s: float
    bytes: int = 0
    stored_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=_nothing)
    stall_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=_nothing)
    ranks: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    rule: str = ""
    text: str = ""

    __repr__ = brief

    @property
    def path(self) -> str:
        """Directory of the step; of the run, if the event is of no step."""
        return self.run if self.step is None else f"{self.run}/{step_name(self.step)}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as values of JSON, but for a metric that is NaN or infinite."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["seconds"], record["metrics"] = dict(self.seconds), dict(self.metrics)
        return record | {"path": self.path, "ranks": [dict(rank) for rank in self.ranks]}


Observer = Callable[[Event], object]


def redacted(observer: Observer) -> Observer:
    """Return an observer that sees no path, no name of a metric, and no text of an error.

    Each name becomes a digest, which is always the same for the same name. Of a text, only its
    first word stays if that is the type of an error. Use it for alerts that leave the house.

    Args:
        observer: what is given the events instead.

    Example:
        ``holdfast.Checkpointer("runs/a", every=100, observe=[holdfast.redacted(print)])``
    """

    def observe(event: Event) -> object:
        kind = re.match(r"[A-Za-z]+(Error|Exception)\b", event.text)
        return observer(
            replace(
                event,
                run=f"run-{_digest(event.run)}",
                metrics=MappingProxyType(
                    {f"metric-{_digest(name)}": value for name, value in event.metrics.items()}
                ),
                text=kind[0] if kind else "",
            )
        )

    return observe


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:_DIGITS]
