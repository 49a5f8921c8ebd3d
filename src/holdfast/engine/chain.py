"""A chain: a checkpoint, the base it was made from, and so on down to one that needs none.

Reads a checkpoint through all of them: what chunks need of the base is read first, as a checkpoint
is read by any layout, a bounded part at a time. Knows stores and memory; no names of tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from ..errors import CorruptError, NotCommittedError
from ..format.contents import content_digest
from ..format.links import Base
from ..format.manifest import Manifest
from ..format.names import dotted
from ..layout import Box, Path, Shard, batches, boxes_of_range
from ..options import SLOT_BYTES, Keys
from ..plan.load_plan import plan_load
from ..plan.reads import ChunkRead, ReadRun
from ..state.ambient import ordinary_torch
from ..state.tensors import TORCH_DTYPES
from ..stores.base import Store
from .check import read_manifest
from .place import Targets, targets_of
from .pool import Lease
from .read import still_there
from .read_pipeline import Done, read_shards
from .stage import Sources
from .trust import check_of, check_of_base
from .workspace import borrow, bytes_at, give_back

SCRATCH_BYTES = 512 << 20  # elements of bases in memory, shared by the links
BATCH_BYTES_MIN = 16 << 20  # but for each link at least so many


@dataclass(frozen=True, slots=True)
class Link:
    """One checkpoint of a chain."""

    store: Store
    manifest: Manifest


Chain = tuple[Link, ...]  # from the one that needs none to the newest


def open_chain(store: Store, manifest: Manifest | None = None, trust: Keys | None = None) -> Chain:
    """Open a checkpoint with everything below it that its chunks may need.

    Args:
        manifest: the checkpoint's, where it has been read.
        trust: else, the keys one of which has to have signed it.

    Raises:
        NotCommittedError: there is no checkpoint.
        CorruptError: it fails a check; or a base is missing, or is not the one it was made from.
    """
    links = [Link(store, manifest or read_manifest(store, check_of(trust)))]
    with still_there(store):
        while len(links[-1].manifest.based):
            links.append(open_base(links[-1]))
    return tuple(reversed(links))


def open_readable(store: Store, manifest: Manifest) -> Chain:
    """Open a checkpoint with what is below it, as far as that can be opened.

    For reading what does not refer to what is missing.
    """
    links = [Link(store, manifest)]
    with suppress(CorruptError):
        while len(links[-1].manifest.based):
            links.append(open_base(links[-1]))
    return tuple(reversed(links))


def open_base(link: Link) -> Link:
    """Open what a link was made from.

    Raises:
        CorruptError: it is missing, fails a check, or is another.
        VersionError: a newer holdfast wrote it.
    """
    base = link.manifest.table.header.base
    assert base is not None  # a manifest whose chunks refer to one has it
    where = f"{link.store.location} is a delta of {base.name} in the same directory"
    store = link.store.sibling(base.name)
    try:
        signed = link.manifest.signed
        manifest = read_manifest(store, check_of_base(signed) if signed else None)
    except NotCommittedError as error:
        raise CorruptError(
            f"{where}, which is missing: {error}. Put it back, or use another checkpoint"
        ) from error
    except CorruptError as error:
        raise type(error)(f"{where}, which is damaged: {error}") from error
    header = manifest.table.header
    if content_digest(manifest.table) != base.digest:
        raise CorruptError(
            f"{where}; found another checkpoint there (step {header.step}, save "
            f"{header.save_id}), of another run or saved again. Put the right one there"
        )
    if header.base and header.base.links >= base.links:
        raise CorruptError(
            f"{where}: expected fewer than {base.links} bases below that one, found "
            f"{header.base.links}. Use another checkpoint"
        )
    _check_tensors(link.manifest, manifest, base)
    return Link(store, manifest)


def _check_tensors(manifest: Manifest, below: Manifest, base: Base) -> None:
    """Check that the base has what chunks refer to."""
    owner = manifest.table.shard_tensor
    chunks = manifest.table.shard_chunks
    first = manifest.shard_first_row
    held = {tensor.path: tensor for tensor in below.table.header.tensors}
    for shard in range(len(owner)):
        start = int(first[shard])
        if manifest.based[start : start + int(chunks[shard])].any():
            tensor = manifest.table.header.tensors[int(owner[shard])]
            if held.get(tensor.path) != tensor:
                name = dotted(tensor.path)
                raise CorruptError(
                    f"its base, {base.name}, has no {name} of the same dtype and shape. Use "
                    "another checkpoint"
                )


@ordinary_torch()
def read_chain(
    chain: Chain, lease: Lease, runs: Sequence[ReadRun], targets: Targets | Sources
) -> Done:
    """Read runs of the newest checkpoint of a chain, as `read_shards` does."""
    targets = targets if isinstance(targets, Targets) else targets_of(targets)
    with still_there(chain[-1].store):
        return _read_chain(chain, lease, runs, targets)


def _read_chain(chain: Chain, lease: Lease, runs: Sequence[ReadRun], targets: Targets) -> Done:
    *below, top = chain
    based = top.manifest.based
    if not below:
        # Of a chain that is open as far as it can be, the base may have gone a moment ago.
        if len(based) and any(based[run.reads.rows].any() for run in runs):
            base = top.manifest.table.header.base
            raise CorruptError(
                f"{top.store.location} is a delta of {base and base.name}, which is missing. Put "
                "it back, or use another checkpoint"
            )
        return read_shards(top.store, lease, top.manifest, runs, targets)
    alone = [run for run in runs if not based[run.reads.rows].any()]
    read_bytes = read_shards(top.store, lease, top.manifest, alone, targets).read_bytes
    rest = [run for run in runs if based[run.reads.rows].any()]
    for batch in batches(rest, _bytes_of, max(BATCH_BYTES_MIN, SCRATCH_BYTES // len(chain))):
        reads = [read for run in batch for read in run.chunks if based[read.row]]
        with _elements_below(tuple(below), lease, reads) as (bases, done):
            read_bytes += done.read_bytes
            done = read_shards(top.store, lease, top.manifest, batch, targets, bases=bases)
            read_bytes += done.read_bytes
    return Done(read_bytes)


def read_parts(chain: Chain, lease: Lease, parts: Mapping[Shard, torch.Tensor]) -> None:
    """Read boxes of tensors into memory.

    Args:
        parts: by the box, of a tensor of the checkpoint, as many bytes of host memory.
    """
    manifest = chain[-1].manifest
    index = {tensor: number for number, tensor in enumerate(manifest.table.header.tensors)}
    wanted: dict[Path, tuple[int, list[Box]]] = {}
    targets: dict[Path, list[tuple[torch.Tensor, Box]]] = {}
    for number, (shard, memory) in enumerate(parts.items()):
        values = memory.view(TORCH_DTYPES[shard.tensor.dtype]).view(shard.box.shape)
        wanted[number,] = (index[shard.tensor], [shard.box])
        targets[number,] = [(values, shard.box)]
    read_chain(chain, lease, plan_load(manifest, wanted, SLOT_BYTES), targets)


def _bytes_of(run: ReadRun) -> int:
    return sum(read.chunk.size_bytes for read in run.chunks)


@contextmanager
def _elements_below(
    chain: Chain, lease: Lease, reads: Sequence[ChunkRead]
) -> Iterator[tuple[Mapping[int, int], Done]]:
    """Give, by row, the address of the elements that chunks need of the base."""
    manifest = chain[-1].manifest
    index = {tensor.path: n for n, tensor in enumerate(manifest.table.header.tensors)}
    parts: dict[Path, list[tuple[torch.Tensor, Box]]] = {}
    addresses: dict[int, int] = {}
    room = borrow()
    try:
        for read in reads:
            size, shard = read.chunk.size_bytes, read.chunk.shard
            addresses[read.row] = room.take(size)
            values = bytes_at(addresses[read.row], size).view(TORCH_DTYPES[shard.tensor.dtype])
            cut = boxes_of_range(shard.box.shape, read.chunk.first, read.chunk.elements)
            for before, part in cut:
                offset = tuple(a + b for a, b in zip(part.offset, shard.box.offset, strict=True))
                target = values[before : before + part.elements].view(part.shape)
                parts.setdefault(shard.tensor.path, []).append((target, Box(offset, part.shape)))
        wanted = {path: (index[path], [box for _, box in held]) for path, held in parts.items()}
        yield addresses, read_chain(chain, lease, plan_load(manifest, wanted, SLOT_BYTES), parts)
    finally:
        give_back(room)
