"""`holdfast watch`: a run while it trains: the last steps, the save in flight, what comes next.

Reads the progress files that the job rewrites once a second, the end of metrics.jsonl, and the
names of the steps. Changes nothing. `watch_screen.py` draws.
"""

import time
from heapq import heappush, heappushpop
from typing import Any

from ..errors import NotCommittedError, StoreError
from ..format.epoch import EPOCH_BYTES_MAX, decode_taker, epoch_of
from ..format.measured import FAILURE, TAIL_BYTES, decode_lines, error_of
from ..format.names import all_metrics, step_name, step_of
from ..format.progress import FILE_BYTES_MAX, PROGRESS_PREFIX, RankProgress, decode_slots
from ..processes import has_ended, has_lived_since
from ..stores.base import Store
from ..stores.tail import read_head, read_tails
from ..stores.url import open_store
from .behind import behind
from .run_listing import without_retired

Document = dict[str, Any]

STEPS_SHOWN = 8  # that wait for their upload
SAVES_SHOWN = 100  # of the last ones, in the document
LOOKS_MAX = 64  # at steps of a store of objects, each time


def look(path: str) -> Document:
    """Describe how a run is doing right now.

    Raises:
        NotCommittedError: this is no run.
        StoreError: it cannot be read.
    """
    store = open_store(path)
    if not store.exists(""):
        raise NotCommittedError(f"{store.location} is not there; give the directory of a run")
    steps, newest, names, last = 0, -1, list[str](), list[int]()
    # A run may have a million steps; in a store of objects each look is a request.
    for name in without_retired(store, store.scan(), LOOKS_MAX):
        if (step := step_of(name)) is None:
            names.append(name)
        else:
            steps, newest = steps + 1, max(newest, step)
            (heappush if len(last) < STEPS_SHOWN else heappushpop)(last, step)
    ranks = _ranks(store, names)
    saves = _saves(read_tails(store, all_metrics(names), TAIL_BYTES))
    if not (ranks or steps or saves):
        raise NotCommittedError(
            f"{store.location} is no run: it has no steps, and no job says that it runs there; "
            "give the directory that holds step-00001000 and others"
        )
    return {
        "path": store.location,
        "now_s": time.time(),
        "free_bytes": _free_bytes(store),
        "steps": steps,
        "newest": newest if steps else None,
        "ranks": [_as_dict(said) for said in ranks],
        "process": None if ranks else _process(store, names),
        "saves": saves[-SAVES_SHOWN:],
        "behind": behind(store, [*names, *map(step_name, last)]),
    }


def _ranks(store: Store, names: list[str]) -> list[RankProgress]:
    """Return what each rank last said; of two that say the same rank, the newer."""
    found: dict[int, RankProgress] = {}
    for name in names:
        if not name.startswith(PROGRESS_PREFIX):
            continue
        try:
            said = list(decode_slots(read_head(store, name, FILE_BYTES_MAX)))
        except StoreError:  # it has just been removed
            continue
        for one in said:
            if one.rank not in found or found[one.rank].time_s < one.time_s:
                found[one.rank] = one
    newest = max((one.time_s for one in found.values()), default=0.0)
    # Ranks of an older, larger job say nothing any more.
    size = max((o.world_size for o in found.values() if o.time_s == newest), default=0)
    return [found[rank] for rank in sorted(found) if rank < size]


def _as_dict(said: RankProgress) -> Document:
    found = {name: getattr(said, name) for name in said.__slots__}
    return found | {"has_ended": has_ended(said.host, said.pid, said.pid_space)}


def _process(store: Store, names: list[str]) -> int | None:
    """Return the process of this machine that has the run; None: nobody can tell of one.

    With a local disk before the run, its progress file is on that disk.
    """
    epochs = {epoch: name for name in names if (epoch := epoch_of(name)) is not None}
    if not epochs:
        return None
    try:
        taker = decode_taker(read_head(store, epochs[max(epochs)], EPOCH_BYTES_MAX))
    except StoreError:  # a newer job has just taken its place
        return None
    if taker is None or not has_lived_since(taker.host, taker.pid, taker.since_s):
        return None
    return taker.pid


def _saves(data: bytes) -> list[Document]:
    """Return the last saves and restores: what their slowest rank took, and all ranks wrote."""
    groups: dict[tuple[object, ...], list[Document]] = {}
    for record in decode_lines(data):
        key = (str(record.get("time")), str(record.get("verb")), record["step"])
        groups.setdefault(key, []).append(record)
    return [_save(key, records) for key, records in groups.items()]


def _save(key: tuple[object, ...], records: list[Document]) -> Document:
    when, verb, step = key
    totals = [(_seconds(record), record.get("rank")) for record in records]
    slowest = max(totals, key=lambda one: one[0])
    return {
        "time": when,
        "verb": verb,
        "step": step,
        "ranks": len(records),
        "took_s": slowest[0],
        "stall_s": max(_number(record.get("stall_s")) for record in records),
        "stored_bytes": int(sum(_number(record.get("stored_bytes")) for record in records)),
        "error": error_of(records[-1]) if verb == FAILURE else None,
    }


def _seconds(record: Document) -> float:
    seconds = record.get("seconds")
    return _number(seconds.get("total")) if isinstance(seconds, dict) else 0.0


def _number(value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    found = float(value) if is_number and abs(value) < 2**63 else 0.0  # type: ignore
    return found if found >= 0 else 0.0


def _free_bytes(store: Store) -> int | None:
    try:
        return store.free_bytes()
    except StoreError:  # it may be mounted to be read only
        return None
