"""The stream of a save: stage → encode → write, under one pool.

The queue writes on its own threads while the calling thread stages and encodes: chunks whose
payloads are their elements many at a time (`raw`), others segment by segment (`encoded`).
"""

import time
from collections.abc import Callable
from dataclasses import replace

from ..codecs.base import Codec
from ..format.table import Table
from ..plan.shard_table import ShardTable
from ..stores.base import Store
from .basis import Basis
from .encoded import write_encoded
from .file_plan import Images, WriterPlan
from .ledger import Ledger
from .origin import InPool, Origin
from .pool import Lease
from .raw import write_raw
from .write import DataFileWriter, SyncError


def write_shards(
    store: Store,
    lease: Lease,
    plan: WriterPlan,
    shards: ShardTable,
    origin: Origin | Images,
    codec: Codec,
    basis: Basis | None,
    ledger: Ledger,
    begin: Callable[[list[Table], Basis | None], object] = lambda tables, basis: None,
) -> list[Table]:
    """Write one rank's shards into durable data files; return the table of each.

    Nothing is left behind when it fails. After a failed fsync the files are dropped and everything
    is written again under other numbers, once.

    Args:
        origin: what the elements are taken from; or where in the pool every chunk stands already.
        codec: of all of them.
        basis: what is known of the base; it becomes what is known of these.
        begin: called with the tables and the basis when all is written, before the last file is
            synced; again, after a failed fsync.
    """
    if not shards.tensor.size:
        begin([], basis)
        return []
    ledger.write_began = time.perf_counter()
    images = None
    if isinstance(origin, Images):
        images = origin
        origin = InPool(images.chunks, images.offsets + lease.pool.address(0))
    writer = DataFileWriter(store, lease, plan, images)
    for last_attempt in (False, True):
        try:
            if codec.is_plain:
                write_raw(writer, shards, origin, images, ledger)
            else:
                is_staged = images is not None
                write_encoded(writer, shards, origin, codec, basis, ledger, is_staged=is_staged)
            begin(writer.tables, basis)
            return writer.finish()
        except SyncError:
            writer.abandon()
            if last_attempt:
                raise
            if basis is not None:
                basis.forget()
            again = plan.starting_at(writer.number + 1)
            if images:
                images = replace(images, hashes=None)  # the seeds have the numbers of files in them
            writer = DataFileWriter(store, lease, again, images)
        except BaseException:
            writer.abandon()
            raise
    raise AssertionError("the loop returns or raises")
