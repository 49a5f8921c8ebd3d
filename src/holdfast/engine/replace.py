"""COMMITTED → COMMITTED: one atomic step from a checkpoint to another one in its place.

Invariants, besides those of `commit`:
  9. The old MANIFEST stands until the new one is renamed over it; by then every file that the new
     one names is durable.
  10. Old data goes when that rename is durable, never before.
  11. What must stay is looked for right before the rename: what a live delta is made from, what is
     signed, a run of another job.
  12. The last rename wins. Who finds another MANIFEST after its own rename is told, and removes
     its own data.

What is renamed is a second name of the pending manifest: a bar (`engine/retire.py`) is a directory,
which `link` refuses and `rename` would not. Then the old MANIFEST gets a second name too, the mark.
It keeps new deltas away, as that of `retire` does. It stays until the old data is gone, so that
whoever comes after a crash knows what to remove (`engine/retire.py: settle`).

`again` replaces a checkpoint by one of the same content (a rebase). Nothing is made invalid by
that, so it has no mark; but it gives way to who replaces the content. Knows no ranks.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from types import TracebackType

from ..errors import (
    AlreadyCommittedError,
    CorruptError,
    OptionError,
    ReplacedError,
    StoreError,
    VersionError,
    damaged,
)
from ..format import spec
from ..format.names import names_of_dcp, some, step_of
from ..format.table import content_digest
from ..stores.base import NOT_A_FILE, Store
from .check import read_manifest
from .commit import Begun, Commit, check_absent, check_base, commit
from .epochs import check_epoch
from .marker import without_marker
from .removal import OVER
from .retire import (
    AGAIN,
    GRACE_S,
    LEAVING_PREFIX,
    base_of,
    is_being_replaced,
    revoke_links,
    settle,
    sweep,
)
from .swap import commit_swapped
from .trust import digest, read_signature

logger = logging.getLogger("holdfast")


class Replacement(Commit):
    """A commit whose manifest may take the place of another one."""

    def __init__(self, store: Store, save_id: str, kind: str) -> None:
        """Prepare; ``kind`` is `OVER` or `AGAIN`."""
        super().__init__(store, save_id)
        self._store: Store = store
        self._ready = f"{self._pending}{kind}"
        self._mark = f"{LEAVING_PREFIX}{save_id}"

    def __enter__(self) -> "Replacement":
        return self

    def prepare(self, begun: Begun, content: str = "") -> None:
        """Do as `Commit`; make what is to be renamed, too."""
        super().prepare(begun, content)
        self._store.link(self._pending, self._ready)
        check_base(self._store, self.manifest)  # who lets go of it finds both names from here on

    def mark(self) -> None:
        """Give the MANIFEST that is there its second name."""
        self._store.link(spec.MANIFEST_NAME, self._mark)

    def sweep(self) -> None:
        """Remove what replaces that are over, or died a day ago, have left."""
        sweep(self._store, self._store.modified_s(self._ready) - GRACE_S)

    def replace(self) -> None:
        """Let the manifest take the place of the one there; return when it is durable.

        Raises:
            ReplacedError: another save has taken the place of this one already.
            StoreError: the disk failed, or another job has revoked what was prepared.
        """
        self._may_be_there = True
        try:
            self._store.rename(self._ready, spec.MANIFEST_NAME)
        except StoreError:
            if not self._was_renamed():  # else the reply to our own rename was lost (NFS)
                raise
        self._store.sync_directory()
        if self._found() != self._data:
            raise ReplacedError(
                f"{self._store.location} was replaced or deleted by another process right after "
                "this save; the files of this save were deleted. Let one job save to each path"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tidy up, also after what went well."""
        super().__exit__(kind, error, trace)
        is_replaced = isinstance(error, ReplacedError)
        names = [self._ready, self._pending]
        if error is not None and not self.may_stand and not is_replaced:
            names.append(self._mark)  # else it says what is to be removed
        with contextlib.suppress(StoreError):
            for name in names:
                self._store.remove(name)
        if is_replaced:
            with contextlib.suppress(CorruptError, StoreError, VersionError):
                settle(self._store)

    def _was_renamed(self) -> bool:
        """Return whether the rename took place, although it was told that it failed."""
        if self._found() == self._data:
            return True
        # The mark keeps the old MANIFEST alive, which a client of NFS 3 may take for the present
        # one: it sees no change of a directory within a tick of the server's clock.
        with contextlib.suppress(StoreError):
            self._store.remove(self._mark)
        return self._found() == self._data

    def _found(self) -> bytes:
        try:
            return self._store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        except StoreError as error:
            if error.errno not in (errno.ENOENT, errno.EFBIG, *NOT_A_FILE):
                raise
            return b""


def commit_over(store: Store, begun: Begun, look: Callable[[], object] = lambda: None) -> None:
    """Publish what was written, in place of what is here. `remove_replaced` follows.

    Args:
        look: as for `commit`.

    Raises:
        AlreadyCommittedError: what is here must stay.
        ReplacedError: another save was published over this one.
        FencedError: another job has the run.
        StoreError: the disk failed, or another job has revoked what was prepared.
    """
    if not store.can_replace:
        commit(store, begun, look)
        return
    if not store.can_link:

        def look_first() -> None:
            check_free(store, revoke=False)
            check_epoch(store)
            look()

        commit_swapped(store, begun, look_first)
        return
    with Replacement(store, begun.header.save_id, OVER) as made:
        made.prepare(begun)
        if not store.exists(spec.MANIFEST_NAME):
            look()
            with contextlib.suppress(AlreadyCommittedError):  # another save came in between
                made.publish()
                return
        made.mark()
        for entry in store.list():
            if entry.name.startswith(spec.PENDING_MANIFEST_PREFIX) and entry.name.endswith(AGAIN):
                store.remove(entry.name)
        check_free(store, revoke=True)
        check_epoch(store)
        look()
        made.replace()


def commit_again(store: Store, begun: Begun, content: str) -> None:
    """Replace the manifest of a checkpoint by one of the same content, whose files are durable.

    When it names them not, every file of this save is removed.

    Args:
        content: digest of what is there, and has to be.

    Raises:
        StateError: the content is another; nothing was replaced.
        ReplacedError: the checkpoint is no longer what it was.
    """
    with Replacement(store, begun.header.save_id, AGAIN) as made:
        made.prepare(begun, content)
        made.sweep()
        # In this order: who is over by the first look has renamed before the second.
        if is_being_replaced(store):
            raise ReplacedError(
                f"{store.location} is being replaced by another save, or was by one that died less "
                "than a day ago; nothing was changed. Try again when it has ended"
            )
        if content_digest(read_manifest(store).table) != content:
            raise ReplacedError(
                f"{store.location} was replaced by another save meanwhile; nothing was changed"
            )
        made.replace()


def remove_replaced(store: Store) -> None:
    """Remove what a commit in place of another one has left, and data of dead saves.

    Nothing here fails the save, which is committed: what stays, a later call removes.
    """
    try:
        _drop_old_signature(store)
        sweep(store, store.modified_s(spec.MANIFEST_NAME) - GRACE_S)
    except (CorruptError, OptionError, StoreError, VersionError) as error:
        logger.warning("%s is saved, but old files were not deleted: %s", store.location, error)


def _drop_old_signature(store: Store) -> None:
    """Remove a SIGNATURE of what was replaced, made between the last look and the rename."""
    if not store.exists(spec.SIGNATURE_NAME):
        return
    found = read_signature(store)
    data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
    if found and found.statement.manifest != digest(data):
        store.remove(spec.SIGNATURE_NAME)


def check_replaceable(store: Store, *, with_dcp: bool = False) -> None:
    """Check that a checkpoint may be saved here, also in place of one.

    Args:
        with_dcp: whether files of PyTorch DCP beside MANIFEST are the caller's affair.

    Raises:
        AlreadyCommittedError: what is here must stay.
        FencedError: another job has the run.
        OptionError: the directory holds something that is not holdfast's.
        VersionError: a newer holdfast wrote what is here.
    """
    if not store.exists(spec.MANIFEST_NAME):
        try:
            check_absent(store, with_dcp=with_dcp)
            return
        except AlreadyCommittedError:
            pass  # it was committed this moment
    if not store.can_replace:
        raise OptionError(
            f"{store.location} holds a committed checkpoint, and this store cannot replace one in "
            "its place; save under another step or path"
        )
    _check_ours(store)
    found = names_of_dcp(entry.name for entry in store.list())
    if found and not with_dcp and (found := without_marker(store, found)):
        raise OptionError(
            f"{store.location} holds two checkpoints: holdfast's (MANIFEST) and one of PyTorch DCP "
            f"({some(found)}). Remove the files of one, or save to another directory"
        )
    check_free(store, revoke=False)
    check_epoch(store)


def _check_ours(store: Store) -> None:
    """Check that MANIFEST is one of holdfast, damaged or not, and beside what may need it."""
    if store.kind("") != "directory":
        raise OptionError(
            f"{store.location} is a symlink, and its checkpoint may be the base of deltas "
            "elsewhere. With replace=True give the directory that it leads to, "
            f"{os.path.realpath(store.location)}"
        )
    what = f"{store.location}/{spec.MANIFEST_NAME}"
    advice = "which replace=True does not overwrite. Move it away, or save to another directory"
    try:
        data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            return  # it went this moment
        if error.errno not in (*NOT_A_FILE, errno.EFBIG):
            raise
        raise OptionError(f"{what} is not a regular file of at most 1 GiB, {advice}") from error
    if not data.startswith(spec.MANIFEST_MAGIC):
        raise OptionError(f"{what} is not a MANIFEST of holdfast, {advice}")
    with contextlib.suppress(CorruptError):  # a damaged one may be replaced
        read_manifest(store)


def check_free(store: Store, *, revoke: bool) -> None:
    """Check that no promise keeps the checkpoint here.

    Args:
        revoke: whether to remove what is pending of deltas of it. The mark has been made.

    Raises:
        AlreadyCommittedError: it is signed, or a delta is made from it.
        StoreError: that cannot be found out.
    """
    where = store.location
    if store.exists(spec.SIGNATURE_NAME):
        raise AlreadyCommittedError(
            f"{where} is a signed checkpoint, which replace=True does not replace. Remove its "
            f"{spec.SIGNATURE_NAME} first, or save under another step or path"
        )
    if delta := needed_by(store, revoke=revoke):
        raise AlreadyCommittedError(
            f"{where} is the base of the delta checkpoint {delta}, which would become "
            f"unreadable. Run 'holdfast rebase' on {delta} first, delete it, or save "
            "under another step or path"
        )


def needed_by(store: Store, *, revoke: bool) -> str:
    """Return the name of a delta that is made from the checkpoint here; empty: none is.

    Args:
        revoke: whether to remove what is pending of deltas of it. The mark has been made.

    Raises:
        CorruptError: one beside it cannot be read, so nobody can tell.
        StoreError: that cannot be found out.
        VersionError: a newer holdfast wrote one beside it.
    """
    if not store.can_link:
        return ""  # there are no chains
    name = os.path.basename(store.location)
    for entry in store.above().list():
        is_alike = (step_of(entry.name) is None) == (step_of(name) is None)  # as `choose_base`
        if entry.kind != "directory" or entry.name == name or not is_alike:
            continue
        other = store.sibling(entry.name)
        if revoke and other.exists(spec.DATA_DIRECTORY):
            revoke_links(other, name)
        if _may_need(other, name):
            return entry.name
    return ""


def _may_need(store: Store, name: str) -> bool:
    """Return whether a checkpoint is made from the one of a name.

    Raises:
        CorruptError: it cannot be read, so nobody can tell.
        VersionError: a newer holdfast wrote it.
    """
    if not store.exists(spec.MANIFEST_NAME):
        return False
    try:
        return base_of(store, spec.MANIFEST_NAME) == name
    except CorruptError as error:
        data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        if not data.startswith(spec.MANIFEST_MAGIC):
            return False  # a file of others
        text = f"{store.location} cannot be read, and may be a delta of {name}, which has to stay"
        raise damaged(store.location, f"{text}: {error}") from error
