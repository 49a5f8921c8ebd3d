"""Reads a run from its store: its steps, what is known of damage, the disk, and its metrics.

Opens MANIFESTs alone, and no more than so many. Whatever cannot be read becomes a part of the
report: a run that is being written, or damaged, is what a report is for.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import Checkpoint, __version__
from .. import open as open_checkpoint
from ..errors import HoldfastError, NotCommittedError, StoreError
from ..format import spec
from ..format.local_room import LocalRoom, local_room
from ..format.names import LATEST_BYTES_MAX, LATEST_NAME, step_of
from ..stores.base import Store
from ..stores.url import open_store
from ..tools.behind import mark_of
from ..tools.inspect_run import describe_run
from ..tools.run_listing import RunListing, find_run
from .contents import contents_of, part_bytes
from .data import Contents, RunData, Step
from .metrics import read_metrics
from .rules import findings_of
from .treemap import grow, parts_of

PARTS = 5  # of a state, drawn over the steps
PARTS_TENSORS_MAX = 50_000  # of all steps together: a step is drawn while no more were looked at
STEPS_MAX = 1000  # the newest are opened
SCRUB_NAME = "scrub.jsonl"
SCRUB_BYTES_MAX = 64 << 20


def read_run(path: str | os.PathLike[str]) -> RunData:
    """Return all that the report of a run shows.

    Args:
        path: directory or URL of the run.

    Raises:
        NotCommittedError: there is no run at ``path``.
        OptionError: ``path`` is no path.
    """
    store = open_store(path)
    run = find_run(path, newest=STEPS_MAX)
    timing = read_metrics(store)
    if run is None:
        if store.exists(spec.MANIFEST_NAME):
            raise NotCommittedError(
                f"{store.location} is one checkpoint, not a run. Give the directory above it, or "
                f"use 'holdfast inspect {store.location} --html FILE'"
            )
        if timing.counts is None:
            raise NotCommittedError(
                f"there is no run at {store.location}: no steps, and no metrics.jsonl. Give the "
                "directory that a Checkpointer saves to"
            )
        run = RunListing(store.location, (), None)
    document = describe_run(run)
    damage, scrubbed = _scrubbed(store)
    steps, contents = list[Step](), None
    parts, left = list[str](), PARTS_TENSORS_MAX
    for listed in reversed(document["steps"]):  # the newest first: its contents are shown
        checkpoint = _opened(run, listed)
        step = _step_of(run, listed, checkpoint, damage)
        if contents is None and checkpoint is not None:
            contents = _contents(listed["name"], checkpoint)
            parts = parts_of(grow(contents.tensors), PARTS) if contents else []
        if checkpoint is not None and (left := left - len(checkpoint.names())) > 0:
            step = replace(step, parts=_part_bytes(checkpoint, parts))
        if step.fault and _has_gone(run, step.name):
            continue  # it was deleted while it was read
        steps.append(step)
    steps = [step for step in steps if not _is_left_over(step, steps)]
    free = None
    with contextlib.suppress(StoreError):
        free = store.free_bytes()
    found = RunData(
        path=store.location,
        made=time.time(),
        version=__version__,
        latest=run.latest,
        steps=tuple(reversed(steps)),
        earlier_steps=run.earlier,
        free_bytes=free,
        timing=timing,
        contents=contents,
        scrubbed=scrubbed,
        behind=document.get("behind"),
        room=_local_room(steps, document.get("behind")),
    )
    return replace(found, findings=tuple(findings_of(found)))


def _local_room(steps: Sequence[Step], behind: Mapping[str, Any] | None) -> LocalRoom | None:
    if behind is None:
        return None
    here = [s for s in steps if s.state == "committed" and s.step is not None]  # the newest first
    sizes = {s.step: s.disk_bytes for s in here if s.step is not None}
    is_delta = bool(here and here[0].base)
    # Of the disks of several hosts each has some files of a step.
    return local_room(sizes, behind["waiting"], is_shared=bool(here), is_delta=is_delta)


def _is_left_over(step: Step, steps: Sequence[Step]) -> bool:
    """Whether it is an empty directory, which a store may keep of a step that was retired."""
    number = step_of(step.name)
    newest = max((s.step for s in steps if s.step is not None), default=-1)
    is_old = number is not None and number < newest
    return step.state == "uncommitted" and is_old and not step.disk_bytes


def _opened(run: RunListing, listed: Mapping[str, Any]) -> Checkpoint | None:
    if listed["state"] not in ("committed", "damaged"):
        return None
    with contextlib.suppress(HoldfastError):
        return open_checkpoint(f"{run.location}/{listed['name']}")
    return None


def _contents(name: str, checkpoint: Checkpoint) -> Contents | None:
    with contextlib.suppress(HoldfastError):
        return contents_of(name, checkpoint)
    return None


def _part_bytes(checkpoint: Checkpoint, parts: Sequence[str]) -> dict[str, int]:
    with contextlib.suppress(HoldfastError):
        return part_bytes(checkpoint, parts)
    return {}


def _is_there(run: RunListing, name: str) -> bool:
    """Whether a step is a checkpoint right now."""
    with contextlib.suppress(HoldfastError):
        return open_store(run.location).exists(f"{name}/{spec.MANIFEST_NAME}")
    return False


def _has_gone(run: RunListing, name: str) -> bool:
    """Whether a step was deleted meanwhile; the newest, which LATEST names, lost its MANIFEST."""
    if _is_there(run, name):
        return False
    with contextlib.suppress(HoldfastError):
        store = open_store(run.location)
        return store.get(LATEST_NAME, LATEST_BYTES_MAX).decode(errors="replace").strip() != name
    return True


def _step_of(
    run: RunListing,
    listed: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    damage: Mapping[tuple[str, str], str],
) -> Step:
    fault = listed["error"] or ""
    lacks = listed["lacks"]
    if lacks and not (run.earlier and _is_there(run, lacks["name"])):
        fault = fault or f"its base {lacks['name']} {lacks['fault']}"
    size = stored = 0
    metrics: dict[str, float] = {}
    if checkpoint is not None:
        table = checkpoint.subject.manifest
        size = sum(tensor.size_bytes for tensor in table.table.header.tensors)
        stored = int(table.chunk_bytes.sum())
        metrics = {name: _finite(value) for name, value in checkpoint.metrics.items()}
        fault = fault or damage.get((listed["name"], checkpoint.save_id), "")
        fault = fault or wrong_files(checkpoint)
    state = listed["state"]
    return Step(
        name=listed["name"],
        step=listed["step"],
        state="damaged" if fault and state == "committed" else state,
        disk_bytes=listed["disk_bytes"],
        size_bytes=size,
        stored_bytes=stored,
        codecs=tuple(listed["codecs"]),
        base=listed["base"],
        world_size=listed["world_size"],
        metrics=metrics,
        fault=fault,
        unfinished=listed["unfinished"] or "",
    )


def _finite(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def wrong_files(checkpoint: Checkpoint) -> str:
    """Say of data files that they are missing or have another size; reads no byte of them."""
    subject, world_size = checkpoint.subject, checkpoint.world_size
    ranks = subject.manifest.table.file_rank.tolist()
    found: dict[str, int] = {}
    for folder in {name.rpartition("/")[0] for name in checkpoint.file_names}:
        with contextlib.suppress(StoreError):
            found |= {f"{folder}/{e.name}": e.size_bytes for e in subject.store.list(folder)}
    columns = (checkpoint.file_names, checkpoint.file_bytes, ranks)
    for name, size, rank in zip(*columns, strict=True):
        if name not in found:
            if mark_of(subject.store.above()).is_elsewhere(rank, world_size):
                continue
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]:,} bytes; expected {size:,}"
    return ""


def _scrubbed(store: Store) -> tuple[dict[tuple[str, str], str], str]:
    """Return what `holdfast scrub` found: (step, save) → damage, and when it last ended a pass."""
    damage: dict[tuple[str, str], str] = {}
    last = ""
    data = b""
    with contextlib.suppress(StoreError):
        if store.exists(SCRUB_NAME):
            data = store.get(SCRUB_NAME, SCRUB_BYTES_MAX)
    for row in _rows(data):
        if row.get("verb") == "pass":
            last = str(row.get("time", ""))[:19]
        if row.get("verb") == "scrub":
            key = (str(row.get("step")), str(row.get("save_id")))
            damage.pop(key, None)
            faults = row.get("damage")
            if not row.get("good", True) and isinstance(faults, list) and faults:
                first = faults[0] if isinstance(faults[0], dict) else {}
                more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
                damage[key] = f"scrub found: {first.get('what', 'damage')}{more}"
    return damage, last


def _rows(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row
