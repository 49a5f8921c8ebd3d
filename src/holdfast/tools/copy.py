"""`holdfast copy`: a checkpoint, or every step of a run, at another place."""

import contextlib
import os
from typing import Any

from .. import Copied, copy_checkpoint
from ..errors import CorruptError, NotCommittedError, StoreError
from ..format.names import LATEST_NAME, METRICS_NAME, old_metrics
from ..stores.base import Store
from ..stores.url import open_store
from .progress import Progress
from .run_listing import disk_bytes, find_run
from .text import printable, show_bytes, show_count

Document = dict[str, Any]
METRICS_BYTES_MAX = 1 << 30


def copy_all(source: str, target: str) -> Document:
    """Copy a checkpoint, or all steps of a run with its metrics.

    What an earlier call has copied is left as it is. Steps that are damaged are left out, and said.

    Raises:
        NotCommittedError: there is nothing at ``source``.
        AlreadyCommittedError: another checkpoint is at ``target``; steps before it were copied.
        CorruptError: the one checkpoint is damaged.
    """
    run = find_run(source)
    if run is None:
        with Progress("copy", disk_bytes(open_store(source, "source"), "")) as progress:
            done = copy_checkpoint(source, target, report=progress.advance)
        return _document(done.location, [done], [])
    if not run.committed:
        raise NotCommittedError(f"{run.location} has no committed step; give a run with steps")
    there = open_store(target, "target")
    found, damaged = list[Copied](), list[Document]()
    with Progress("copy", sum(step.disk_bytes for step in run.committed)) as progress:
        for step in run.committed:
            place = os.path.join(there.location, step.name)
            try:
                found.append(copy_checkpoint(step.location, place, report=progress.advance))
            except CorruptError as error:
                damaged.append({"path": step.location, "error": str(error)})
    _copy_beside(open_store(run.location), there)
    return _document(there.location, found, damaged)


def _copy_beside(here: Store, there: Store) -> None:
    """Copy what a run has beside its steps, where the target has none."""
    full = list[str]()
    with contextlib.suppress(StoreError):
        full = old_metrics(entry.name for entry in here.list())
    for name in (*full, METRICS_NAME, LATEST_NAME):
        with contextlib.suppress(StoreError):
            if not there.exists(name):
                there.append(name, here.get(name, METRICS_BYTES_MAX))


def _document(location: str, found: list[Copied], damaged: list[Document]) -> Document:
    return {
        "path": location,
        "copied_bytes": sum(done.copied_bytes for done in found),
        "kept_bytes": sum(done.kept_bytes for done in found),
        "checkpoints": [done.location for done in found],
        "damaged": damaged,
    }


def render(document: Document) -> list[str]:
    """Say what was copied, as lines for the terminal."""
    lines = [
        f"left out, damaged: {printable(d['path'])}: {printable(d['error'])}"
        for d in document["damaged"]
    ]
    count = show_count(len(document["checkpoints"]), "checkpoint")
    kept = document["kept_bytes"]
    before = f"; {show_bytes(kept)} were there already" if kept else ""
    copied = show_bytes(document["copied_bytes"])
    return [*lines, f"{printable(document['path'])}: {count}, {copied} copied and checked{before}"]
