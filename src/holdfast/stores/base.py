"""What a store is: names and bytes below one root. Knows nothing of what the bytes mean."""

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .._core import Vfs
from ..errors import StoreError

# What the opening of a link, a directory, a socket, and of a pipe or device says.
NOT_A_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing below the root; ``kind`` is "file", "directory" or "other" (links, pipes)."""

    name: str
    kind: str
    size_bytes: int


class Store(Protocol):
    """Files below one root; names are relative, with forward slashes.

    Every method raises `StoreError` (`NoSpaceError` when the disk is full). A method that makes
    something durable returns only when it is. Thread-safe.
    """

    @property
    def location(self) -> str:
        """Where the root is, for people."""

    @property
    def vfs(self) -> Vfs:
        """The seam through which data files are read and written."""

    def sibling(self, name: str) -> "Store":
        """Return the store of another directory in the one that this root is in."""

    def exists(self, name: str) -> bool:
        """Return whether a file or directory of this name is there."""

    def create(self, name: str, *, direct: bool) -> int:
        """Open a new file for writing, with the directories above it; return its descriptor."""

    def open(self, name: str, *, direct: bool) -> int:
        """Open a regular file for reading; return its descriptor."""

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""

    def sync_path(self, name: str) -> None:
        """Make the directory entries of ``name`` durable, from its own up to the root's."""

    def get(self, name: str, bytes_max: int) -> bytes:
        """Read a whole file of at most ``bytes_max`` bytes."""

    def publish(
        self,
        name: str,
        pending_name: str,
        data: bytes,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Create ``name`` with ``data`` in one atomic, durable step; False when it exists already.

        ``pending_name`` may exist for a moment, and after a crash; when it is removed by another
        before that step, there is none.

        Args:
            check: called with ``pending_name`` durable, right before that step; it may raise.
        """

    def replace(
        self,
        name: str,
        pending_name: str,
        data: bytes,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Give ``name`` new contents in one atomic, durable step; ``check`` as in `publish`."""

    def list(self, name: str = "") -> list[Entry]:
        """List a directory, sorted by name."""

    def remove(self, name: str) -> None:
        """Remove a file; no error when it is not there."""

    def remove_directory(self, name: str) -> bool:
        """Remove a directory when it is empty; return whether it is gone."""


def list_if_there(store: Store) -> list[Entry] | None:
    """List a root; None when it is not there, or not yet.

    Raises:
        StoreError: it cannot be listed, or is a link to a disk that is not mounted.
    """
    try:
        return store.list()
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
    # It may be made right now.
    return store.list() if store.exists("") else None
