"""COMMITTED → RETIRED, and what dead saves left. Knows stores and names, no ranks.

The manifest goes first, durably, and the data after it: at no moment does a manifest name what
is gone.
"""

import contextlib
import logging

from ..errors import StoreError
from ..format import spec
from ..format.manifest import decode_manifest
from ..stores.local import LocalStore

logger = logging.getLogger("holdfast")


def retire(store: LocalStore) -> None:
    """Remove a checkpoint and its directory.

    Raises:
        StoreError: something could not be removed; what is left has no manifest any more.
    """
    if store.exists(spec.SIGNATURE_NAME):  # of nothing, were it to outlive the manifest
        store.remove(spec.SIGNATURE_NAME)
    store.remove(spec.MANIFEST_NAME)
    store.sync_directory()
    for save in _saves(store):
        below = f"{spec.DATA_DIRECTORY}/{save}"
        for file in store.list(below):
            store.remove(f"{below}/{file.name}")
        store.remove_directory(below)
    store.remove_directory(spec.DATA_DIRECTORY)
    for entry in store.list():
        if entry.name.startswith(spec.PENDING_MANIFEST_PREFIX):
            store.remove(entry.name)
    store.remove_directory()


def sweep(store: LocalStore, before_s: float) -> None:
    """Remove data that no manifest here names, when all of it was last modified before a time.

    A save that is still being written is younger, so it is left alone.

    Args:
        before_s: by the clock that gives files their times, as `LocalStore.modified_s` tells them:
            this machine's may be wrong.
    """
    keep = ""
    saves = _saves(store)
    if store.exists(spec.MANIFEST_NAME) and len(saves) <= 1:
        return  # the usual case: nothing but the checkpoint
    if store.exists(spec.MANIFEST_NAME):
        data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        keep = decode_manifest(data, store.location).table.header.save_id
    # Asked first: whatever is removed below makes it young again.
    is_dead = not keep and _is_older(store, [""], before_s)
    for save in saves:
        below = f"{spec.DATA_DIRECTORY}/{save}"
        if save == keep:
            continue
        names = [f"{below}/{file.name}" for file in store.list(below)]
        if _is_older(store, [below, *names], before_s):
            for name in names:
                store.remove(name)
            store.remove_directory(below)
            logger.info("removed %s/%s, left by a save that died", store.location, below)
    sweep_pending(store, spec.PENDING_MANIFEST_PREFIX, before_s)
    if is_dead:
        for name in (spec.DATA_DIRECTORY, ""):
            with contextlib.suppress(StoreError):
                store.remove_directory(name)


def sweep_pending(store: LocalStore, prefix: str, before_s: float) -> None:
    """Remove files that were to get another name, but whose writer died."""
    for entry in store.list():
        if entry.name.startswith(prefix) and _is_older(store, [entry.name], before_s):
            store.remove(entry.name)


def _is_older(store: LocalStore, names: list[str], before_s: float) -> bool:
    return max(store.modified_s(name) for name in names) < before_s


def _saves(store: LocalStore) -> list[str]:
    """List the directories of saves; what is a link is left alone: it may lead anywhere."""
    if spec.DATA_DIRECTORY not in _directories(store, ""):
        return []
    return sorted(_directories(store, spec.DATA_DIRECTORY))


def _directories(store: LocalStore, name: str) -> set[str]:
    return {entry.name for entry in store.list(name) if entry.kind == "directory"}
