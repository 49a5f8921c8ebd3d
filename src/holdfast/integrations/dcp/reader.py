"""DCP's StorageReader: any box of any holdfast checkpoint, verified before it is placed.

Knows no process group: each rank reads what its own plan asks for.
"""

import io
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...convert.dcp_paths import PICKLED, is_pickled
from ...engine.chain import Chain, open_chain
from ...engine.check import check_alone
from ...engine.pool import lease
from ...engine.read_pipeline import read_chain
from ...errors import MismatchError, OptionError
from ...format.manifest import Manifest
from ...format.revive import revive_at, types_by_name
from ...layout import Box, Path
from ...options import SLOT_BYTES, Options, options_of
from ...plan.load_plan import plan_load
from ...state.ambient import ordinary_torch
from ...state.memory import own_memory
from ...state.new import converts
from ...state.tensors import DTYPE_NAMES, Part
from ...stores.url import open_store
from .healing import heal
from .names import Contents, describe
from .place import Call, Placed


class _Load(Call):
    """The load that a thread is at, and the checkpoint it is of."""

    chain: Chain = ()
    contents: Contents | None = None


class HoldfastReader(Placed, StorageReader):
    """Reads any holdfast checkpoint for DCP, whoever wrote it, resharded as the planner asks.

    DCP calls its methods.

    Args:
        path: directory of the checkpoint, or a ``holdfast://`` URL of it.
        cast: convert to the target's dtype where it differs; otherwise that is a mismatch.
        pickled: hand values that were saved as pickles to the planner, which runs whatever code is
            in them; otherwise asking for one is an error.
        types: enumerations and dataclasses that values come back as; of others you get
            `holdfast.format.natives.Tagged`. No constructor is called.
        options: settings such as ``io`` and ``trust``.

    Raises:
        OptionError: the path is invalid, or one of ``types`` is neither.

    Example:
        ``dcp.load(state_dict, storage_reader=HoldfastReader("runs/a/step-00001000"))``
    """

    _call: _Load

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        *,
        cast: bool = False,
        pickled: bool = False,
        types: Iterable[type] = (),
        options: Options | None = None,
    ) -> None:
        """Prepare; nothing is read yet."""
        self._cast, self._pickled, self._types = cast, pickled, types_by_name(types)
        self._options = options_of(options)
        self._call = _Load()
        self._move_to(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let itself be copied, and sent to other processes: the load it is at stays here."""
        again = partial(
            HoldfastReader,
            cast=self._cast,
            pickled=self._pickled,
            types=(*self._types.values(),),
            options=self._options,
        )
        return again, (self._path,)

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """Describe the checkpoint: every tensor as one chunk, dicts and lists opened as DCP does.

        Raises:
            NotCommittedError: there is no checkpoint here.
            CorruptError: its MANIFEST fails a check.
            VersionError: a newer holdfast wrote it.
        """
        load = self._call
        load.path, load.coming = load.coming or self._path, ""
        store = open_store(load.path)
        load.chain = open_chain(store, trust=self._options.trust)
        check_alone(store)
        load.contents = describe(load.chain[-1].manifest, load.path)
        return load.contents.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Put the marker that DCP's programs look for where it lacks.

        Metadata that another reader or thread has read is read again.

        Raises:
            HoldfastError: as `read_metadata`.
        """
        if not has_read(self, metadata):
            self.read_metadata()
        if is_coordinator:
            heal(self._call.path)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read what this rank's plan asks for; each chunk is verified before it is placed.

        Values and ``commit_tensor`` come when all tensors are filled.

        Raises:
            MismatchError: shapes or dtypes differ, all of them listed; nothing was changed.
            StateError: a tensor has no memory of its own; nothing was changed.
            OptionError: a value was saved as a pickle, and ``pickled`` was not asked for.
            CorruptError: a check failed; what was filled before it is named in ``.filled``.
            StoreError: the disk or the network failed.
        """
        load = self._call
        contents = load.contents
        assert contents is not None, "DCP plans before it reads"
        manifest = load.chain[-1].manifest
        values = [
            (item, self._bytes_for(item, contents))
            for item in plan.items
            if item.type == LoadItemType.BYTE_IO
        ]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        given = [(planner.resolve_tensor(item), (item.storage_index.fqn,)) for item in tensors]
        with ordinary_torch():
            resolved = [own_memory(tensor, path) for tensor, path in given]
        targets, wanted = self._match(tensors, resolved, manifest, contents)
        runs, store = plan_load(manifest, wanted, SLOT_BYTES), open_store(load.path)
        try:
            with lease(store, self._options) as leased:
                read_chain(load.chain, leased, runs, targets)
        finally:
            increment_version(resolved)  # autograd does not see what is filled by address
        for item, tensor in zip(tensors, resolved, strict=True):
            planner.commit_tensor(item, tensor)
        for item, data in values:
            planner.load_bytes(item, io.BytesIO(data))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _match(
        self,
        items: list[ReadItem],
        resolved: list[torch.Tensor],
        manifest: Manifest,
        contents: Contents,
    ) -> tuple[dict[Path, list[Part]], dict[Path, tuple[int, list[Box]]]]:
        """Pair what the planner wants filled with what is stored.

        Returns:
            (tensor to fill and its box, index of the stored tensor and the same box), by a name
            for each item.

        Raises:
            MismatchError: shapes or dtypes differ.
        """
        targets: dict[Path, list[Part]] = {}
        wanted: dict[Path, tuple[int, list[Box]]] = {}
        faults = []
        for number, (item, tensor) in enumerate(zip(items, resolved, strict=True)):
            fqn = item.storage_index.fqn
            index = contents.tensors[fqn]
            stored = manifest.table.header.tensors[index]
            origin = item.storage_index.offset or [0] * len(item.lengths)
            offset = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
            box, dtype = Box(offset, tuple(item.lengths)), DTYPE_NAMES.get(tensor.dtype)
            fits = dtype == stored.dtype or (
                self._cast and dtype is not None and converts(stored.dtype, dtype)
            )
            if not fits or tuple(tensor.shape) != box.shape:
                here = f"{dtype or tensor.dtype} {list(tensor.shape)}"
                faults.append(f"{fqn} is {stored.dtype} {list(box.shape)} there and {here} here")
            elif box.elements:
                # Named as DCP does; several parts of one tensor by the numbers of their items.
                path: Path = (fqn,) if (fqn,) not in targets else (fqn, number)
                targets[path], wanted[path] = [(tensor, box)], (index, [box])
        if faults:
            raise MismatchError(
                f"{self._call.path} does not fit the state: {'; '.join(faults)}. Make the dtypes "
                "the same, or use HoldfastReader(cast=True). Nothing was loaded"
            )
        return targets, wanted

    def _bytes_for(self, item: ReadItem, contents: Contents) -> bytes:
        """Return the value of an item as the bytes that DCP's planners read.

        Raises:
            OptionError: it is a pickle, and nobody asked for that.
            MismatchError: a class of ``types`` is not as it was saved.
        """
        fqn = item.storage_index.fqn
        value = contents.values[fqn]
        if is_pickled(value):
            if not self._pickled:
                raise OptionError(
                    f"{fqn} of {self._call.path} was saved as a pickle, and a planner that loads "
                    "it runs the code in it. If you trust who wrote it, use "
                    "HoldfastReader(pickled=True)"
                )
            found: bytes = value[PICKLED]
            return found
        if self._types:
            value = revive_at(value, self._types, f"{fqn} of {self._call.path}")
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()


def has_read(reader: HoldfastReader, metadata: Metadata) -> bool:
    """Return whether metadata is what this thread has read last, for the load it is at."""
    load = reader._call
    return load.contents is not None and load.contents.metadata is metadata and not load.coming
