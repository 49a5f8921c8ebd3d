"""What a store is: names and bytes below one root. Knows nothing of what the bytes mean.

A `Store` has the names: what is made, published, replaced, listed and removed. Its `DataFiles` have
the bytes of files that are open, and a `Queue` moves many of them at a time.
"""

import errno
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from .._core import Pool
from ..errors import StoreError

Fetch = Callable[[int, int, int, Callable[[memoryview], Any]], Future[Any]]  # fd, size, offset

Names = list[tuple[str, str]]  # each with the kind of what it names, as `Entry` has it

# What the opening of a link, a directory, a socket, and of a pipe or device says.
NOT_A_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL)


class Code(int):
    """An errno that a queue hands back, with the words of the store."""

    text: str

    def __new__(cls, number: int, text: str) -> "Code":
        made = super().__new__(cls, number)
        made.text = text
        return made


def forget_frames(error: BaseException) -> None:
    """Drop the frames of an error, which refer to memory that somebody waits for.

    To clear them is not enough: a frame refers to its function, and that to what it encloses.
    """
    causes, seen = [error], set[int]()
    while causes:
        cause = causes.pop()
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None
        more = cause.__cause__, cause.__context__
        causes += [each for each in more if each is not None and id(each) not in seen]


def words_of(code: int) -> str:
    """Return what an errno of a queue means."""
    return code.text if isinstance(code, Code) else os.strerror(code)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing below the root; ``kind`` is "file", "directory" or "other" (links, pipes).

    Attributes:
        tag: changes with what is in a file; empty: the list of this store does not say.
    """

    name: str
    kind: str
    size_bytes: int
    tag: str = ""


class DataFiles(Protocol):
    """Files that are open, by their descriptors. Thread-safe; raises `StoreError`."""

    def size(self, fd: int) -> int:
        """Return the size in bytes."""

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Read ``size`` bytes, fewer only at the end of the file."""

    def write(self, fd: int, data: "bytes | bytearray | memoryview", offset: int) -> None:
        """Write all of ``data``."""

    def allocate(self, fd: int, size: int) -> None:
        """Make room for so many bytes, where that can be done in advance."""

    def truncate(self, fd: int, size: int) -> None:
        """Say how long the file is in the end."""

    def start_sync(self, fd: int) -> None:
        """Let the disk begin with what was written, so that `sync` waits less: a hint."""

    def wants_direct(self, fd: int, size: int) -> bool:
        """Return whether a file of so many bytes is on a disk here, and not in the page cache."""

    def sync(self, fd: int) -> None:
        """Make what was written durable."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""


class Queue(Protocol):
    """Reads and writes in flight on files of one store, as `holdfast._core.Queue` has them.

    Attributes:
        direct: whether addresses, sizes and offsets have to be multiples of 4096.
        pending: requests submitted and not yet handed back by `wait`.
        fetch: begins a read into memory of the store's client, as much as may be there. In the
            thread that has read it, calls a function with it. None: there is no such memory, so
            `submit_read` copies nothing twice.
    """

    @property
    def direct(self) -> bool: ...
    @property
    def pending(self) -> int: ...
    @property
    def fetch(self) -> "Fetch | None": ...

    def submit_write(
        self, fd: int, address: int, size: int, offset: int, tag: int, cached: bool = False
    ) -> None:
        """Begin a write of memory, which stays until `wait` hands the request back."""

    def submit_read(
        self, fd: int, address: int, size: int, offset: int, tag: int, cached: bool = False
    ) -> None:
        """Begin a read."""

    def wait(self) -> list[tuple[int, int, int]]:
        """Block until a request is whole; return (tag, bytes done, errno) of each that is."""

    def close(self) -> None:
        """Finish what was submitted."""


class QueueKind(Protocol):
    """How a queue is to be: equal ones make queues that do the same.

    Attributes:
        lent_slots: slots of a pool that keep the store busy while more is read into others, where
            it sends memory from where it is. 0: it copies what it is given, so `DataFiles.write`
            does as well.
    """

    @property
    def lent_slots(self) -> int: ...

    def make(self, pool: Pool) -> Queue:
        """Make a queue that moves bytes from and to the memory of a pool."""


class Store(Protocol):
    """Files below one root; names are relative, with forward slashes.

    Every method raises `StoreError` (`NoSpaceError` when the disk is full). A method that makes
    something durable returns only when it is. Thread-safe.
    """

    @property
    def location(self) -> str:
        """Where the root is, for people."""

    @property
    def can_link(self) -> bool:
        """Whether a file can get a second name. Chains of deltas need that."""

    @property
    def can_replace(self) -> bool:
        """Whether a checkpoint can be replaced in its place: with links, or else by `swap`."""

    @property
    def shows_pending(self) -> bool:
        """Whether what is prepared is a file that others see, and can take away."""

    @property
    def run_bytes(self) -> int:
        """How many bytes are worth a read of their own; fewer are joined with their neighbours."""

    @property
    def vfs(self) -> DataFiles:
        """The seam through which data files are read and written."""

    def queue_kind(self, io: str, depth: int, block_bytes: int) -> QueueKind:
        """Return how data files are to be read and written: see `Options`."""

    def sibling(self, name: str) -> "Store":
        """Return the store of another directory in the one that this root is in."""

    def above(self) -> "Store":
        """Return the store of the directory that this root is in."""

    def below(self, name: str) -> "Store":
        """Return the store of a directory in this root."""

    def above_with(self, name: str, beginning: bytes) -> str:
        """Return the nearest place above the root with a file of this name that begins so.

        Empty: there is none, or none that can be read. An ENOTDIR: something above is a file.
        """

    def start_read(self, name: str) -> None:
        """Let the disk begin to read a small file, which is opened soon: a hint, never an error."""

    def exists(self, name: str) -> bool:
        """Return whether a file or directory of this name is there."""

    def having(self, names: Sequence[str], file: str) -> list[str]:
        """Return those of some directories in the root that have a file, in the same order."""

    def create(self, name: str, *, direct: bool) -> int:
        """Open a new file for writing, with the directories above it; return its descriptor."""

    def open(self, name: str, *, direct: bool) -> int:
        """Open a regular file for reading; return its descriptor."""

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

    def begin(self, pending_name: str, data: bytes) -> None:
        """Begin what `prepare` is to make durable, before other files are synced: a hint.

        A disk then takes the bytes along with those files.
        """

    def prepare(self, pending_name: str, data: bytes, name: str = "") -> None:
        """Write a file under a name that `publish` or `replace` takes away; its bytes are durable.

        After a crash it may be there; another may remove it meanwhile, then there is none.

        Args:
            name: what `publish` will give it. Whoever revokes that from here on is obeyed.
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

    def swap(self, pending_name: str, name: str, stamp: str) -> bool:
        """Do as `replace`, if what has the name still has this `stamp`; where files have no links.

        Returns:
            False: it has another one, or is gone. What was prepared is gone either way.
        """

    def rename(self, pending_name: str, name: str) -> None:
        """Give what `prepare` wrote its name in place of what has it; a crash may undo that."""

    def move(self, name: str, second: str, *, makes: bool = True) -> None:
        """Give a whole, synced file another name in place of what has it; a crash may undo that.

        Or a directory, with all in it. Only where `shows_pending`: elsewhere a file has its name
        when it is whole.

        Args:
            makes: the directories above; else the error is ENOENT where they are not there.
        """

    def claim(self, name: str, note: bytes) -> bool:
        """Create a file in one exclusive step; return False when it is there already."""

    def revoke(self, pending_name: str, name: str) -> None:
        """Keep a file that is prepared under one name from being published under the other.

        It may also be prepared later. One that is published already stays. A directory may now
        have the name that is pending. What `swap` does is not kept from anything.
        """

    def reclaim(self, name: str) -> None:
        """Let this process publish under a name that it, or another, has revoked."""

    def unbar(self, name: str) -> None:
        """Let everybody publish under such a name: the dead writers are gone for sure."""

    def link(self, name: str, second: str) -> None:
        """Give a file a second name, which nothing has yet; it takes no room on a full disk."""

    def append(self, name: str, data: bytes) -> None:
        """Add lines to a file in one call; the rest of a torn line stands alone."""

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

    def modified_s(self, name: str) -> float:
        """Return when something was last modified: seconds since 1970, by its server's clock."""

    def stamp(self, name: str) -> str:
        """Return what is another when a file is: where another one has taken its name, too."""

    def forget_cached(self) -> None:
        """Have what is read next of any file come from the disk, where that can be asked for."""

    def free_bytes(self) -> int | None:
        """Return what may still be written below the root; None where that is not known.

        Raises a StoreError where nothing may be written.
        """

    def remove(self, name: str) -> None:
        """Remove a file; no error when it is not there."""

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove data files, by as few calls as there can be; no error for those not there."""

    def remove_directory(self, name: str = "") -> bool:
        """Remove a directory when it is empty; return whether it is gone."""


def having_each(store: Store, names: Sequence[str], file: str) -> list[str]:
    """Be `Store.having`, where a look at one file takes no longer than it must."""
    return [name for name in names if store.exists(f"{name}/{file}")]


def remove_each(store: Store, names: Sequence[str]) -> None:
    """Be `Store.remove_all`, where files are removed one by one."""
    for name in names:
        store.remove(name)


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


def file_names(store: Store, name: str = "") -> list[str]:
    """List the names of the files in a directory and below it; none of one that cannot be listed.

    Links and what lies behind them are left out.
    """
    try:
        entries = store.list(name)
    except StoreError:
        return []
    found = [entry.name for entry in entries if entry.kind == "file"]
    for entry in entries:
        if entry.kind == "directory":
            found += file_names(store, f"{name}/{entry.name}" if name else entry.name)
    return found
