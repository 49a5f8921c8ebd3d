"""How far a store is behind the local disk before it, by what is known of saves and uploads.

Pure: knows no clock and no files.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any


class Lag:
    """The steps that are newer than the newest one in the store."""

    def __init__(self) -> None:
        self._waiting: dict[int, float] = {}

    def saved(self, step: int, time_s: float) -> None:
        """Take note that a step is durable on the local disk, since a time.

        Training may have gone back: then the steps from there on are of another past.
        """
        if step not in self._waiting or step != max(self._waiting):
            kept = {other: since_s for other, since_s in self._waiting.items() if other < step}
            self._waiting = kept | {step: time_s}

    def uploaded(self, step: int) -> None:
        """Take note that a step is in the store: older ones need not go there any more."""
        self._waiting = {s: since_s for s, since_s in self._waiting.items() if s > step}

    @property
    def oldest(self) -> tuple[int, float] | None:
        """The first step that the store lacks, and since when; None: it has the newest.

        The step itself may be gone from the local disk, if newer ones have taken its place.
        """
        return next(iter(self._waiting.items()), None)


def lag_of(records: Iterable[Mapping[str, Any]]) -> Lag:
    """Return how far the store is behind, by the lines of metrics.jsonl, oldest first."""
    lag = Lag()
    for record in records:
        if record.get("verb") == "save" and (time_s := _time(record.get("time"))) is not None:
            lag.saved(record["step"], time_s)
        elif record.get("verb") == "upload":
            lag.uploaded(record["step"])
    return lag


def _time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
