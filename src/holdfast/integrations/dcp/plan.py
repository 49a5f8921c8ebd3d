"""What DCP's planners planned, in our geometry. Pure: the same on every rank; knows no files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ...boxes import unflatten
from ...convert.dcp_paths import joined, path_of
from ...errors import StateError
from ...format.header import Header
from ...format.rows import Planned, Written, planned_of
from ...layout import Box, Path, Shard, Tensor
from ...plan.balance import cut_shard
from ...plan.local_states import decode_object
from .names import dtype_of, natural
from .word import Word


@dataclass(frozen=True, slots=True)
class WrittenShare:
    """What one rank has written.

    Attributes:
        shards: in the order in which they were written.
        written: their files.
        objects: JSON text of each value.
    """

    rank: int
    shards: tuple[Shard, ...]
    written: Written
    objects: dict[Path, bytes]


def pieces_of(plan: SavePlan, word: Word) -> dict[Shard, WriteItem]:
    """Return the shards to write, in the order of the MANIFEST, each with its item.

    Boxes without elements are left out, those too large for one file cut.
    """
    shards: list[tuple[Shard, WriteItem]] = []
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            continue
        data, fqn = item.tensor_data, item.index.fqn
        if data is None or data.chunk is None:
            raise StateError(f"the planner says of {fqn} neither its shape nor its part")
        path, dtype = path_of(fqn, plan.planner_data), dtype_of(data.properties.dtype, fqn)
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        shards.append((Shard(Tensor(path, dtype, tuple(data.size)), box), item))
    shards.sort(key=lambda pair: (natural(pair[1].index.fqn), pair[0].box.offset))
    return {
        piece: item
        for shard, item in shards
        if shard.box.elements
        for piece in cut_shard(shard, word.file_bytes // 2)
    }


def header_of(
    word: Word, tensors: Iterable[Tensor], objects: Iterable[tuple[Path, Any]] = ()
) -> Header:
    """Return the header of a table of these tensors and values."""
    return Header(
        save_id=word.save_id,
        step=None,
        world_size=word.world_size,
        mesh=None,
        metrics={},
        written_by=word.written_by,
        chunk_elements=word.chunk_elements,
        tensors=tuple(tensors),
        ties=(),
        objects=tuple(objects),
    )


def join(word: Word, metadata: Metadata, shares: Sequence[WrittenShare]) -> tuple[Header, Planned]:
    """Put together what all ranks wrote, and check that it is what was planned.

    Raises:
        StateError: it is not.
    """
    ranks = [share.rank for share in shares]
    if ranks != list(range(word.world_size)):
        raise StateError(f"ranks {ranks} wrote; expected 0 to {word.world_size - 1}, in order")
    tensors = _planned_tensors(metadata)
    texts = {path: text for share in shares for path, text in share.objects.items()}
    values = {path: decode_object(texts[path]) for path in _in_order(texts, metadata)}
    index = {tensor: number for number, tensor in enumerate(tensors)}
    missing = len(metadata.state_dict_metadata) - len(tensors) - len(values)
    if missing:
        raise StateError(
            f"{missing} planned values were written by no rank; check that all ranks use the same "
            "planner"
        )
    shards = [shard for share in shares for shard in share.shards]
    for shard in shards:
        if shard.tensor not in index:
            tensor = shard.tensor
            raise StateError(
                f"a rank wrote {'.'.join(map(str, tensor.path))} as {tensor.dtype} "
                f"{list(tensor.shape)}, but the plan has another dtype or shape; check that all "
                "ranks have the same state"
            )
    ndim = np.array([len(shard.box.shape) for shard in shards], np.int64)
    flat = np.array([n for s in shards for n in (*s.box.offset, *s.box.shape)], np.int64)
    objects = joined(values, [tensor.path for tensor in tensors])
    header = header_of(word, tensors, objects.items())
    planned = planned_of(
        tensors,
        header.chunk_elements,
        np.array([index[shard.tensor] for shard in shards], np.int64),
        unflatten(flat, np.cumsum(2 * ndim) - 2 * ndim, ndim),
        np.cumsum([0, *(len(share.shards) for share in shares)]),
    )
    return header, planned


def _in_order(paths: Iterable[Path], metadata: Metadata) -> list[Path]:
    """Return paths in the order of the state, as far as the planner has kept it."""
    keys = metadata.planner_data
    names = keys if isinstance(keys, dict) else metadata.state_dict_metadata
    order = {path_of(fqn, keys): number for number, fqn in enumerate(names)}
    return sorted(paths, key=lambda path: order.get(path, len(order)))


def _planned_tensors(metadata: Metadata) -> list[Tensor]:
    """Return all tensors of a save, in an order that every rank knows."""
    found = {
        fqn: Tensor(
            path_of(fqn, metadata.planner_data),
            dtype_of(described.properties.dtype, fqn),
            tuple(described.size),
        )
        for fqn, described in metadata.state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }
    return [found[fqn] for fqn in sorted(found, key=natural)]
