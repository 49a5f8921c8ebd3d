"""A checkpoint of holdfast as a `Source`: verified, any codec, with the bases of deltas."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..engine.chain import open_chain
from ..engine.check import check_alone, read_manifest
from ..engine.place import targets_of
from ..engine.pool import lease
from ..engine.read_pipeline import read_chain
from ..engine.trust import check_of
from ..layout import Box, Path, Tensor, batches
from ..options import SLOT_BYTES, STREAM_BYTES, Options
from ..plan.load_plan import plan_load
from ..state.tensors import TORCH_DTYPES
from ..stores.url import open_store
from .source import Part, Source

CHAIN_BYTES = 128 << 20  # of elements of bases in memory at once, in all links together


class OwnSource(Source):
    """A committed checkpoint. What it reads, it has verified."""

    def __init__(self, path: str, options: Options) -> None:
        """Read the MANIFEST, and those of the bases.

        Raises:
            HoldfastError: as `holdfast.open`.
        """
        store = open_store(path)
        manifest = read_manifest(store, check_of(options.trust))
        check_alone(store)
        header = manifest.table.header
        self.location, self.kind = store.location, "holdfast"
        self.tensors = header.tensors
        self.ties = {path: header.tensors[index].path for path, index in header.ties}
        self.values = dict(header.objects)
        self.step, self.save_id = header.step, header.save_id
        # A pool of another size than the one that is written from, which is in use.
        size = (options.pool_bytes or STREAM_BYTES) + SLOT_BYTES
        self._options = replace(options, pool_bytes=size)
        self._store, self._manifest = store, manifest
        self._chain = open_chain(store, manifest)
        self._index: dict[Path, int] = {t.path: n for n, t in enumerate(header.tensors)}

    def read(self, tensor: Tensor, box: Box, memory: memoryview) -> None:
        """Read a box; only the chunks that hold some of it."""
        self.read_all([Part(tensor, box, memory)])

    def read_all(self, parts: Sequence[Part]) -> None:
        """Read many boxes at once, in the order of the files."""
        # Each link of a chain holds the elements that the one above it needs.
        links = len(self._chain)
        size_max = CHAIN_BYTES // links if links > 1 else 1 << 62
        with lease(self._store, self._options) as leased:
            for batch in batches(parts, _bytes_of, size_max):
                wanted: dict[Path, tuple[int, list[Box]]] = {}
                targets: dict[Path, list[tuple[torch.Tensor, Box]]] = {}
                for number, (tensor, box, memory) in enumerate(batch):
                    if not box.elements:
                        continue
                    values = torch.frombuffer(memory, dtype=TORCH_DTYPES[tensor.dtype])
                    wanted[number,] = (self._index[tensor.path], [box])
                    targets[number,] = [(values.view(box.shape), box)]
                dtypes = [self.tensors[index].dtype for index, _ in wanted.values()]
                runs = plan_load(self._manifest, wanted, SLOT_BYTES)
                read_chain(self._chain, leased, runs, targets_of(targets, dtypes))


def _bytes_of(part: Part) -> int:
    return len(part.memory)
