"""How data files of a disk are read and written: by the core's queue. Knows no names."""

from typing import NamedTuple

from .._core import Pool, Queue, Vfs


class LocalQueue(NamedTuple):
    """See `holdfast.stores.base.QueueKind`."""

    vfs: Vfs
    backend: str
    depth: int
    block_bytes: int

    @property
    def lent_slots(self) -> int:
        """None: the page cache copies what it is given."""
        return 0

    def make(self, pool: Pool) -> Queue:
        """Make the queue."""
        return Queue(self.vfs, self.backend, pool, self.depth, self.block_bytes)
