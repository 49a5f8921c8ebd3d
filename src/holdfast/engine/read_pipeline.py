"""The stream of a load: read → decode → place, under one pool.

Knows how these rooms overlap: the queue reads ahead on its own threads while the calling thread
checks and places. The rooms know nothing of it. A delta is read through all checkpoints of its
chain: what its chunks need of the base is read first, as a checkpoint is read by any layout, a
bounded part at a time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType

import numpy as np
import torch

from ..errors import CorruptError
from ..format.manifest import Manifest
from ..format.names import dotted
from ..layout import Box, Path, Shard, batches, boxes_of_range
from ..options import SLOT_BYTES
from ..plan.load_plan import plan_load
from ..plan.reads import ChunkRead, ReadRun, Reads
from ..state.ambient import ordinary_torch
from ..state.tensors import TORCH_DTYPES
from ..stores.base import Store
from ..stores.layered import LayeredStore
from .ahead import Decoder, SlotThreads
from .chain import Chain
from .exchange import Exchange
from .place import Targets, place, targets_of
from .pool import Lease
from .read import DataFileReader, Rest, still_there
from .stage import Sources
from .workspace import borrow, bytes_at, give_back, settle

SCRATCH_BYTES = 512 << 20  # elements of bases in memory, shared by the links
BATCH_BYTES_MIN = 16 << 20  # but for each link at least so many
NO_BASES: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Done:
    """What reading came to.

    Attributes:
        read_bytes: by this rank, gaps included, for others too; of bases too.
        sent_bytes, damage: as `Exchange.run` returns them.
    """

    read_bytes: int
    sent_bytes: int = 0
    damage: CorruptError | None = None


@ordinary_torch()
def read_shards(
    store: Store,
    lease: Lease,
    manifest: Manifest,
    runs: Iterable[ReadRun],
    targets: Targets | Sources,
    exchange: Exchange | None = None,
    *,
    bases: Mapping[int, int] = NO_BASES,
) -> Done:
    """Read runs, check every chunk and the gap before it, and place its elements.

    A chunk is placed only after it has been checked. Payloads that are the elements themselves are
    checked a run at a time, and placed so where targets lie as they are stored.

    Args:
        exchange: what other ranks need too; they all call this.
        bases: by row, the address of the elements that a chunk needs of the base.

    Raises:
        CorruptError: a check failed; what was placed before it was good.
        NotCommittedError: the checkpoint was removed meanwhile.
    """
    targets = targets if isinstance(targets, Targets) else targets_of(targets)
    runs, sent_bytes, damage = tuple(runs), 0, None
    reader = DataFileReader(store, lease, manifest, lease.cached_bytes)
    filling = _Filling(reader, manifest, targets, bases)
    try:
        with still_there(store), reader:
            if exchange is not None:
                sent_bytes, damage = exchange.run(reader, lease, filling.place)
            if filling.is_raw and lease.queue.fetch is not None:
                near, far = _apart(store, manifest, runs)
                meanwhile = filling.placed(near)
                with closing(reader.fetch(far, filling.fill, meanwhile)) as fetched:
                    for place_rest in fetched:
                        place_rest()
            elif filling.is_raw:
                for run, slot in reader.stream(runs):
                    if rest := filling.fill(run, slot):
                        rest()
            else:
                if any(map(attrgetter("is_cuda"), targets.tensors)):
                    settle(targets.tensors)
                with SlotThreads() as threads:
                    stream = reader.stream(runs, clear=threads.clear, is_clear=threads.is_clear)
                    for run, slot in stream:
                        threads.start(slot, filling.place_each, run, slot)
    except CorruptError as error:
        raise filling.told(error) from error
    read_bytes = 0
    for run in (*runs, *(exchange.read_here if exchange is not None else ())):
        read_bytes += run.extent.size_bytes
    return Done(read_bytes, sent_bytes, damage and filling.told(damage))


def _apart(
    store: Store, manifest: Manifest, runs: Sequence[ReadRun]
) -> tuple[Sequence[ReadRun], Sequence[ReadRun]]:
    """Return the runs of files that are near, and those that the queue can fetch."""
    if not isinstance(store, LayeredStore):
        return (), runs
    near, far, names = list[ReadRun](), list[ReadRun](), manifest.file_names
    for run in runs:
        (near if store.is_near(names[run.extent.file]) else far).append(run)
    return near, far


class _Filling:
    """Checks what was read, and places it; knows which targets it has filled."""

    def __init__(
        self,
        reader: DataFileReader,
        manifest: Manifest,
        targets: Targets,
        bases: Mapping[int, int],
    ) -> None:
        self._reader, self._manifest = reader, manifest
        self._targets, self._bases = targets, bases
        self.is_raw = manifest.table.header.is_raw
        self._filled: list[Reads] = []  # in the order in which they were placed

    def placed(self, runs: Iterable[ReadRun]) -> Iterator[ReadRun]:
        """Read runs into slots, and place each; yield it when that is done."""
        for run, slot in self._reader.stream(runs):
            self.place(run, slot)
            yield run

    def place(self, run: ReadRun, slot: int) -> None:
        """Place a run that was read into a slot."""
        if rest := self.fill(run, slot):
            rest()

    def fill(self, run: ReadRun, slot: int) -> Rest | None:
        """Check a run, and place what lies in its target as it is stored; in any thread.

        Returns:
            What places the rest, for the thread that loads.
        """
        if not (self.is_raw and self._reader.is_whole(run, slot)):
            return partial(self.place_each, run, slot)
        reads, base = run.reads, self._reader.addresses[slot] - run.extent.offset
        rest = self._targets.fill(reads, base)
        if not len(rest.rows):
            self._filled.append(reads)
            return None
        self._filled.append(reads[~np.isin(reads.rows, rest.rows)])
        return partial(self._place_rest, run, slot, rest)

    def _place_rest(self, run: ReadRun, slot: int, rest: Reads) -> None:
        view = bytes_at(self._reader.addresses[slot], run.extent.size_bytes)
        for read in rest.chunks():
            payload = self._reader.payload(run, read.row, slot)
            elements = view[payload.address - view.data_ptr() :][: payload.size_bytes]
            place(elements, read.chunk, *self._targets.part(read.wants[0]))
        self._filled.append(rest)

    def place_each(self, run: ReadRun, slot: int) -> None:
        """Check, decode and place one chunk after the other."""
        view = bytes_at(self._reader.addresses[slot], run.extent.size_bytes)
        with closing(Decoder(run, self._manifest, self._bases)) as decoder:
            for place_in_run, read in enumerate(run.chunks):
                payload = self._reader.check(run, read, slot)
                elements = decoder.decode(payload, read, view)
                for number in read.wants:
                    place(elements, read.chunk, *self._targets.part(number))
                self._filled.append(run.reads[place_in_run : place_in_run + 1])

    def told(self, error: CorruptError) -> CorruptError:
        """Say which tensors a load that failed half-way has filled."""
        numbers = [n for part in self._filled for n in part.wants[part.pairs()[1]].tolist()]
        paths = dict.fromkeys(self._targets.paths[number] for number in numbers)
        filled = tuple(dotted(path) for path in paths)
        shown = f"{', '.join(filled[:5])}{' …' if len(filled) > 5 else ''}" if filled else "none"
        told = type(error)(f"{error}. Filled with good bytes, in part or whole: {shown}")
        told.filled = filled
        return told


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
