"""The lines of metrics.jsonl, read with care: newest first, and only what is as expected.

The file grows while it is read, and its last line may be torn. Knows no file system.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..brief import shortened

FAILURE = "failure"  # the verb of a save that failed; others are "save" and "load"
SECONDS_MAX = 1e9  # 31 years: what is more is no time
ERROR_MAX = 300  # characters of an error
TAIL_BYTES = 4 << 20  # of the end of the file: hundreds of saves of hundreds of ranks


def decode_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records of a part of the file, oldest first; what is torn or strange is left out.

    ``b'{"verb": "save", "step": 7}\\n{"ver'`` → one record
    """
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            yield record


def newest_saves(records: list[dict[str, Any]], count: int) -> list[list[dict[str, Any]]]:
    """Return the saves that were noted last, the newest last: one record for each rank."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in reversed(records):
        if record.get("verb") != "save":
            continue
        key = (str(record["step"]), str(record.get("time")))
        if key not in found and len(found) == count:
            break
        found.setdefault(key, []).insert(0, record)
    return [*reversed(found.values())]


def newest_failure(records: list[dict[str, Any]]) -> tuple[int, str] | None:
    """Return step and error of the newest save, if it failed."""
    for record in reversed(records):
        if record.get("verb") == FAILURE:
            return record["step"], error_of(record)
        if record.get("verb") == "save":
            return None
    return None


def error_of(record: Mapping[str, Any]) -> str:
    """Return why a save failed, as one record says."""
    error = record.get("error")
    return shortened(error, ERROR_MAX) if isinstance(error, str) else "its error is unknown"


def phase_seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase of one record that took any time; NaN is none."""
    found = record.get("seconds")
    if not isinstance(found, Mapping):
        return {}
    return {
        phase: float(value)
        for phase, value in found.items()
        if type(value) in (float, int) and 0 < value < SECONDS_MAX
    }
