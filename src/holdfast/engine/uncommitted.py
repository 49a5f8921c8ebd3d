"""Why there is no checkpoint in a directory, in words. Reads names, LATEST and markers; no data."""

import os

from ..errors import StoreError
from ..format import spec
from ..format.names import DCP_METADATA_NAME, LATEST_BYTES_MAX, LATEST_NAME, step_of
from ..format.unfinished import ELSEWHERE, unfinished
from ..stores.base import Store, file_names
from .marker import is_marker
from .other_hosts import has_no_manifest

NAMED_STEPS = 5  # in the error of one that is missing


def why_not_committed(store: Store) -> str:
    """Say why there is no checkpoint in a directory, and what to do."""
    place = store.location
    if not store.exists(""):
        here = _steps_beside(store)
        return f"{place} does not exist; expected the directory of a checkpoint{here}"
    try:
        names = [entry.name for entry in store.list()]
    except StoreError:
        return f"{place} is not a directory; expected the directory of a checkpoint"
    if DCP_METADATA_NAME in names and is_marker(store):
        return (
            f"{place} has no MANIFEST, but the marker of a checkpoint ({DCP_METADATA_NAME}): its "
            "deletion was cut short, or it was copied in part. Use another checkpoint"
        )
    if spec.DATA_DIRECTORY in names:
        if lost := lost_manifest(store):
            return lost
        if has_no_manifest(store):
            where = "Restore it on all hosts, or from the store"
            return f"{place} has data files but no MANIFEST: {ELSEWHERE}. {where}"
        why = unfinished(file_names(store), tells=store.shows_pending)
        return f"{place} has data files but no MANIFEST: {why}. Wait, or use another checkpoint"
    steps = sorted(name for name in names if name.startswith("step-"))
    if steps:
        return f"{place} is a run, not one checkpoint; give one of its steps, such as {steps[-1]}"
    if DCP_METADATA_NAME in names:
        return f"{place} is a checkpoint of PyTorch DCP; 'holdfast convert' converts it"
    return f"{place} has no MANIFEST: it is not a checkpoint; expected the directory of one"


def _steps_beside(store: Store) -> str:
    """Name the steps of the run, for someone who asks for another one."""
    try:
        names = [entry.name for entry in store.above().list()]
    except StoreError:
        return ""
    steps = sorted(name for name in names if step_of(name) is not None)
    if not steps:
        return ""
    older = f" and {len(steps) - NAMED_STEPS:,} older" if len(steps) > NAMED_STEPS else ""
    return f". Its run has {', '.join(steps[-NAMED_STEPS:])}{older}"


def lost_manifest(store: Store) -> str | None:
    """Say that a step without MANIFEST was committed once, when LATEST beside it names it.

    LATEST is moved after a commit; who retires the step that it names removes it first.
    """
    try:
        latest = store.above().get(LATEST_NAME, LATEST_BYTES_MAX).decode(errors="replace")
        data = store.list(spec.DATA_DIRECTORY)
    except StoreError:
        return None
    if not data or latest.strip() != os.path.basename(store.location):
        return None
    if store.exists(spec.MANIFEST_NAME):
        return None  # it was committed this moment
    return (
        f"{store.location} has data files but no MANIFEST, though LATEST names it: MANIFEST is "
        f"lost. Run 'holdfast repair {store.location}' to see whether it can be rebuilt"
    )
