"""The metrics files of a run → summaries of all saves, and full records of some. Bounded memory.

Lines may be torn, damaged, of an older holdfast, or out of order: what cannot be used is counted.
"""

import contextlib
import heapq
import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from statistics import median
from typing import Any

from ..errors import StoreError
from ..format.measured import FAILURE, SECONDS_MAX, error_of, phase_seconds
from ..format.names import METRICS_NAME, old_metrics
from ..format.stragglers import WORK, typical
from ..stores.base import Store
from .data import PHASES, Failure, HeatRow, PhaseSummary, RankRecord, Save, Span, Timing

FULL_SAVES = 20  # so many of the slowest, and of the newest, are kept with all ranks
NEWEST_SAVES = 1000  # older summaries are thinned to so many
HEAT_SAVES = 100
FAILURES_MAX = 20
SEEN_MAX = 100_000  # saves: more than a full file holds
LINES_MAX = 300_000  # a thousand saves of 256 ranks; half a minute
HEAD_BYTES = 64 << 10
LINE_BYTES_MAX = 1 << 20
READ_BYTES = 4 << 20
SPANS_MAX = 64
TEXT_MAX = 64
COUNT_MAX = 2**63

Row = dict[str, Any]
Rows = Mapping[int, Row]  # of the ranks of one save
Seconds = Mapping[int, Mapping[str, float]]
_PHASES = frozenset(PHASES)


def read_metrics(store: Store) -> Timing:
    """Read all metrics of a run; without any, `Timing.problem` says so."""
    try:
        names = [entry.name for entry in store.list() if entry.kind == "file"]
    except StoreError as error:
        return Timing(problem=f"The run's directory cannot be listed: {error}")
    files = [*old_metrics(names), *([METRICS_NAME] if METRICS_NAME in names else [])]
    if not files:
        return Timing(
            problem="This run has no metrics.jsonl, so times are unknown. A Checkpointer writes it"
        )
    gathered = _Gathered()
    problem = ""
    chosen = _newest(store, files)
    for name in chosen:
        try:
            for row in _rows(store, name, gathered):
                gathered.add(row)
        except StoreError as error:
            problem = f"{name} cannot be read to its end: {error}"
    gathered.end_save()
    return replace(gathered.timing(problem), unread_files=len(files) - len(chosen))


def _newest(store: Store, files: Sequence[str]) -> Sequence[str]:
    """Leave out the oldest files, of more lines than can be read while somebody waits."""
    lines = 0
    for number in reversed(range(len(files))):
        with contextlib.suppress(StoreError):
            lines += _lines_in(store, files[number])
        if lines > LINES_MAX:
            return files[min(number + 1, len(files) - 1) :]
    return files


def _lines_in(store: Store, name: str) -> int:
    """Estimate the lines of a file, from its beginning."""
    fd = store.open(name, direct=False)
    try:
        size = store.vfs.size(fd)
        head = store.vfs.read(fd, min(size, HEAD_BYTES), 0)
    finally:
        store.vfs.close(fd)
    return size * head.count(b"\n") // max(len(head), 1)


def _rows(store: Store, name: str, gathered: "_Gathered") -> Iterator[Row]:
    """Yield the usable lines of a file that may grow meanwhile."""
    fd = store.open(name, direct=False)
    try:
        offset, rest, limit = 0, b"", store.vfs.size(fd)
        while data := store.vfs.read(fd, min(READ_BYTES, limit - offset), offset):
            offset += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield from _parsed(line, gathered)
            if len(rest) > LINE_BYTES_MAX:
                rest = b"x" * LINE_BYTES_MAX  # no line of ours: counted as skipped at its end
            if offset >= limit:
                break
        yield from _parsed(rest, gathered)
    finally:
        store.vfs.close(fd)


def _parsed(line: bytes, gathered: "_Gathered") -> Iterator[Row]:
    if not line.strip():
        return
    try:
        row = json.loads(line)
        usable = isinstance(row, dict) and isinstance(row.get("verb"), str)
        usable = usable and type(row.get("step")) is int and 0 <= row["step"] < COUNT_MAX
    except (ValueError, RecursionError):
        usable = False
    if usable:
        yield row
    else:
        gathered.skipped += 1


class _Gathered:
    """Takes rows in file order; rows of one save follow each other."""

    def __init__(self) -> None:
        self.skipped = 0
        self._key: tuple[Any, ...] = ()
        self._rows: dict[int, Row] = {}
        self._seen = set[tuple[str, ...]]()  # a crash may leave a file twice
        self._seen_before = set[tuple[str, ...]]()
        self._number = 0  # of the save, in file order, whatever its clock says
        self._newest: deque[tuple[int, Save, Rows]] = deque()
        self._older: list[tuple[int, Save]] = []
        self._slowest: list[tuple[float, int, Save, Rows]] = []
        self._counts: Counter[str] = Counter()
        self._heat: deque[Seconds] = deque(maxlen=HEAT_SAVES)
        self._hosts: dict[int, str] = {}
        self._stored = self._jumps = 0
        self._clocks = self._last_time = 0.0
        self._steps_saved = 0
        self._last_step = -1
        self._failures: deque[Failure] = deque(maxlen=FAILURES_MAX)
        self._is_failing = False

    def add(self, row: Row) -> None:
        """Take a row; one of another save ends the one before."""
        if row["verb"] == FAILURE:
            self._fail(row)
        if row["verb"] not in ("save", "load"):
            return
        key = (row.get("time"), row["verb"], row["step"])
        if key != self._key:
            self.end_save()
            self._key = key
        rank = row.get("rank", 0)
        if type(rank) is not int or not 0 <= rank < 1 << 24:
            self.skipped += 1
            return
        self._rows[rank] = row

    def _fail(self, row: Row) -> None:
        self.end_save()
        if self._is_known((str(row.get("time")), FAILURE, str(row["step"]))):
            return
        self._counts[FAILURE] += 1
        self._is_failing = True
        self._failures.append(Failure(row["step"], _time_of(row.get("time")), error_of(row)))

    def _is_known(self, key: tuple[str, ...]) -> bool:
        """Whether this was there before; a time must have been noted."""
        if key[0] != "None" and (key in self._seen or key in self._seen_before):
            return True
        self._seen.add(key)
        if len(self._seen) > SEEN_MAX // 2:
            self._seen, self._seen_before = set(), self._seen
        return False

    def end_save(self) -> None:
        """Summarise the save whose rows have come."""
        rows, self._rows = self._rows, {}
        if not rows or self._is_known(tuple(map(str, self._key))):
            return
        heat = {rank: _seconds_of(rows[rank]) for rank in sorted(rows)}
        save = _save_of(rows, heat)
        self._counts[save.verb] += 1
        if self._last_time and save.time and save.time < self._last_time - 1:
            self._jumps += 1
        self._last_time = save.time or self._last_time
        clocks = [clock for row in rows.values() if (clock := _number(row.get("clock")))]
        self._clocks = max(self._clocks, max(clocks) - min(clocks)) if clocks else self._clocks
        if save.verb == "save":
            self._is_failing = False
            self._stored += save.stored_bytes
            self._steps_saved += save.step != self._last_step
            self._last_step = save.step
            self._heat.append(heat)
            item = (save.total_s, self._number, save, rows)
            if len(self._slowest) < FULL_SAVES:
                heapq.heappush(self._slowest, item)
            else:
                heapq.heappushpop(self._slowest, item)
            self._hosts = {rank: _host_of(rows[rank]) for rank in heat}
        self._newest.append((self._number, save, rows))
        self._number += 1
        if len(self._newest) > FULL_SAVES:
            self._older.append(self._newest.popleft()[:2])
        if len(self._older) > 2 * NEWEST_SAVES:
            self._older[:NEWEST_SAVES] = self._older[:NEWEST_SAVES:2]

    def timing(self, problem: str) -> Timing:
        """Return what has come together."""
        found = dict(self._older)
        full = [(n, save, rows) for _, n, save, rows in self._slowest]
        for number, save, rows in [*full, *self._newest]:
            found[number] = replace(save, records=tuple(_records(rows)))
        saves = [found[number] for number in sorted(found)]
        return Timing(
            saves=tuple(saves),
            counts=dict(self._counts),
            heat=tuple(self._heat_rows()),
            heat_saves=len(self._heat),
            stored_bytes=self._stored,
            skipped_lines=self.skipped,
            clocks=self._clocks,
            jumps=self._jumps,
            steps_saved=self._steps_saved,
            failures=tuple(self._failures),
            is_failing=self._is_failing,
            problem=problem,
        )

    def _heat_rows(self) -> Iterator[HeatRow]:
        """Take the median of each rank and phase, over saves by as many ranks as the newest."""
        if not self._heat:
            return
        on_host: Counter[str] = Counter()
        for rank, medians in typical(self._heat).items():
            host = self._hosts[rank]
            yield HeatRow(rank, host, on_host[host], medians)
            on_host[host] += 1


def _save_of(rows: Rows, seconds: Seconds) -> Save:
    """Summarise one save."""
    phases = {}
    ranks = list(seconds)
    for phase in dict.fromkeys(phase for found in seconds.values() for phase in found):
        values = [found.get(phase, 0.0) for found in seconds.values()]
        most = max(values)
        phases[phase] = PhaseSummary(median(values), most, ranks[values.index(most)])
    work = [sum(found.get(p, 0.0) for p in WORK) for found in seconds.values()]
    first = rows[ranks[0]]
    return Save(
        verb=first["verb"],
        step=first["step"],
        time=_time_of(first.get("time")),
        ranks=len(rows),
        bytes=sum(_count(row.get("bytes")) for row in rows.values()),
        stored_bytes=sum(_count(row.get("stored_bytes")) for row in rows.values()),
        total_s=max(map(_total_of, rows.values())),
        stall_s=max(_seconds(row.get("stall_s")) for row in rows.values()),
        slowest_rank=ranks[work.index(max(work))],
        phases=phases,
    )


def _seconds_of(row: Row) -> dict[str, float]:
    """Return the phases of a rank that took any time."""
    return {phase: s for phase, s in phase_seconds(row).items() if phase in _PHASES}


def _total_of(row: Row) -> float:
    found = row.get("seconds")
    return _seconds(found.get("total")) if isinstance(found, dict) else 0.0


def _host_of(row: Row) -> str:
    host = row.get("host")
    return host[:TEXT_MAX] if isinstance(host, str) else ""


def _records(rows: Rows) -> Iterator[RankRecord]:
    on_host: Counter[str] = Counter()
    clock = _number(rows[min(rows)].get("clock"))
    for rank in sorted(rows):
        row = rows[rank]
        host, seconds = _host_of(row), _seconds_of(row)
        spans = tuple(_spans(row.get("spans")))
        own = _number(row.get("clock"))
        yield RankRecord(
            rank=rank,
            host=host,
            local_rank=on_host[host],
            bytes=_count(row.get("bytes")),
            stored_bytes=_count(row.get("stored_bytes")),
            stall_s=_seconds(row.get("stall_s")),
            total_s=_total_of(row),
            clock_offset_s=own - clock if own and clock else 0.0,
            seconds=seconds,
            spans=spans or tuple(_estimated(seconds)),
            is_estimated=not spans,
        )
        on_host[host] += 1


def _spans(found: object) -> Iterator[Span]:
    for item in found[:SPANS_MAX] if isinstance(found, list) else ():
        if not (isinstance(item, list) and len(item) == 4 and item[0] in PHASES):
            continue
        start, end = _number(item[1]), _number(item[2])
        if start <= end and max(abs(start), abs(end)) < SECONDS_MAX:
            yield Span(item[0], start, end, _count(item[3]))


def _estimated(seconds: Mapping[str, float]) -> Iterator[Span]:
    """Put sums one after the other, in the order in which most of each phase happens."""
    at = 0.0
    for phase in ("plan", "stage", "encode", "read", "place", "write", "sync", "wait", "commit"):
        if phase in seconds:
            yield Span(phase, at, at + seconds[phase], 0)
            at += seconds[phase]


def _number(value: object) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if good and math.isfinite(value) else 0.0  # type: ignore[arg-type]
    except OverflowError:
        return 0.0


def _seconds(value: object) -> float:
    number = _number(value)
    return number if 0 <= number < SECONDS_MAX else 0.0


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < COUNT_MAX else 0


def _time_of(value: object) -> float:
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else 0.0
    except (ValueError, OverflowError):
        return 0.0
