"""How far damage reaches: from chunks that cannot be read to all that cannot be decoded for it.

A chunk refers to others of its file, and to elements of the base. Knows columns; reads no file.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..boxes import Bools
from ..format.manifest import Manifest
from ..format.references import NONE
from ..layout import Box, Path, boxes_of_range, elements_per_chunk
from ..plan.load_plan import find_chunks, wants_of


def with_referring(manifest: Manifest, lost: Bools) -> Bools:
    """Add the chunks that refer, however deep, to lost ones of their file."""
    references = manifest.references
    if not len(references):
        return lost
    refers = np.flatnonzero(references != NONE)
    lost = lost.copy()
    while len(new := refers[~lost[refers] & lost[references[refers]]]):
        lost[new] = True
    return lost


def based_on(manifest: Manifest, below: Mapping[Path, Sequence[Box]]) -> Bools:
    """Return which chunks of a link refer to some of these boxes of its base."""
    hit = np.zeros(len(manifest.chunk_start), np.bool_)
    if len(manifest.based):
        index = {tensor.path: n for n, tensor in enumerate(manifest.table.header.tensors)}
        wanted = {path: (index[path], boxes) for path, boxes in below.items() if path in index}
        hit[find_chunks(manifest, wants_of(wanted)).rows] = True
        hit &= manifest.based
    return hit


def boxes_of(manifest: Manifest, lost: Bools) -> dict[int, list[Box]]:
    """Return, by the index of the tensor, the boxes of it that lost chunks hold."""
    found: dict[int, list[Box]] = {}
    rows = np.flatnonzero(lost)
    shards = manifest.shard_first_row.searchsorted(rows, "right") - 1
    begins = np.flatnonzero(np.diff(rows, prepend=-2) + np.diff(shards, prepend=-1) != 1)
    ends = np.append(begins[1:], len(rows)) if len(rows) else begins
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        index = int(shards[begin])
        shard = manifest.shard(index)
        step = elements_per_chunk(shard.tensor.dtype, manifest.table.header.chunk_elements)
        first = (int(rows[begin]) - int(manifest.shard_first_row[index])) * step
        count = min((end - begin) * step, shard.box.elements - first)
        held = found.setdefault(int(manifest.table.shard_tensor[index]), [])
        for _, box in boxes_of_range(shard.box.shape, first, count):
            offset = tuple(a + b for a, b in zip(box.offset, shard.box.offset, strict=True))
            held.append(Box(offset, box.shape))
    return found
