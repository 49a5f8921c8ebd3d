"""One checkpoint in two places: each file is read from the first that has it. Writes nothing.

A file that the first place lacks is opened in the second. What is read is checked by who reads it,
as from anywhere.
"""

import errno
from typing import Any, NamedTuple

from .._core import Pool
from ..errors import StoreError
from .base import NOT_A_FILE, DataFiles, Entry, Fetch, Names, Queue, QueueKind, Store
from .remote_files import FIRST_DESCRIPTOR

_ABSENT = (errno.ENOENT, errno.ENOTDIR, *NOT_A_FILE)


class LayeredStore:
    """The reading half of `Store`; anything else fails with an AttributeError."""

    def __init__(self, first: Store, second: Store | None, given: dict[str, bytes]) -> None:
        """Open nothing yet.

        Args:
            first: a local disk.
            second: where it lacks a file; None: there is no other place.
            given: files whose bytes are known already.
        """
        self.first, self.second, self._given = first, second, given
        self._places = (first,) if second is None else (first, second)
        is_remote = second is not None and not isinstance(second.vfs, type(first.vfs))
        self.vfs: Any = _Files(first.vfs, second.vfs) if is_remote and second else first.vfs
        self._is_remote = is_remote
        self._near: dict[str, bool] = {}  # of files that somebody asked for

    @property
    def location(self) -> str:
        """Where the first place is."""
        return self.first.location

    @property
    def can_link(self) -> bool:
        """Whether deltas may be made from it."""
        return self.first.can_link

    @property
    def run_bytes(self) -> int:
        """How many bytes are worth a read of their own."""
        return max(place.run_bytes for place in self._places)

    def queue_kind(self, io: str, depth: int, block_bytes: int) -> QueueKind:
        """Return how files of both are read."""
        kind = self.first.queue_kind(io, depth, block_bytes)
        if not self._is_remote or self.second is None:
            return kind
        return _Kind(kind, self.second.queue_kind(io, depth, block_bytes))

    def sibling(self, name: str) -> Any:
        """Return the same of another checkpoint in the same two runs."""
        second = self.second and self.second.sibling(name)
        return layered(self.first.sibling(name), second)

    def above(self) -> Store:
        """Return the run on the local disk."""
        return self.first.above()

    def exists(self, name: str) -> bool:
        """Return whether a file or directory of this name is in either."""
        return name in self._given or any(place.exists(name) for place in self._places)

    def get(self, name: str, bytes_max: int) -> bytes:
        """Read a whole file."""
        if name in self._given:
            return self._given[name]
        if self.second is None or self.first.exists(name):
            return self.first.get(name, bytes_max)
        return self.second.get(name, bytes_max)

    def start_read(self, name: str) -> None:
        """Do nothing: in which place a file is, is seen when it is opened."""

    def is_near(self, name: str) -> bool:
        """Return whether the first place has a file; it is then read from there, else not."""
        if name not in self._near:
            self._near[name] = self.second is None or self.first.exists(name)
        return self._near[name]

    def open(self, name: str, *, direct: bool) -> int:
        """Open a file where it is."""
        if self.second is not None and not self._near.get(name, True):
            return self.second.open(name, direct=direct)
        try:
            return self.first.open(name, direct=direct)
        except StoreError as error:
            if self.second is None or error.errno not in _ABSENT:
                raise
        return self.second.open(name, direct=direct)

    def list(self, name: str = "") -> list[Entry]:
        """List a directory of both, sorted by name."""
        found: dict[str, Entry] = {}
        failure: StoreError | None = None
        for place in reversed(self._places):
            try:
                found |= {entry.name: entry for entry in place.list(name)}
            except StoreError as error:
                if error.errno not in _ABSENT:
                    raise
                failure = error
        if failure is not None and not found:
            raise failure
        return [found[name] for name in sorted(found)]

    def some(self, count: int) -> Names:
        """Return some names in the first; none, where it has no such directory."""
        try:
            return self.first.some(count)
        except StoreError as error:
            if error.errno not in _ABSENT:
                raise
            return []

    def kind(self, name: str) -> str:
        """Return what has this name in the first that has it; empty: neither has."""
        return next((kind for place in self._places if (kind := place.kind(name))), "")


def layered(first: Store, second: Store | None, given: dict[str, bytes] | None = None) -> Any:
    """Return one store of two, to read from."""
    return LayeredStore(first, second, given or {})


class _Files:
    """Open files of both: descriptors of a remote store are larger than any of this machine."""

    def __init__(self, first: DataFiles, second: DataFiles) -> None:
        self._first, self._second = first, second

    def size(self, fd: int) -> int:
        """Return the size in bytes."""
        return self._of(fd).size(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Read ``size`` bytes, fewer only at the end of the file."""
        return self._of(fd).read(fd, size, offset)

    def wants_direct(self, fd: int, size: int) -> bool:
        """Return whether a file of so many bytes is on a disk here, and not in the page cache."""
        return self._of(fd).wants_direct(fd, size)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        self._of(fd).close(fd)

    def _of(self, fd: int) -> DataFiles:
        return self._first if fd < FIRST_DESCRIPTOR else self._second


class _Kind(NamedTuple):
    """See `holdfast.stores.base.QueueKind`."""

    first: QueueKind
    second: QueueKind

    @property
    def lent_slots(self) -> int:
        """None: nothing is written."""
        return 0

    def make(self, pool: Pool) -> Queue:
        """Make a queue of each."""
        return _Queues(self.first.make(pool), self.second.make(pool))


class _Queues:
    """Two queues as one, which reads."""

    def __init__(self, first: Queue, second: Queue) -> None:
        self._first, self._second = first, second
        self.fetch: Fetch | None = second.fetch  # of files of the second place
        self.direct = first.direct

    @property
    def pending(self) -> int:
        """Number of requests in flight."""
        return self._first.pending + self._second.pending

    def submit_write(
        self, fd: int, address: int, size: int, offset: int, tag: int, cached: bool = False
    ) -> None:
        """Refuse: files of two places are read, never written."""
        raise StoreError("files of two places are read, never written")

    def submit_read(
        self, fd: int, address: int, size: int, offset: int, tag: int, cached: bool = False
    ) -> None:
        """Begin a read."""
        queue = self._first if fd < FIRST_DESCRIPTOR else self._second
        queue.submit_read(fd, address, size, offset, tag, cached)

    def wait(self) -> list[tuple[int, int, int]]:
        """Block until a request is whole; the slower place does not hold up the other."""
        is_over = getattr(self._second, "has_landed", False)
        if self._second.pending and (is_over or not self._first.pending):
            return self._second.wait()
        return self._first.wait()

    def close(self) -> None:
        """Finish what was submitted."""
        self._first.close()
        self._second.close()
