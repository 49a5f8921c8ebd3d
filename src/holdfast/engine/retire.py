"""COMMITTED → RETIRED, and what dead saves left. Knows stores and names, no ranks.

The manifest goes first, durably, and the data after it: at no moment does a manifest name what
is gone. Whoever wrote the data may yet be alive, frozen or slow: before it goes, a directory bars
the place of its pending manifest, so that it can neither be made nor linked; whoever makes one
later finds the data gone (`commit` looks between the two).

A link needs its base, and may be published by another job while the base is let go. So the base is
marked first; then what is pending of links made from it is removed; then published ones are looked
for, which keep it. `commit` looks for the mark when its manifest is pending: either it finds the
mark, or the manifest was there before the mark, and is found.
"""

import contextlib
import errno
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, methodcaller

from ..errors import CorruptError, StoreError
from ..format import spec
from ..format.header import Header
from ..format.manifest import decode_manifest
from ..format.names import is_save_id
from ..stores.base import Entry, Store
from .marker import remove_marker
from .removal import (
    ANNOUNCED,
    OVER,
    announce,
    bar_of,
    is_locked_out,
    lift,
    remove_announced,
    revoke_copies,
    take_away,
)

logger = logging.getLogger("holdfast")

# What is said where a pending manifest is gone, or barred; and where it can have no second name.
_TAKEN = "another job may have taken this save for dead, or deleted its base"
_NO_LINKS = ". Or this file system has no hard links: then choose a directory on another one"
REVOKED = {number: _TAKEN for number in (errno.ENOENT, errno.EEXIST, errno.ESTALE)}
REVOKED |= {errno.EPERM: _TAKEN + _NO_LINKS}

# The mark of a checkpoint that is being let go. One that a crash left goes with the checkpoint: it
# says no more than that the next link is to be made from another.
LEAVING_PREFIX = f"{spec.PENDING_MANIFEST_PREFIX}leaving-"

# The end of the name that a pending manifest has to be renamed from over one of the same content
# (`engine/replace.py`); over another checkpoint it is `OVER`.
AGAIN = ".again"

# Longer than any save takes, shorter than a disk takes to fill with what dead ones left.
GRACE_S = 24 * 3600.0

_NAME, _IS_MARK = attrgetter("name"), methodcaller("startswith", LEAVING_PREFIX)


@contextlib.contextmanager
def leaving(store: Store) -> Iterator[None]:
    """Mark a checkpoint while it is decided whether it goes, and while it goes.

    The mark is a second name of MANIFEST, since that takes no room on a full disk. Each job that
    lets go of the same checkpoint has its own.
    """
    mark = f"{LEAVING_PREFIX}{os.urandom(8).hex()}"
    try:
        if store.can_link and store.exists(spec.MANIFEST_NAME):
            store.link(spec.MANIFEST_NAME, mark)
        yield
    finally:
        with contextlib.suppress(StoreError):
            store.remove(mark)


def is_leaving(store: Store) -> bool:
    """Return whether a checkpoint has a mark; False where there is no directory any more."""
    try:
        return any(map(_IS_MARK, map(_NAME, store.list())))
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return False


def is_being_replaced(store: Store) -> bool:
    """Return whether somebody may be about to publish another checkpoint in this one's place."""
    return any(replacer_of(entry.name) for entry in store.list())


def replacer_of(name: str) -> str:
    """Return the save whose mark a name is; empty: it is none of who replaces a checkpoint."""
    owner = name.removeprefix(LEAVING_PREFIX)
    return owner if owner != name and is_save_id(owner) else ""


def settle(store: Store) -> None:
    """Remove what was replaced, and the marks of those who did, or never will.

    A mark whose pending manifest is gone is of one of these: the manifest is made before the mark,
    once. What it names is then published, or never again.

    Raises:
        CorruptError: MANIFEST is damaged, so nobody can tell what it names.
        StoreError: something could not be removed.
    """
    for entry in store.list():
        owner = replacer_of(entry.name)
        is_over = owner and not store.exists(f"{spec.PENDING_MANIFEST_PREFIX}{owner}{OVER}")
        if not is_over and not (owner and owner == _published(store)):
            continue
        old = _save_of(store, entry.name)
        if old and old != _published(store):
            _remove_save(store, old)
        store.remove(entry.name)


def finish_retirement(store: Store) -> None:
    """Finish the removal of a checkpoint whose job died on the way: a mark is there, no MANIFEST.

    The mark says which save that was: data of others here stays. Whoever began may yet go on.
    """
    for name in filter(_IS_MARK, map(_NAME, store.list())):
        save = "" if replacer_of(name) else _save_of(store, name)
        if save and _remove_save(store, save):
            store.remove(name)
    if not _saves(store, _list_if_there(store, "")):
        store.remove_directory(spec.DATA_DIRECTORY)


def revoke_links(store: Store, base: str) -> None:
    """Remove from a directory what is pending of links that are made from a base.

    What cannot be decoded is being written, or torn: who writes it looks for the mark after that.

    Raises:
        StoreError: it cannot be found out what is there.
        VersionError: a newer holdfast wrote it.
    """
    for entry in store.list():
        is_file = entry.kind == "file" and not entry.name.startswith(LEAVING_PREFIX)
        if is_file and is_pending(entry.name) and _pending_base(store, entry.name) == base:
            store.remove(entry.name)


def let_go(store: Store, kept: str | None) -> None:
    """Remove a host's files of a checkpoint whose MANIFEST is on another host, or was.

    Args:
        kept: the save whose files stay; None: none does.
    """
    if kept is None:
        retire(store)
    entries = _list_if_there(store, "") if kept else []
    for entry in entries:
        if ANNOUNCED in entry.name and is_pending(entry.name):
            remove_announced(store, entry)  # who moved it there has died
    for save in _saves(store, entries):
        if save != kept:
            _remove_save(store, save)


def retire(store: Store, also: Callable[[], None] = lambda: None) -> None:
    """Remove a checkpoint and its directory; ``also`` removes foreign files, before any mark goes.

    Raises:
        StoreError: something could not be removed; what is left has no manifest any more.
    """
    remove_marker(store)  # durably: programs take what has one for whole
    if store.exists(spec.SIGNATURE_NAME):  # of nothing, were it to outlive the manifest
        store.remove(spec.SIGNATURE_NAME)
    store.remove(spec.MANIFEST_NAME)
    remove_marker(store)  # of a job that healed it meanwhile
    for save in _saves(store, _list_if_there(store, "")):
        _remove_save(store, save)
    store.remove_directory(spec.DATA_DIRECTORY)
    also()
    for entry in _list_if_there(store, ""):
        if is_pending(entry.name):
            _remove_pending(store, entry)
    store.remove_directory()


def is_pending(name: str, prefix: str = spec.PENDING_MANIFEST_PREFIX) -> bool:
    """Return whether a file was to get another name; what is not ASCII, none of us has named."""
    return name.startswith(prefix) and name.isascii()


def sweep(
    store: Store, before_s: float, is_base: Callable[[], bool] = lambda: False
) -> float | None:
    """Remove data that no manifest here names, when all of it was last modified before a time.

    A save that is still being written is younger, so it is left alone.

    Args:
        before_s: by the clock that gives files their times, as `Store.modified_s` tells them:
            this machine's may be wrong.
        is_base: whether deltas are made from the checkpoint here, asked where MANIFEST is missing:
            it is lost then, and can be rebuilt.

    Returns:
        Until when nothing can be left to remove but what others leave meanwhile, by that clock;
        None: that may be at any time.
    """
    entries = _list_if_there(store, "")
    saves, is_pure = _saves(store, entries), not any(is_pending(e.name) for e in entries)
    if store.exists(spec.MANIFEST_NAME) and len(saves) <= 1 and is_pure:
        return before_s + GRACE_S
    keep = _published(store)
    # Asked first: whatever is removed below makes it young again.
    young_s = math.inf if keep else _modified_s(store, "")
    spares = (lambda: False) if keep else is_base
    found = [_sweep_save(store, save, before_s, spares) for save in saves if save != keep]
    is_clean = is_pure and not any(found) and not store.shows_pending
    if not is_clean:
        sweep_pending(store, before_s, spec.PENDING_MANIFEST_PREFIX)
        settle(store)
    if young_s < before_s:
        store.unbar(spec.MANIFEST_NAME)
        for name in (spec.DATA_DIRECTORY, ""):
            with contextlib.suppress(StoreError):
                store.remove_directory(name)
        young_s = math.inf
    return min(young_s, before_s + GRACE_S) if is_clean else None  # a bar goes when it is old


def _sweep_save(store: Store, save: str, before_s: float, spares: Callable[[], bool]) -> bool:
    """Remove the data of a save, if it is old; return whether there was anything.

    Among objects a directory is what is below it, but some servers go on listing one after the last
    object in it: what is listed and holds nothing needs no removal, and nobody to be barred.
    """
    below = f"{spec.DATA_DIRECTORY}/{save}"
    names = [f"{below}/{file.name}" for file in _list_if_there(store, below)]
    if not names and not store.shows_pending:
        return False
    is_old = _is_older(store, [below, *names], before_s) and not spares()
    if is_old and _remove_save(store, save):
        logger.info("deleted %s/%s of a save that died", store.location, below)
    return True


def sweep_pending(store: Store, before_s: float, *prefixes: str) -> None:
    """Remove files that were to get another name, but whose writer died.

    A mark stays as long as there is a MANIFEST: who made it may be frozen, and go on.
    """
    for entry in store.list():
        if entry.name.startswith(LEAVING_PREFIX) and store.exists(spec.MANIFEST_NAME):
            continue  # those of who replaces a checkpoint are settled
        is_wanted = any(is_pending(entry.name, prefix) for prefix in prefixes)
        if not is_wanted or _is_lock_of_data(store, entry.name):
            continue
        if _is_older(store, [entry.name], before_s):
            _remove_pending(store, entry)


def _is_lock_of_data(store: Store, name: str) -> bool:
    """Return whether a lock keeps data that no manifest names: who has it may be frozen."""
    save = name.removeprefix(spec.PENDING_MANIFEST_PREFIX).removesuffix(OVER)
    is_lock = name.endswith(OVER) and store.exists(f"{spec.DATA_DIRECTORY}/{save}")
    return is_lock and _published(store) != save


def _remove_save(store: Store, save: str) -> bool:
    """Remove the data of a save that no manifest names; False: it was published meanwhile."""
    mine = announce(store, save)
    try:
        if not revoke_save(store, save):
            return False
        revoke_copies(store, save)
        is_dead = _published(store) != save
        if is_dead:
            store.sync_directory()  # or a power cut brings back a MANIFEST that nobody synced away
            below = take_away(store, save, mine)
            store.remove_all([f"{below}/{file.name}" for file in _list_if_there(store, below)])
            store.remove_directory(below)
    except BaseException:
        with contextlib.suppress(StoreError):
            lift(store, save)  # or each attempt would leave a directory
        raise
    lift(store, save)
    if is_dead:
        store.remove(f"{bar_of(save)}{OVER}")
    return is_dead


def revoke_save(store: Store, save: str) -> bool:
    """Keep a save from publishing here from now on.

    Returns:
        False: it may be about to replace the MANIFEST that is here, and cannot be kept from that.
    """
    bar = f"{spec.PENDING_MANIFEST_PREFIX}{save}"
    store.revoke(bar, spec.MANIFEST_NAME)
    if store.shows_pending:
        for end in (OVER, AGAIN):
            store.remove(f"{bar}{end}")  # none is made from here on
        return True
    return not store.exists(spec.MANIFEST_NAME) or is_locked_out(store, save)


def _list_if_there(store: Store, name: str) -> list[Entry]:
    """List a directory that another process may be removing, too."""
    try:
        return store.list(name)
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return []


def _remove_pending(store: Store, entry: Entry) -> None:
    """Remove a pending manifest, or a bar that was left in its place."""
    if ANNOUNCED in entry.name:
        remove_announced(store, entry)
    elif entry.kind == "directory":
        lift(store, entry.name.removeprefix(spec.PENDING_MANIFEST_PREFIX))
    else:
        store.remove(entry.name)


def _pending_base(store: Store, name: str) -> str:
    """Return the name of the base in a manifest; empty: it has none, is not whole, or is gone."""
    try:
        return base_of(store, name)
    except CorruptError:
        return ""


def base_of(store: Store, name: str) -> str:
    """Return the name of the base in a manifest; empty: it has none, or is gone.

    Raises:
        CorruptError: it is not whole.
        VersionError: a newer holdfast wrote it.
    """
    header = _header_of(store, name)
    return header.base.name if header and header.base else ""


def _save_of(store: Store, name: str) -> str:
    """Return the id of the save that a manifest is of; empty: it is not whole, or is gone."""
    try:
        header = _header_of(store, name)
    except CorruptError:
        return ""
    return header.save_id if header else ""


def _header_of(store: Store, name: str) -> Header | None:
    try:
        data = store.get(name, spec.MANIFEST_BYTES_MAX)
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return None
    return decode_manifest(data, f"{store.location}/{name}").table.header


def _published(store: Store) -> str:
    """Return the id of the save that the manifest here is of; empty: there is none."""
    if not store.exists(spec.MANIFEST_NAME):
        return ""
    data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
    return decode_manifest(data, store.location).table.header.save_id


def _is_older(store: Store, names: list[str], before_s: float) -> bool:
    """Return whether all was last modified before a time, or is gone by now."""
    return all(_modified_s(store, name) < before_s for name in names)


def _modified_s(store: Store, name: str) -> float:
    try:
        return store.modified_s(name)
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return -math.inf


def _saves(store: Store, entries: Sequence[Entry]) -> list[str]:
    """List the directories of saves; what is a link is left alone: it may lead anywhere.

    Args:
        entries: of the checkpoint's directory.
    """
    if spec.DATA_DIRECTORY not in _directories(entries):
        return []
    return sorted(_directories(store.list(spec.DATA_DIRECTORY)))


def _directories(entries: Sequence[Entry]) -> set[str]:
    return {entry.name for entry in entries if entry.kind == "directory"}
