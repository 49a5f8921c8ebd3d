"""COMMITTED → RETIRED, and what dead saves left. Knows stores and names, no ranks.

The manifest goes first, durably, and the data after it: at no moment does a manifest name what is
    gone.
"""

import contextlib
import logging
import time

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
    store.remove(spec.MANIFEST_NAME)
    store.sync_directory()
    _remove_data(store)
    for entry in store.list():
        if entry.name.startswith(spec.PENDING_MANIFEST_PREFIX):
            store.remove(entry.name)
    store.remove_directory()


def sweep(store: LocalStore, older_than_s: float) -> None:
    """Remove data that no manifest here names, when all of it is older than the grace period.

    A save that is still being written is younger, so it is left alone.
    """
    keep = ""
    if store.exists(spec.MANIFEST_NAME):
        data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        keep = decode_manifest(data, store.location).table.header.save_id
    if not store.exists(spec.DATA_DIRECTORY):
        return
    now = time.time()
    for entry in store.list(spec.DATA_DIRECTORY):
        below = f"{spec.DATA_DIRECTORY}/{entry.name}"
        if entry.kind != "directory" or entry.name == keep:
            continue
        names = [f"{below}/{file.name}" for file in store.list(below)]
        newest = max([store.modified_s(name) for name in [below, *names]])
        if now - newest > older_than_s:
            for name in names:
                store.remove(name)
            store.remove_directory(below)
            logger.info("removed %s/%s, left by a save that died", store.location, below)
    if not keep:
        for name in (spec.DATA_DIRECTORY, ""):
            with contextlib.suppress(StoreError):
                store.remove_directory(name)


def _remove_data(store: LocalStore) -> None:
    if not store.exists(spec.DATA_DIRECTORY):
        return
    for save in store.list(spec.DATA_DIRECTORY):
        below = f"{spec.DATA_DIRECTORY}/{save.name}"
        for file in store.list(below):
            store.remove(f"{below}/{file.name}")
        store.remove_directory(below)
    store.remove_directory(spec.DATA_DIRECTORY)
