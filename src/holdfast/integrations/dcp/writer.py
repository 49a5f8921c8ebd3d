"""DCP's StorageWriter: what its planners plan goes through our engine, and is committed once.

Knows no process group: DCP brings the ranks together, and makes all raise what one met.
"""

import io
import logging
import os
import re
import time
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ...brief import show_bytes
from ...convert.dcp_paths import PICKLED, path_of
from ...convert.torch_archive import plain_value
from ...engine.commit import begin, check_absent, commit
from ...engine.file_plan import WriterPlan
from ...engine.ledger import Ledger
from ...engine.marker import put_marker, without_marker
from ...engine.origin import OnDemand
from ...engine.pool import lease
from ...engine.registry import RAW
from ...engine.replace import check_replaceable, commit_over, remove_replaced
from ...engine.write_pipeline import write_shards
from ...errors import AlreadyCommittedError, CorruptError, OptionError, StateError
from ...format.names import DCP_METADATA_NAME, names_of_dcp
from ...format.rows import written_in
from ...layout import Box, Path, Shard, size_of
from ...options import Options, options_of
from ...plan.local_states import encode_object
from ...plan.shard_table import table_of
from ...state.ambient import ordinary_torch
from ...state.tensors import local_tensor
from ...stores.base import Store
from ...stores.url import open_store
from .copy import copy_state
from .healing import heal
from .names import stored_in
from .place import Call, Placed
from .plan import WrittenShare, header_of, join, pieces_of
from .word import Word, end, give, hear, standing, take_back

logger = logging.getLogger("holdfast")


class _Save(Call):
    """The save that a thread is at."""

    rank, started = 0, 0.0
    word: Word | None = None
    store: Store | None = None  # on the coordinator: it knows which directories it has synced


class HoldfastWriter(Placed, StorageWriter):
    """Writes what DCP saves as a holdfast checkpoint: durable, and committed in one atomic step.

    Every planner's plan is taken as it is. Also an ``AsyncStager``: `dcp.async_save` copies the
    state to host memory with it, again for each save, before it returns. DCP calls its methods.

    Args:
        path: directory of the checkpoint, which must not hold one yet; or a ``holdfast://`` URL of
            it.
        pickled: keep values that are not plain data (docs/format.md, Values), enumerations and
            dataclasses as the bytes that the planner makes of them, which DCP's own planners
            pickle; otherwise the first are refused, and the rest are stored as plain data.
        replace: whether to replace a checkpoint of holdfast at ``path`` in one atomic step, and
            then remove one of DCP's.
        options: settings such as ``io`` and ``queue_depth``.

    Raises:
        OptionError: the path is invalid.

    Example:
        ``dcp.save(state_dict, storage_writer=HoldfastWriter("runs/a/first"))``
    """

    _synchronize_after_execute = False
    _call: _Save

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        *,
        pickled: bool = False,
        replace: bool = False,
        options: Options | None = None,
    ) -> None:
        """Prepare; nothing is written yet."""
        self._options = options_of(options)
        self._pickled, self._replace = pickled, replace
        self._call = _Save()
        self._move_to(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let itself be sent to the process that saves in the background."""
        pickled, replace, options = self._pickled, self._replace, self._options
        again = partial(HoldfastWriter, pickled=pickled, replace=replace, options=options)
        return again, (self._path,)

    def storage_meta(self) -> StorageMeta:
        """Tell planners where the checkpoint is to be."""
        return StorageMeta(checkpoint_id=self._path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this rank's number.

        Raises:
            OptionError: the ranks are not to work together.
        """
        if not kwargs.get("use_collectives", True):
            raise OptionError(
                "use_collectives=False: each rank would commit a part of the checkpoint. Leave it "
                "out, or save to a path of its own on each rank with no_dist=True"
            )
        save = self._call
        save.path, save.coming = save.coming or self._path, ""
        save.rank, save.started = kwargs.get("rank", 0), time.perf_counter()
        save.word = save.store = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save, on the coordinator.

        Raises:
            AlreadyCommittedError: there is a checkpoint here.
            OptionError: the directory holds something else.
            StoreError: disk, network or permission.
        """
        self._call.store = store = open_store(self._call.path)
        try:
            if self._replace:
                check_replaceable(store, with_dcp=True)
            else:
                check_absent(store)
        except AlreadyCommittedError as error:
            if self._replace:
                raise  # what is there must stay, whatever is asked for
            text = f"Checkpoint already exists and self.overwrite=False: {error}"  # DCP's words
            raise AlreadyCommittedError(text) from error
        if store.kind(DCP_METADATA_NAME) == "directory":
            raise OptionError(
                f"{store.location}/{DCP_METADATA_NAME} is a directory; expected a file or nothing. "
                "Remove it, or save to another path"
            )
        self._call.word = give(store, len(plans), self._options)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's share into durable data files; nothing is left when that fails.

        Raises:
            StateError: a tensor or value cannot be saved as given; the text names all values.
            StoreError: disk, network or permission; `NoSpaceError` when the disk is full.
            PeerError: another rank failed meanwhile.
        """
        store, rank = self._call.store or open_store(self._call.path), self._call.rank
        word = hear(store, rank, self._call.word)
        try:
            with standing(store, word, rank):
                share = self._write(store, word, plan, planner)
        except BaseException:
            take_back(store, word)
            raise
        future: Future[list[WriteResult]] = Future()
        index = MetadataIndex(f"holdfast.{share.rank}")
        future.set_result([WriteResult(index, size_of(share.shards), share)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator: the checkpoint appears in one step, or nothing is left.

        Raises:
            StateError: what the ranks wrote is not what was planned, or does not make whole
                tensors.
            AlreadyCommittedError: another save was first.
            StoreError: disk, network or permission.
        """
        save, word = self._call, self._call.word
        assert word is not None, "DCP plans before it finishes"
        store = save.store or open_store(save.path)
        shares = [result.storage_data for result in chain.from_iterable(results)]
        try:
            header, planned = join(word, metadata, shares)
        except BaseException:
            take_back(store, word)
            raise
        try:
            publish = commit_over if self._replace else commit
            publish(store, begin(store, header, planned, [share.written for share in shares]))
        finally:
            end(store, word)
        put_marker(store)
        if self._replace:
            _remove_stock(store)
            remove_replaced(store)
        heal(store.location)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = stored_in(metadata.state_dict_metadata)
        metadata.storage_meta = StorageMeta(checkpoint_id=save.path, save_id=word.save_id)
        seconds = time.perf_counter() - save.started
        size = show_bytes(size_of(header.tensors))
        logger.info("saved %s: %s in %.2f s", store.location, size, seconds)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Say that `stage` returns only when all is copied."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copy a state to new host memory: a save that is still in flight keeps its own."""
        return copy_state(state_dict)

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has waited."""

    def close(self) -> None:
        """Do nothing: nothing is held between saves."""

    def _write(
        self, store: Store, word: Word, plan: SavePlan, planner: SavePlanner
    ) -> WrittenShare:
        """Describe what the plan gives to this rank, and write it."""
        pieces, rank = pieces_of(plan, word), self._call.rank
        objects = self._encode_values(plan, planner)
        shards = tuple(pieces)
        header = header_of(word, dict.fromkeys(shard.tensor for shard in shards))
        table = table_of(shards, header.tensors)
        files = WriterPlan(header, rank, 0, table.size_bytes, word.file_bytes)

        def source(shard: Shard) -> tuple[torch.Tensor, Box]:
            return _elements(pieces[shard], shard, planner)

        with lease(store, self._options) as leased:
            asked = OnDemand(table, source, header.chunk_elements)
            tables = write_shards(store, leased, files, table, asked, RAW, None, Ledger())
        return WrittenShare(rank, shards, written_in(tables), objects)

    def _encode_values(self, plan: SavePlan, planner: SavePlanner) -> dict[Path, bytes]:
        """Write the values that this rank is to save as JSON texts.

        Raises:
            StateError: values are not plain data; the text names all of them.
        """
        objects, refused = {}, []
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                continue
            path = path_of(item.index.fqn, plan.planner_data)
            try:
                objects[path] = encode_object(_value_of(item, planner), path)
                is_kept = not self._pickled or not _has_class(objects[path])
            except StateError as error:
                is_kept = not self._pickled
                if is_kept:
                    refused.append(str(error))
            if not is_kept:
                objects[path] = encode_object({PICKLED: _bytes_of(item, planner)}, path)
        if refused:
            raise StateError(
                f"{len(refused)} values cannot be saved: {'; '.join(refused)}. "
                "HoldfastWriter(pickled=True), or holdfast convert --pickled, keeps them as pickles"
            )
        return objects


def _remove_stock(store: Store) -> None:
    """Remove the files of a checkpoint of DCP's that this save has replaced."""
    for name in without_marker(store, names_of_dcp(entry.name for entry in store.list())):
        store.remove(name)


def _elements(item: WriteItem, shard: Shard, planner: SavePlanner) -> tuple[torch.Tensor, Box]:
    """Ask the planner for the elements of an item.

    Raises:
        StateError: they are not what it has planned.
    """
    found = planner.resolve_data(item)
    assert item.tensor_data is not None, "checked before"
    box = Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
    if not isinstance(found, torch.Tensor):
        raise StateError(f"the planner has no tensor for {item.index.fqn}, which it planned")
    with ordinary_torch():
        held = local_tensor(found, shard.tensor.path)
    dtype, shape = held.tensor.dtype, tuple(held.data.shape)
    if (dtype, shape) != (shard.tensor.dtype, box.shape):
        raise StateError(
            f"{item.index.fqn} is {dtype} {list(shape)}, but was planned as {shard.tensor.dtype} "
            f"{list(box.shape)}. A planner with enable_plan_caching=True does not see that a "
            "dtype has changed; make a new one without it"
        )
    return held.data, box


def _value_of(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the value of an item.

    Raises:
        StateError: the planner made bytes of it that hold more than JSON-like values.
    """
    if isinstance(planner, DefaultSavePlanner) and _makes_bytes_as_dcp(type(planner)):
        return planner.lookup_object(item.index)
    data = _bytes_of(item, planner)
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        with suppress(CorruptError, OptionError, StateError):
            return plain_value(data, item.index.fqn)
        named = re.search(r"GLOBAL (\S+)", str(error))  # of torch's text, which is for programmers
        kind = f"the type {named[1]}" if named else "a type"
        raise StateError(f"{item.index.fqn} is of {kind}, which needs a pickle") from error


def _has_class(text: bytes) -> bool:
    """Return whether a value would come back as another type where no reader knows its classes."""
    return b'"$enum":' in text or b'"$dataclass":' in text


def _makes_bytes_as_dcp(kind: type[DefaultSavePlanner]) -> bool:
    stock = DefaultSavePlanner
    same = kind.resolve_data is stock.resolve_data
    return same and kind.transform_object is stock.transform_object


def _bytes_of(item: WriteItem, planner: SavePlanner) -> bytes:
    found = planner.resolve_data(item)
    if isinstance(found, torch.Tensor):
        raise StateError(f"the planner has a tensor for {item.index.fqn}, planned as a value")
    return found.getvalue()
