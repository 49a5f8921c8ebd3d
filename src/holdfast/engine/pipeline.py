"""The streams: stage → encode → write, and read → decode → place, under one pool.

The only place that knows how the rooms overlap: the queue writes (or reads ahead) on its own
threads while the calling thread stages and encodes (or checks and places). The rooms know nothing
of it.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .._core import xxh3_128
from ..errors import CorruptError
from ..format.manifest import Manifest
from ..format.names import dotted
from ..format.table import Table
from ..layout import Box, Path, Shard, chunks_of
from ..plan.load_plan import Run
from ..stores.base import Store
from .decode import decode
from .encode import encode
from .place import place
from .pool import Lease
from .read import DataFileReader
from .stage import stage
from .write import DataFileWriter, SyncError, WriterPlan

if TYPE_CHECKING:
    import torch

Sources = Mapping[Path, tuple["torch.Tensor", Box]]  # what this rank holds of each tensor


def write_shards(
    store: Store,
    lease: Lease,
    plan: WriterPlan,
    shards: Iterable[Shard],
    sources: Sources,
    codec: str,
) -> list[Table]:
    """Write one rank's shards into durable data files; return the table of each.

    Nothing is left behind when it fails. After a failed fsync the files are dropped and everything
    is written again under other numbers, once.
    """
    shards = list(shards)
    if not shards:
        return []
    writer = DataFileWriter(store, lease, plan)
    for last_attempt in (False, True):
        try:
            for shard in shards:
                _write_shard(writer, lease, shard, sources, codec, plan.header.chunk_elements)
            return writer.finish()
        except SyncError:
            writer.abandon()
            if last_attempt:
                raise
            writer = DataFileWriter(store, lease, plan.starting_at(writer.next_number))
        except BaseException:
            writer.abandon()
            raise
    raise AssertionError("the loop returns or raises")


def _write_shard(
    writer: DataFileWriter,
    lease: Lease,
    shard: Shard,
    sources: Sources,
    codec: str,
    chunk_elements: int,
) -> None:
    source, box = sources[shard.tensor.path]
    writer.begin_shard(shard)
    digests = []
    for chunk in chunks_of(shard, chunk_elements):
        slot, start, seed = writer.reserve(chunk.size_bytes)
        target = lease.tensor(slot)[start : start + chunk.size_bytes]
        staged = stage(source, box, chunk, target, seed)
        writer.append(*encode(staged, codec, seed))
        digests.append(staged.digest)
    writer.end_shard(shard, xxh3_128(b"".join(digests)))


def read_shards(
    store: Store,
    lease: Lease,
    manifest: Manifest,
    runs: Iterable[Run],
    targets: Sources,
) -> None:
    """Read runs, check every chunk and the gap before it, and place its elements.

    A chunk is placed only after it has been checked.

    Raises:
        CorruptError: a check failed; what was placed before it was good.
    """
    filled: dict[Path, None] = {}
    try:
        with DataFileReader(store, lease, manifest) as reader:
            for run, slot in reader.stream(runs):
                view = lease.tensor(slot)
                for read in run.chunks:
                    payload = reader.check(run, read, slot)
                    start = decode(payload) - lease.pool.address(slot)
                    elements = view[start : start + read.chunk.size_bytes]
                    for path in read.targets:
                        place(elements, read.chunk, *targets[path])
                        filled[path] = None
    except CorruptError as error:
        raise _with_filled(error, tuple(dotted(path) for path in filled)) from error


def _with_filled(error: CorruptError, filled: tuple[str, ...]) -> CorruptError:
    """Say which tensors a load that failed half-way has filled."""
    shown = f"{', '.join(filled[:5])}{' …' if len(filled) > 5 else ''}" if filled else "none"
    told = CorruptError(f"{error}. Tensors filled, with verified bytes, before that: {shown}")
    told.filled = filled
    return told
