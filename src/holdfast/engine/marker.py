"""The marker: the file that programs of PyTorch DCP look for, with one fixed line of ours in it.

It stands beside a MANIFEST that was saved through DCP's calls, and says nothing else: whatever
removes the MANIFEST removes it first. Knows stores and names.
"""

import errno
import os
from collections.abc import Sequence

from ..errors import StoreError
from ..format.names import DCP_METADATA_NAME
from ..format.spec import MARKER, PENDING_MANIFEST_PREFIX
from ..stores.base import NOT_A_FILE, Store


def is_marker(store: Store) -> bool:
    """Return whether the marker is there; False also where something else has its name.

    Raises:
        StoreError: that cannot be found out.
    """
    try:
        return store.get(DCP_METADATA_NAME, len(MARKER)) == MARKER
    except StoreError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EFBIG, *NOT_A_FILE):
            raise
        return False


def without_marker(store: Store, names: Sequence[str]) -> list[str]:
    """Return those of DCP's names in a directory that are not our marker."""
    ours = DCP_METADATA_NAME in names and is_marker(store)
    return [name for name in names if name != DCP_METADATA_NAME or not ours]


def put_marker(store: Store) -> None:
    """Put the marker there in one durable step; it takes the place of a file of that name.

    Raises:
        StoreError: disk, network or permission.
    """
    pending = f"{PENDING_MANIFEST_PREFIX}marker-{os.urandom(8).hex()}"
    store.prepare(pending, MARKER)
    store.replace(pending, DCP_METADATA_NAME)


def remove_marker(store: Store) -> None:
    """Remove the marker; what else has its name stays.

    Raises:
        StoreError: it could not be removed.
    """
    if is_marker(store):
        store.remove(DCP_METADATA_NAME)
        store.sync_directory()
