"""What is missing of a checkpoint that was removed, or replaced, while it was read.

It looks like damage, and is none. Knows what MANIFEST says by now.
"""

import errno

from ..errors import CorruptError, NotCommittedError, ReplacedError, StoreError, VersionError
from ..format import spec
from ..format.manifest import decode_manifest
from ..stores.base import Store


def gone(store: Store) -> NotCommittedError:
    """Return the error for a checkpoint that another process has removed."""
    return NotCommittedError(
        f"{store.location} was deleted by another process while it was read. Open a newer "
        "checkpoint, or keep more of them"
    )


def check_not_removed(store: Store, name: str, error: StoreError) -> None:
    """Check that a data file was not removed while it was open, as NFS then says of a read.

    Raises:
        NotCommittedError: it was, with its checkpoint.
        ReplacedError: it was, and another checkpoint is here.
    """
    if error.errno == errno.ESTALE:
        check_still_named(store, name, error)


def check_still_named(store: Store, name: str, error: Exception) -> None:
    """Check that a data file which is missing is one that MANIFEST names.

    Raises:
        NotCommittedError: MANIFEST is gone too.
        ReplacedError: it is of another save.
    """
    if not store.exists(spec.MANIFEST_NAME):
        raise gone(store) from error
    check_not_replaced(store, name, error)


def check_not_replaced(store: Store, name: str, error: Exception) -> None:
    """Check that MANIFEST is still of the save that something missing belongs to.

    Args:
        name: of a data file, or its directory.

    Raises:
        ReplacedError: it is of another.
    """
    try:
        data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        save_id = decode_manifest(data, store.location).table.header.save_id
    except (CorruptError, StoreError, VersionError):
        return
    if save_id != name.split("/")[1]:
        raise ReplacedError(
            f"{store.location} was replaced by another checkpoint while it was read. Open it again"
        ) from error
