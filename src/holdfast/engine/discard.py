"""Files of a save that no manifest names. Knows stores and names."""

import contextlib

from ..errors import StoreError
from ..format import spec
from ..stores.base import Store

pending_name = spec.PENDING_MANIFEST_PREFIX.__add__  # of the manifest of a save, by its id


def remove_files(store: Store, save_id: str, prefix: str = "") -> None:
    """Remove files that no manifest names, and directories left empty; let errors be.

    Args:
        prefix: only those whose names begin so.
    """
    below = f"{spec.DATA_DIRECTORY}/{save_id}"
    with contextlib.suppress(StoreError):
        names = [entry.name for entry in store.list(below)]
        store.remove_all([f"{below}/{name}" for name in names if name.startswith(prefix)])
    for directory in (below, spec.DATA_DIRECTORY, ""):
        with contextlib.suppress(StoreError):
            store.remove_directory(directory)
