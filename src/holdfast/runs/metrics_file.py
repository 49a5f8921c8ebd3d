"""metrics.jsonl of a run: a line for each rank and save or restore, and one for each upload.

Saves never read it.
"""

import errno
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from ..errors import HoldfastError, StoreError
from ..format.measured import TAIL_BYTES, decode_lines, newest_saves
from ..format.names import (
    METRICS_BYTES_MAX,
    METRICS_FILES_MAX,
    METRICS_NAME,
    next_metrics,
    old_metrics,
)
from ..stores.base import Store, list_if_there
from ..stores.tail import read_tails
from .fence import Fence

logger = logging.getLogger("holdfast")

_SHORT = (",", ":")


class MetricsFile:
    """What saves, restores and uploads of a run have measured. Thread-safe."""

    def __init__(self, store: Store, fence: Fence) -> None:
        """Prepare; nothing is read yet."""
        self._store, self._fence = store, fence
        self._bytes = -1  # negative: not known
        self._lock = threading.Lock()

    def add(self, verb: str, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Add what each rank has measured: a line each, in one write.

        It is for people: when it fails, that is only logged.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        rows = [{"time": now, "verb": verb, "step": step, **record} for record in records]
        data = "".join(f"{json.dumps(row, separators=_SHORT)}\n" for row in rows).encode()
        try:
            with self._lock:
                self._begin_anew()
                self._store.append(METRICS_NAME, data)
                self._bytes += len(data)
        except HoldfastError as error:
            # A local disk before the store has no directory before its first save.
            is_new = isinstance(error, StoreError) and error.errno == errno.ENOENT
            logger.log(
                logging.DEBUG if is_new else logging.WARNING,
                "metrics.jsonl lacks the %s of step %d: %s",
                *(verb, step, error),
            )

    def take_save(self, step: int, other: "MetricsFile") -> None:
        """Add what another file has of the newest save of a step, for reports of this run."""
        with suppress(StoreError):
            tail = read_tails(other._store, [METRICS_NAME], TAIL_BYTES)
            own = [record for record in decode_lines(tail) if record["step"] == step]
            for records in newest_saves(own, 1):
                self.add("save", step, records)

    def _begin_anew(self) -> None:
        """Move a full file to one with a number, and remove the oldest of too many.

        It is copied first: a crash leaves its lines twice, and never not at all.
        """
        if 0 <= self._bytes < METRICS_BYTES_MAX:
            return
        entries = list_if_there(self._store) or []
        sizes = {e.name: e.size_bytes for e in entries if e.kind == "file"}
        self._bytes = sizes.get(METRICS_NAME, 0)
        if self._bytes < METRICS_BYTES_MAX:
            return
        self._fence.hold()
        full = old_metrics(sizes)
        data = self._store.get(METRICS_NAME, self._bytes)
        self._store.append(next_metrics(full), data)
        self._store.remove(METRICS_NAME)
        self._bytes = 0
        for name in full[: 1 - METRICS_FILES_MAX]:
            self._store.remove(name)
