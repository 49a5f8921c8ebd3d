"""Removal of what may be there again: data of a copy, whose names are those of the original.

A save's names never come back, so who was frozen while it removed them harms nobody later. A copy
brings the same names again. So the data of a save is not removed where it is: it is moved away
first, in one step that fails once another has taken over.

- Who removes announces it: a directory of its own. Then it bars the save, removes what is pending
  of copies, and looks whether MANIFEST names the data. Only then does it move the data into its
  directory, and remove it there.
- Who takes over (`lift`) removes the directories of all others, then the bar, then looks again.
- Who copies does that first. It prepares MANIFEST, looks that nothing is announced, then that the
  data is there, and publishes.

So data that is moved away was named by nothing, and nothing is published that names it: if what is
pending was there before the removal looked for it, it was removed; if not, it was prepared after
the announcement, and its writer sees that, or that the data is gone.

Where nothing can be moved (object stores), data is removed where it is: `docs/commit.md` says what
that leaves open. Knows stores and names, no ranks.
"""

import errno
import secrets

from ..errors import NoSpaceError, StoreError
from ..format import spec
from ..format.unfinished import COPY
from ..stores.base import Entry, Store
from .discard import pending_name

ANNOUNCED = ".gone-"  # in the names of a removal
_BY, _DATA = "by", "data"  # in a directory of a removal
OVER = ".over"  # in the name of what is to replace another checkpoint, and of its lock
CLOSED = b"closed"  # content of a lock that keeps a save from replacing anything: no stamp is so
STAMP_BYTES_MAX = 4096
ATTEMPTS = 8  # to lift what others announce meanwhile
_GONE = (errno.ENOENT, errno.ENOTDIR)


bar_of = pending_name  # what bars a save has the name of its pending manifest


def pending_of_copy(store: Store, save: str) -> str:
    """Return the name that a copy prepares its MANIFEST under: no other copy has it."""
    return f"{bar_of(save)}{COPY}{secrets.token_hex(8)}" if store.shows_pending else bar_of(save)


def is_locked_out(store: Store, save: str) -> bool:
    """Take the lock without which a save replaces nothing (`engine/swap.py`).

    Returns:
        False: the save has it, and MANIFEST is still what it is to replace.
    """
    lock = f"{bar_of(save)}{OVER}"
    try:
        if store.claim(lock, CLOSED):
            return True
        return store.get(lock, STAMP_BYTES_MAX) != store.stamp(spec.MANIFEST_NAME).encode()
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return False  # it has just ended


def announce(store: Store, save: str) -> str:
    """Announce that a save is to be removed; empty where nothing can be moved, or there is no room.

    On a full disk what is to be removed is removed all the same.
    """
    if not store.shows_pending:
        return ""
    mine = f"{bar_of(save)}{ANNOUNCED}{secrets.token_hex(8)}"
    try:
        store.claim(f"{mine}/{_BY}", b"")  # nobody else has made it: it may say so of a lost reply
    except NoSpaceError:
        return ""
    return mine


def revoke_copies(store: Store, save: str) -> None:
    """Remove what is pending of copies of a save."""
    for entry in _beside(store, save, COPY):
        store.remove(entry.name)


def announced(store: Store, save: str) -> str:
    """Return the name under which somebody removes a save; empty: nobody does."""
    return next((entry.name for entry in _beside(store, save, ANNOUNCED)), "")


def take_away(store: Store, save: str, mine: str) -> str:
    """Move the data of a save to where it is removed; return where it is now.

    Args:
        mine: what `announce` returned. If another has taken over, the data stays, and is not there.
            What is mounted here, or is of a lower layer of overlayfs, cannot be moved.
    """
    below = f"{spec.DATA_DIRECTORY}/{save}"
    if not mine:
        return below
    try:
        store.move(below, f"{mine}/{_DATA}", makes=False)
    except StoreError as error:
        if error.errno == errno.EXDEV:
            return below
        if error.errno not in _GONE:
            raise
    return f"{mine}/{_DATA}"


def lift(store: Store, save: str) -> None:
    """End what removes a save, ours and others'; the bar goes too."""
    for _ in range(ATTEMPTS):
        for entry in _beside(store, save, ANNOUNCED):
            remove_announced(store, entry)
        store.remove_directory(bar_of(save))
        # Who announced before its bar, which may be the one that has just gone, is seen now.
        if not announced(store, save):
            return


def remove_announced(store: Store, entry: Entry) -> None:
    """Remove the directory of a removal, with what was moved into it; or what has such a name."""
    name = entry.name
    if entry.kind != "directory":
        store.remove(name)
        return
    files = [f"{name}/{_DATA}/{file.name}" for file in _list(store, f"{name}/{_DATA}")]
    store.remove_all(files)
    store.remove_directory(f"{name}/{_DATA}")
    store.remove(f"{name}/{_BY}")
    store.remove_directory(name)


def _beside(store: Store, save: str, part: str) -> list[Entry]:
    """Return what is beside MANIFEST, of a save, and of one kind."""
    if not store.shows_pending:
        return []
    beginning = f"{bar_of(save)}{part}"
    return [entry for entry in _list(store, "") if entry.name.startswith(beginning)]


def _list(store: Store, name: str) -> list[Entry]:
    try:
        return store.list(name)
    except StoreError as error:
        if error.errno not in _GONE:
            raise
        return []
