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
from ..layout import Path
from ..plan.runs import Run
from ..state.ambient import ordinary_torch
from ..stores.base import Store
from .ahead import Decoder, SlotThreads, is_raw
from .exchange import Exchange
from .place import place
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
    runs: Iterable[Run],
    targets: Sources,
    exchange: Exchange | None = None,
    *,
    bases: Mapping[int, int] = NO_BASES,
) -> Done:
    """Read runs, check every chunk and the gap before it, and place its elements.

    A chunk is placed only after it has been checked.

    Args:
        exchange: what other ranks need too; they all call this.
        bases: by row, the address of the elements that a chunk needs of the base.

    Raises:
        CorruptError: a check failed; what was placed before it was good.
        NotCommittedError: the checkpoint was removed meanwhile.
    """
    filled: dict[Path, None] = {}
    runs = tuple(runs)

    def place_run(run: Run, slot: int) -> None:
        view = lease.tensor(slot)
        with closing(Decoder(run, manifest, bases)) as decoder:
            for read in run.chunks:
                payload = reader.check(run, read, slot)
                elements = decoder.decode(payload, read, view)
                for path, number in read.targets:
                    place(elements, read.chunk, *targets[path][number])
                    filled[path] = None

    sent_bytes, damage = 0, None
    try:
        with still_there(store), DataFileReader(store, lease, manifest) as reader:
            if exchange is not None:
                sent_bytes, damage = exchange.run(reader, lease, place_run)
            if is_raw(manifest):
                for run, slot in reader.stream(runs):
                    place_run(run, slot)
            else:
                with SlotThreads() as threads:
                    stream = reader.stream(runs, clear=threads.clear, is_clear=threads.is_clear)
                    for run, slot in stream:
                        threads.start(slot, place_run, run, slot)
    except CorruptError as error:
        raise _with_filled(error, filled) from error
    read = [*runs, *(exchange.read_here if exchange is not None else ())]
    read_bytes = sum(run.extent.size_bytes for run in read)
    return Done(read_bytes, sent_bytes, damage and _with_filled(damage, filled))


def _with_filled(error: CorruptError, paths: Iterable[Path]) -> CorruptError:
    """Say which tensors a load that failed half-way has filled."""
    filled = tuple(dotted(path) for path in paths)
    shown = f"{', '.join(filled[:5])}{' …' if len(filled) > 5 else ''}" if filled else "none"
    told = type(error)(f"{error}. Tensors filled, with verified bytes, before that: {shown}")
    told.filled = filled
    return told
