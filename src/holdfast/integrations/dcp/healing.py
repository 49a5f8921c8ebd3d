"""Puts the marker where a crash has kept it from: after MANIFEST, before the save was acknowledged.

Programs of DCP take a directory without one for no checkpoint. Errors are let be: what cannot be
written to is as it was.
"""

import contextlib
import itertools
import os

from ...engine.marker import put_marker, remove_marker
from ...engine.retire import is_leaving
from ...errors import HoldfastError
from ...format.names import DCP_METADATA_NAME, LATEST_NAME
from ...format.spec import MANIFEST_NAME
from ...stores.url import open_store

ENTRIES_MAX = 10_000  # of a directory, that are looked at


def heal(location: str) -> None:
    """Put the marker into a checkpoint and those beside it that have a MANIFEST and lack one."""
    above = os.path.dirname(location)
    with contextlib.suppress(OSError):
        _heal_one(location)
        if os.path.lexists(os.path.join(above, LATEST_NAME)):
            return  # a Checkpointer's, where nothing looks for a marker
        with os.scandir(above) as entries:
            for entry in itertools.islice(entries, ENTRIES_MAX):
                if entry.is_dir(follow_symlinks=False):
                    _heal_one(entry.path)


def _heal_one(location: str) -> None:
    def has(name: str) -> bool:
        return os.path.lexists(os.path.join(location, name))

    if has(DCP_METADATA_NAME) or not has(MANIFEST_NAME):
        return
    with contextlib.suppress(HoldfastError):  # OptionError of a name that is not UTF-8
        store = open_store(location)
        if not is_leaving(store):
            put_marker(store)
            if not has(MANIFEST_NAME):  # another job has retired it meanwhile
                remove_marker(store)
