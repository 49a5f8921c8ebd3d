"""What a checkpoint holds as a whole: its digest, and that its shards are all of every tensor."""

import numpy as np

from .._core import xxh3_128
from ..boxes import LANES, PRIME, measure, random_keys
from ..errors import CorruptError
from ..layout import tiling_fault
from . import spec
from .manifest import Manifest, blocks
from .names import dotted
from .table import Table
from .values import path_text


def content_digest(table: Table) -> str:
    """Return the digest of what a checkpoint holds, however it is stored: 32 hexadecimal digits."""
    columns = (table.shard_digest, table.shard_box, table.shard_tensor)
    named = [
        f'[{path_text(t.path)},"{t.dtype}",[{",".join(map(str, t.shape))}]]'
        for t in table.header.tensors
    ]
    text = f"[{','.join(named)}]"
    return xxh3_128(b"".join([*(column.tobytes() for column in columns), text.encode()])).hex()


def check_tiling(manifest: Manifest) -> None:
    """Check that the shards tile every tensor: no gap, no overlap.

    Raises:
        CorruptError: they do not; the text names the tensor.
    """
    table, keys = manifest.table, random_keys(spec.DIMENSIONS_MAX)
    found = np.zeros((len(table.header.tensors), LANES), np.uint64)
    for block in blocks(len(table.shard_tensor)):
        owner, boxes = table.shard_tensor[block], manifest.boxes(block)
        ndim = (manifest.box_start[block + 1] - manifest.box_start[block]) // 2
        for lane, numbers in enumerate(measure(boxes, ndim, keys).T):
            np.add.at(found[:, lane], owner, numbers)
    expected = np.zeros_like(found)
    for block in blocks(len(expected)):
        whole, ndim = manifest.whole_boxes(block)
        expected[block] = measure(whole, ndim, keys)
    differing = (found % np.uint64(PRIME) != expected).any(axis=1)
    for index in np.flatnonzero(differing).tolist():
        tensor = table.header.tensors[index]
        held = [manifest.shard(i).box for i in manifest.shards_of(index).tolist()]
        if fault := tiling_fault(tensor.shape, held):  # pragma: no branch: measures err to one side
            raise CorruptError(f"tensor {dotted(tensor.path)}: {fault}")
