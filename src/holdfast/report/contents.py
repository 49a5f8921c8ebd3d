"""What one checkpoint holds, as rows for the panels of size and shards: its MANIFEST alone."""

import math
from collections.abc import Iterator, Sequence

from .. import Checkpoint
from .data import BoxRow, Contents, TensorRow

OTHERS = "others"
TENSORS_MAX = 20_000  # of more, the largest
BOXED_TENSORS_MAX = 6
BOXES_MAX = 256  # of one tensor


def contents_of(name: str, checkpoint: Checkpoint) -> Contents:
    """Describe an open checkpoint.

    Raises:
        HoldfastError: it cannot be described.
    """
    tensors = sorted(_tensors(checkpoint), key=lambda row: -row.size_bytes)[:TENSORS_MAX]
    return Contents(
        name=name,
        tensors=tuple(tensors),
        rank_bytes=_rank_bytes(checkpoint),
        boxes=_boxes(checkpoint) if checkpoint.kind == "holdfast" else {},
        mesh=checkpoint.mesh,
        objects=len(checkpoint.objects()),
    )


def part_bytes(checkpoint: Checkpoint, parts: Sequence[str]) -> dict[str, int]:
    """Sum the bytes stored of each part of the names; what is in none is ``OTHERS``."""
    sums = dict.fromkeys([*parts, OTHERS], 0)
    for row in _tensors(checkpoint):
        part = next((p for p in parts if row.name == p or row.name.startswith(f"{p}.")), OTHERS)
        sums[part] += row.stored_bytes
    return {part: size for part, size in sums.items() if size}


def _tensors(checkpoint: Checkpoint) -> Iterator[TensorRow]:
    for name in checkpoint.names():
        info = checkpoint.info(name)
        if info.tied_to is not None:
            continue
        loss = None
        if info.loss is not None:
            energy = info.loss.energy
            loss = info.loss.squared_error / energy if energy > 0 else 0.0
            loss = loss if math.isfinite(loss) else None
        yield TensorRow(
            name, info.dtype, info.shape, info.size_bytes, info.stored_bytes, info.codec, loss
        )


def _rank_bytes(checkpoint: Checkpoint) -> tuple[int, ...]:
    if checkpoint.kind != "holdfast":
        return ()
    table = checkpoint.subject.manifest.table
    totals = [0] * max(checkpoint.world_size, int(table.file_rank.max(initial=0)) + 1)
    for rank, size in zip(table.file_rank.tolist(), table.file_bytes.tolist(), strict=True):
        totals[rank] += size
    return tuple(totals)


def _boxes(checkpoint: Checkpoint) -> dict[str, tuple[BoxRow, ...]]:
    """Return who wrote which box of the largest tensors that several boxes make."""
    manifest = checkpoint.subject.manifest
    table = manifest.table
    sizes = [tensor.size_bytes for tensor in table.header.tensors]
    names = {checkpoint.path_of(name): name for name in checkpoint.names()}
    found: dict[str, tuple[BoxRow, ...]] = {}
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        path = table.header.tensors[index].path
        shards = manifest.shards_of(index).tolist()
        if not 1 < len(shards) <= BOXES_MAX or path not in names:
            continue
        rows = []
        for shard in shards:
            box = manifest.shard(shard).box
            rank = int(table.file_rank[int(table.shard_file[shard])])
            rows.append(BoxRow(tuple(box.offset), tuple(box.shape), rank))
        found[names[path]] = tuple(rows)
        if len(found) == BOXED_TENSORS_MAX:
            break
    return found
