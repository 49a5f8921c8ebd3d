"""What a store is: names and bytes below one root. Knows nothing of what the bytes mean."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .._core import Vfs
from ..errors import StoreError

Names = list[tuple[str, str]]  # each with the kind of what it names, as `Entry` has it

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

    def sync_made(self, name: str) -> None:
        """Make ``name`` durable as an entry of its directory, and the directories this store made.

        Whoever makes an entry syncs it: a cluster file system may promise it to nobody else.
        """

    def sync_path(self, name: str) -> None:
        """Make the rest of the directory entries of ``name`` durable, up to the root's.

        Others may have made them: ranks, or processes that were killed before they synced them.
        """

    def sync_above(self, name: str) -> None:
        """Make those above the root durable, where they are young; ``name`` has just been made."""

    def get(self, name: str, bytes_max: int) -> bytes:
        """Read a whole file of at most ``bytes_max`` bytes."""

    def prepare(self, pending_name: str, data: bytes) -> None:
        """Write a file under a name that `publish` or `replace` takes away; its bytes are durable.

        After a crash it may be there; another may remove it meanwhile, then there is none.
        """

    def publish(self, pending_name: str, name: str) -> bool:
        """Give what `prepare` wrote its name, in one atomic, exclusive, durable step.

        Returns:
            False: something has this name already. What was prepared is gone either way.
        """

    def replace(self, pending_name: str, name: str) -> None:
        """Give what `prepare` wrote its name in place of what has it, in one atomic, durable step.

        When it fails, one or the other is there.
        """

    def sync_directory(self, name: str = "") -> None:
        """Make the entries of one directory durable."""

    def list(self, name: str = "") -> list[Entry]:
        """List a directory, sorted by name."""

    def scan(self) -> Iterator[str]:
        """Yield the names in the root in no order, one by one."""

    def some(self, count: int) -> Names:
        """Return some names in the root, in no order, with their kinds; all, if there are fewer."""

    def kind(self, name: str) -> str:
        """Return "file", "directory" or "other"; empty: nothing of this name is there."""

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
