"""COMMITTED → COMMITTED on an object store: one conditional PUT over the MANIFEST that is there.

Invariants, besides those of `commit`:
  1. The new MANIFEST is put only in place of the one that was looked at, told by its ETag.
  2. Before that, a save takes its lock, an object ``.manifest-<save_id>.over`` with that ETag, and
     looks whether its data is all there. It takes the lock once, and tries once.
  3. Whoever deletes the data of a dead save takes the save's lock first. If the save has the lock,
     and MANIFEST still has the ETag in it, the PUT may be on its way, and the data stays.
  4. A lock goes when that data is gone, or its MANIFEST is there.
  5. Old data goes when the new MANIFEST is there, never before. Until then a second copy of the old
     MANIFEST, the mark, says which data that is (`engine/retire.py: settle`).

So no clock decides. Of two saves that replace the same checkpoint the first one stays. Knows no
ranks.
"""

import contextlib
import errno
from collections.abc import Callable
from types import TracebackType

from ..errors import ReplacedError, StoreError
from ..format import spec
from ..stores.base import Store
from .commit import Begun, Commit, check_present
from .removal import OVER
from .retire import LEAVING_PREFIX


class Swap(Commit):
    """A commit whose manifest may take the place of another one, by its stamp."""

    def __init__(self, store: Store, save_id: str) -> None:
        super().__init__(store, save_id)
        self._lock = f"{self._pending}{OVER}"
        self._mark = f"{LEAVING_PREFIX}{save_id}"

    def __enter__(self) -> "Swap":
        return self

    def lock(self, stamp: str) -> None:
        """Take the lock, with the stamp of what is to be replaced; leave the mark.

        Raises:
            StoreError: another job has taken this save for dead.
        """
        store = self._store
        old = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        if not store.claim(self._lock, stamp.encode()):
            error = StoreError(f"{store.location}: another job has taken this save for dead")
            error.errno = errno.EEXIST
            raise error
        check_present(store, self.manifest)
        store.claim(self._mark, old)

    def swap(self, stamp: str) -> None:
        """Put the manifest in place of the one with this stamp.

        Raises:
            ReplacedError: another one is there by now, or none.
            StoreError: the store failed. The manifest may be there.
        """
        store, self._may_be_there = self._store, True
        if store.swap(self._pending, spec.MANIFEST_NAME, stamp) or self._is_there():
            return
        self._may_be_there = False
        raise ReplacedError(
            f"{store.location} was replaced or deleted by another process during this save; the "
            "files of this save were deleted. Let one job save to each path"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tidy up, also after what went well."""
        super().__exit__(kind, error, trace)
        if self.may_stand:
            return  # the lock keeps the data
        with contextlib.suppress(StoreError):
            if error is not None:
                self._store.remove(self._mark)
            self._store.remove(self._lock)

    def _is_there(self) -> bool:
        """Return whether MANIFEST is ours: the answer to the PUT may have been lost."""
        try:
            found = self._store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        except StoreError as error:
            if error.errno not in (errno.ENOENT, errno.EFBIG):
                raise
            return False
        return found == self._data


def commit_swapped(store: Store, begun: Begun, look: Callable[[], object]) -> None:
    """Publish what was written, in place of what is here. `remove_replaced` follows.

    Args:
        look: called when all is durable; raises when it may not be published after all.

    Raises:
        AlreadyCommittedError: nothing was here, and now another save's checkpoint is.
        ReplacedError: what was here is no longer.
        StoreError: the store failed, or another job has taken this save for dead.
    """
    with Swap(store, begun.header.save_id) as made:
        made.prepare(begun)
        try:
            stamp = store.stamp(spec.MANIFEST_NAME)
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            look()
            made.publish()
            return
        made.lock(stamp)
        look()
        made.swap(stamp)
