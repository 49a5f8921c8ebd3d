"""A checkpoint of DCP's own ⇄ one of ours, a part at a time: memory is bounded by one shard.

Either way the target appears whole or not at all, and what is read of ours is verified.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ...convert.dcp_paths import PICKLED, is_pickled
from ...engine.around import check_outside
from ...engine.chain import Chain, open_chain
from ...engine.pool import lease
from ...engine.read_pipeline import read_chain
from ...errors import AlreadyCommittedError, NotCommittedError, OptionError, StoreError
from ...format.manifest import Manifest
from ...format.names import DCP_METADATA_NAME, step_of
from ...format.spec import MANIFEST_NAME
from ...layout import Box, Path, Shard, batches, whole
from ...options import SLOT_BYTES, Options
from ...plan.balance import cut_shard
from ...plan.load_plan import plan_load
from ...saving.request import check_room
from ...state.tensors import TORCH_DTYPES, Part
from ...stores.base import Store
from ...stores.url import open_store
from .names import Contents, describe, place_of
from .stock import Files, read_metadata
from .writer import HoldfastWriter

BATCH_BYTES = 256 << 20  # read of ours, and held, at once; a file of DCP's each
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be converted.

    Attributes:
        into: "holdfast" or "dcp".
        tensors, values: how many, tied names counted each.
        size_bytes: of the tensors.
        run: does it; calls its argument with the bytes done since the last call.
    """

    source: str
    target: str
    into: str
    tensors: int
    values: int
    size_bytes: int
    run: Callable[[Report], None]


def plan_conversion(
    source: "str | os.PathLike[str]", target: "str | os.PathLike[str]", *, pickled: bool = False
) -> Conversion:
    """Look at a checkpoint, and say how it is converted into the other format.

    Args:
        source: directory of a checkpoint, DCP's or ours.
        target: directory to be made, or an empty one.
        pickled: keep values of DCP's that are not JSON-like as the pickles they are.

    Raises:
        NotCommittedError: there is no checkpoint at ``source``.
        AlreadyCommittedError: there is one at ``target``.
        OptionError: ``target`` holds something else, or is within a checkpoint.
        CorruptError: the source fails a check.
    """
    here, there = open_store(place_of(source), "source"), open_store(place_of(target), "target")
    _check_free(there)
    if here.exists(MANIFEST_NAME):
        return _into_dcp(here, there)
    if here.exists(DCP_METADATA_NAME):
        return _from_dcp(here, there, pickled=pickled)
    names = [entry.name for entry in here.list()] if here.exists("") else []
    steps = {step: name for name in names if (step := step_of(name)) is not None}
    if steps:
        raise NotCommittedError(
            f"{here.location} is a run, not one checkpoint; give one of its steps, such as "
            f"{steps[max(steps)]}"
        )
    raise NotCommittedError(
        f"{here.location} holds neither {MANIFEST_NAME} nor {DCP_METADATA_NAME}; expected the "
        "directory of a checkpoint of holdfast or DCP"
    )


def _check_free(store: Store) -> None:
    names = [entry.name for entry in store.list()] if store.exists("") else []
    if MANIFEST_NAME in names or DCP_METADATA_NAME in names:
        raise AlreadyCommittedError(
            f"{store.location} holds a checkpoint, which is never overwritten; choose another place"
        )
    if names:
        raise OptionError(f"{store.location} is not empty; choose a new directory")
    check_outside(store)


def _from_dcp(here: Store, there: Store, *, pickled: bool) -> Conversion:
    metadata = read_metadata(here.location)
    described = metadata.state_dict_metadata.values()
    tensors = [item for item in described if isinstance(item, TensorStorageMetadata)]
    size_bytes = sum(t.size.numel() * t.properties.dtype.itemsize for t in tensors)

    def run(report: Report) -> None:
        writer = HoldfastWriter(there.location, pickled=pickled)
        files = _Reporting(here.location, metadata, report)
        writer.set_up_storage_writer(True)
        (plan,) = writer.prepare_global_plan([files.create_local_plan()])
        writer.finish(metadata, [writer.write_data(plan, files).value()])

    values = len(metadata.state_dict_metadata) - len(tensors)
    return Conversion(
        here.location, there.location, "holdfast", len(tensors), values, size_bytes, run
    )


class _Reporting(Files):
    """Tells how far it is."""

    def __init__(self, directory: str, metadata: Metadata, report: Report) -> None:
        super().__init__(directory, metadata)
        self._report = report
        self._told: set[MetadataIndex] = set()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found = super().resolve_data(write_item)
        if isinstance(found, torch.Tensor) and write_item.index not in self._told:
            self._told.add(write_item.index)
            self._report(found.nbytes)
        return found


def _into_dcp(here: Store, there: Store) -> Conversion:
    chain = open_chain(here)
    manifest = chain[-1].manifest
    contents = describe(manifest, here.location)
    items, described = _plan_all(manifest, contents)
    size_bytes = sum(map(_bytes_of, items))

    def run(report: Report) -> None:
        check_room(there.location, size_bytes, there.free_bytes())
        with _removed_on_failure(there):
            _write(chain, there, contents, items, described, report)

    values = len(described) - len(contents.tensors)
    return Conversion(
        here.location, there.location, "dcp", len(contents.tensors), values, size_bytes, run
    )


def _plan_all(
    manifest: Manifest, contents: Contents
) -> tuple[list[WriteItem], dict[str, STORAGE_TYPES]]:
    """Plan every value and every shard of ours, cut where it is large, as an item of DCP's."""
    items: list[WriteItem] = []
    described: dict[str, STORAGE_TYPES] = {}
    for fqn in contents.metadata.state_dict_metadata:
        if fqn not in contents.tensors:
            items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
            described[fqn] = BytesStorageMetadata()
            continue
        index = contents.tensors[fqn]
        tensor = manifest.table.header.tensors[index]
        shards = [manifest.shard(i) for i in manifest.shards_of(index).tolist()]
        pieces = [piece for shard in shards for piece in cut_shard(shard, BATCH_BYTES)]
        # DCP lists a part of no elements, where we have none.
        boxes = [piece.box for piece in pieces or [Shard(tensor, whole(tensor.shape))]]
        chunks = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in boxes]
        form = TensorProperties(dtype=TORCH_DTYPES[tensor.dtype]), torch.Size(tensor.shape)
        described[fqn] = TensorStorageMetadata(*form, chunks)
        items += [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, *form),
            )
            for number, chunk in enumerate(chunks)
        ]
    return items, described


def _write(
    chain: Chain,
    there: Store,
    contents: Contents,
    items: list[WriteItem],
    described: dict[str, STORAGE_TYPES],
    report: Report,
) -> None:
    """Write batch after batch, each as if it were the share of one rank."""
    writer = FileSystemWriter(there.location)
    writer.set_up_storage_writer(True)
    plans = [SavePlan(batch) for batch in batches(items, _bytes_of, BATCH_BYTES)] or [SavePlan([])]
    writer.prepare_local_plan(plans[0])
    results = []
    for plan in writer.prepare_global_plan(plans):
        planner = _Batch(_read(chain, contents, plan.items), contents.values)
        results.append(writer.write_data(plan, planner).value())
        report(sum(map(_bytes_of, plan.items)))
    metadata = Metadata(described, planner_data=contents.metadata.planner_data)
    writer.finish(metadata, results)
    there.sync_path(DCP_METADATA_NAME)


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0


def _read(
    chain: Chain, contents: Contents, items: Iterable[WriteItem]
) -> dict[MetadataIndex, torch.Tensor]:
    """Read the tensors of a batch, verified."""
    found: dict[MetadataIndex, torch.Tensor] = {}
    targets: dict[Path, list[Part]] = {}
    wanted: dict[Path, tuple[int, list[Box]]] = {}
    for number, item in enumerate(items):
        if item.tensor_data is None:
            continue
        chunk, index = item.tensor_data.chunk, contents.tensors[item.index.fqn]
        tensor = torch.empty(chunk.sizes, dtype=item.tensor_data.properties.dtype, device="cpu")
        found[item.index] = tensor
        if tensor.numel():
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            path: Path = (item.index.fqn, number)
            targets[path], wanted[path] = [(tensor, box)], (index, [box])
    store, manifest = chain[-1].store, chain[-1].manifest
    runs = plan_load(manifest, wanted, SLOT_BYTES)
    with lease(store, Options()) as leased:
        read_chain(chain, leased, runs, targets)
    return found


class _Batch(DefaultSavePlanner):
    """Gives DCP's writer what has been read."""

    def __init__(self, tensors: dict[MetadataIndex, torch.Tensor], values: dict[str, Any]) -> None:
        super().__init__()
        self._tensors, self._values = tensors, values

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index in self._tensors:
            return self._tensors[write_item.index]
        value = self._values[write_item.index.fqn]
        if is_pickled(value):
            return io.BytesIO(value[PICKLED])
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer


@contextlib.contextmanager
def _removed_on_failure(store: Store) -> Iterator[None]:
    """Remove what was written into a directory that was empty before, when the block fails."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # what torch.save makes of a disk that fails
        shutil.rmtree(store.location, ignore_errors=True)
        failure = StoreError(f"write {store.location}: {error}")
        failure.errno = getattr(error, "errno", None)
        raise failure from error
    except BaseException:
        shutil.rmtree(store.location, ignore_errors=True)
        raise
