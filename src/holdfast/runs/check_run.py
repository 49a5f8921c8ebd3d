"""Look at a run from outside, and apply the rules of `alerts.py`. Writes nothing.

Knows the files of a run; neither ranks nor tensors.
"""

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..engine.check import read_manifest
from ..engine.transfer import present
from ..errors import HoldfastError, NotCommittedError, OptionError, StoreError
from ..format.lag import lag_of
from ..format.local_mark import MARK_NAME
from ..format.local_room import LocalRoom, local_room
from ..format.measured import TAIL_BYTES, decode_lines, newest_failure, newest_saves
from ..format.names import all_metrics, step_name, step_of
from ..format.progress import FILE_BYTES_MAX, PROGRESS_PREFIX, RankProgress, decode_slots
from ..format.spec import MANIFEST_NAME
from ..format.stragglers import FACTOR
from ..stores.base import Store
from ..stores.tail import read_head, read_tails
from ..stores.url import open_store
from .alerts import GROWTH_SAVES, STRAGGLER_SAVES, Alert, Facts, Limits, judge
from .local_mark import read_mark
from .retention import Keep
from .run_steps import RunSteps

SILENT_S = 60.0  # a job that runs writes once a second; a busy disk may hold that up


def check_run(
    path: str | os.PathLike[str],
    *,
    stall_s: float | None = None,
    durable_min: float | None = None,
    straggler: float | None = FACTOR,
    disk_saves: float | None = 3,
    behind_min: float | None = None,
) -> list[Alert]:
    """Return what is wrong with a run, for probes and scheduled checks. Needs no running job.

    Besides the limits, it looks whether the newest save failed, and whether a job that has not
    ended has gone silent. An empty list means that no rule speaks.

    Args:
        path: directory of the run.
        stall_s, durable_min, straggler, disk_saves, behind_min: as for `holdfast.Alerts`. The last
            one is for the local directory of a run that has a store behind it.

    Raises:
        OptionError: a limit is not a number above 0; or ``behind_min`` is for another host.
        NotCommittedError: this is no run.
        StoreError: the disk or the network failed.

    Example:
        ``for alert in holdfast.check_run("runs/a", durable_min=30): print(alert.text)``
    """
    limits = Limits(
        stall_s=stall_s,
        durable_min=durable_min,
        straggler=straggler,
        disk_saves=disk_saves,
        behind_min=behind_min,
    )
    store = open_store(path)
    names = _names(store)
    ranks = read_progress(store, names)
    if not (ranks or any(step_of(name) is not None for name in names)):
        raise NotCommittedError(
            f"{store.location} is no run: it has no steps, and no job says that it runs there; "
            "give the directory that holds step-00001000 and others"
        )
    if behind_min is not None and MARK_NAME in names and read_mark(store).lacks_manifests:
        raise OptionError(
            f"behind_min is given, but {store.location} does not tell which steps are uploaded: "
            "rank 0 is on another host. Check that host's directory"
        )
    return judge(_facts(store, names, ranks), limits)


def _names(store: Store) -> list[str]:
    """Return all names in a run; none, if it is not there. There may be a million."""
    if not store.exists(""):
        return []
    return [*store.scan()]


def read_progress(store: Store, names: Sequence[str]) -> list[RankProgress]:
    """Return what the ranks of a run last said; what cannot be read is left out."""
    found: list[RankProgress] = []
    for name in names:
        if name.startswith(PROGRESS_PREFIX):
            try:
                found += decode_slots(read_head(store, name, FILE_BYTES_MAX))
            except StoreError:  # it has just been removed
                continue
    return sorted(found, key=lambda said: (said.rank, -said.time_s))


def _facts(store: Store, names: Sequence[str], ranks: Sequence[RankProgress]) -> Facts:
    now_s = time.time()
    listed = sorted(step for name in names if (step := step_of(name)) is not None)
    # Others are not opened: of very many, that would take minutes.
    newest_step = next((step for step in reversed(listed) if _is_committed(store, step)), None)
    records = list(decode_lines(read_tails(store, all_metrics(names), TAIL_BYTES)))
    saves = newest_saves(records, STRAGGLER_SAVES)
    newest = saves[-1] if saves else []
    durable_s = free_bytes = None
    with contextlib.suppress(StoreError):  # a probe need not be able to write there
        free_bytes = store.free_bytes()
    if newest_step is not None:
        durable_s = store.modified_s(f"{step_name(newest_step)}/{MANIFEST_NAME}")
    failures = [said for said in ranks if said.failed_s > said.committed_s]
    failed = max(failures, key=lambda said: said.failed_s, default=None)
    saved = sorted({record["step"] for record in records if record.get("verb") == "save"})
    recent = saved[-GROWTH_SAVES:]
    there = set(listed)
    gone = [step for step in saved if step not in there or not _is_committed(store, step)]
    # Each save of the window that kept the count of steps as it was let one go.
    is_pruned = len(gone) >= len(recent) > 0
    facts = Facts(
        now_s=now_s,
        durable_s=durable_s,
        failed=newest_failure(records) if failed is None else (failed.failed_step, failed.failed),
        silent_s=_silent_s(now_s, ranks),
        step=newest[0]["step"] if newest else newest_step,
        saves=saves,
        free_bytes=free_bytes,
        step_bytes=sum(_count(record.get("stored_bytes")) for record in newest),
        growth=0.0 if is_pruned else 1.0,
    )
    if MARK_NAME not in names:
        return facts
    here = [step for step in listed if _is_committed(store, step)]
    uploaded = {record["step"] for record in records if record.get("verb") == "upload"}
    room = _local_room(store, here, set(here) - uploaded)
    return replace(
        facts,
        step_bytes=room.step_bytes,
        old_bytes=room.old_bytes,
        growth=0.0 if room.is_shared else facts.growth,
        waits=lag_of(records).oldest,
    )


def _local_room(local: Store, steps: Sequence[int], waiting: Collection[int]) -> LocalRoom:
    is_shared = is_delta = False
    sizes = dict[int, int]()
    with contextlib.suppress(HoldfastError):  # what is damaged is said by who restores it
        run = RunSteps(local.location, Keep.all(), None)
        sizes = {step: run.disk_bytes(step) for step in steps}
        if steps:
            newest = local.below(step_name(steps[-1]))
            manifest = read_manifest(newest)
            is_delta = manifest.table.header.base is not None
            is_shared = all(present(newest, manifest))
    return local_room(sizes, waiting, is_shared=is_shared, is_delta=is_delta)


def _is_committed(store: Store, step: int) -> bool:
    try:
        return store.exists(f"{step_name(step)}/{MANIFEST_NAME}")
    except StoreError:
        return True  # for all that is known


def _silent_s(now_s: float, ranks: Sequence[RankProgress]) -> float | None:
    if not ranks:
        return None
    latest: dict[int, float] = {}
    for said in ranks:
        latest[said.rank] = max(said.time_s, latest.get(said.rank, 0.0))
    oldest_s = now_s - min(latest.values())
    return oldest_s if oldest_s > SILENT_S else None


def _count(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0
