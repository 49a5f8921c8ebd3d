"""The stream of a load: read → decode → place, under one pool.

Knows how these rooms overlap: the queue reads ahead on its own threads while the calling thread
checks and places. The rooms know nothing of it.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import CorruptError
from ..format.manifest import Manifest
from ..format.names import dotted
from ..plan.reads import ReadRun, Reads
from ..state.ambient import ordinary_torch
from ..stores.base import Store
from .ahead import Decoder, SlotThreads
from .exchange import Exchange
from .place import Targets, place, targets_of
from .pool import Lease
from .read import DataFileReader, still_there
from .stage import Sources

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

    def check(self) -> None:
        """Raise what was found to be damaged."""
        if self.damage is not None:
            raise self.damage


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
    reader = DataFileReader(store, lease, manifest, lease.small_bytes)
    filling = _Filling(reader, lease, manifest, targets, bases)
    try:
        with still_there(store), reader:
            if exchange is not None:
                sent_bytes, damage = exchange.run(reader, lease, filling.place)
            if filling.is_raw:
                for run, slot in reader.stream(runs):
                    filling.place(run, slot)
            else:
                with SlotThreads() as threads:
                    stream = reader.stream(runs, clear=threads.clear, is_clear=threads.is_clear)
                    for run, slot in stream:
                        threads.start(slot, filling.place, run, slot)
    except CorruptError as error:
        raise filling.told(error) from error
    read_bytes = 0
    for run in (*runs, *(exchange.read_here if exchange is not None else ())):
        read_bytes += run.extent.size_bytes
    return Done(read_bytes, sent_bytes, damage and filling.told(damage))


class _Filling:
    """Checks what was read, and places it; knows which targets it has filled."""

    def __init__(
        self,
        reader: DataFileReader,
        lease: Lease,
        manifest: Manifest,
        targets: Targets,
        bases: Mapping[int, int],
    ) -> None:
        self._reader, self._lease, self._manifest = reader, lease, manifest
        self._targets, self._bases = targets, bases
        self.is_raw = manifest.table.header.is_raw
        self._filled: list[Reads] = []  # in the order in which they were placed

    def place(self, run: ReadRun, slot: int) -> None:
        """Place a run that was read into a slot."""
        if not (self.is_raw and self._reader.is_whole(run, slot)):
            self._place_each(run, slot)
            return
        rest = self._targets.fill(run.reads, self._lease.pool.address(slot) - run.extent.offset)
        if len(rest.rows):
            view = self._lease.tensor(slot)
            for read in rest.chunks():
                payload = self._reader.payload(run, read.row, slot)
                elements = view[payload.address - view.data_ptr() :][: payload.size_bytes]
                place(elements, read.chunk, *self._targets.part(read.wants[0]))
        self._filled.append(run.reads)

    def _place_each(self, run: ReadRun, slot: int) -> None:
        """Check, decode and place one chunk after the other."""
        view = self._lease.tensor(slot)
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
