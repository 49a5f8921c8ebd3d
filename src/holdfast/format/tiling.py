"""That the shards of a checkpoint are all of every tensor, and no shape is too large."""

from collections.abc import Iterable

import numpy as np

from ..boxes import LANES, PRIME, measure, random_keys
from ..errors import CorruptError
from ..layout import Tensor, spanned_bytes, tiling_fault
from . import spec
from .manifest import Manifest, blocks
from .names import dotted


def check_tiling(manifest: Manifest) -> None:
    """Check that the shards tile every tensor: no gap, no overlap.

    Raises:
        CorruptError: they do not; the text names the tensor.
    """
    table = manifest.table
    cut = np.flatnonzero(manifest.is_cut)  # any other is one shard, which is all of it
    if not len(cut):
        return
    rows = np.flatnonzero(manifest.is_cut[table.shard_tensor])
    found = np.zeros((len(table.header.tensors), LANES), np.uint64)
    expected, keys = found.copy(), random_keys(spec.DIMENSIONS_MAX)
    for block in blocks(len(rows)):
        shards = rows[block]
        ndim = (manifest.box_start[shards + 1] - manifest.box_start[shards]) // 2
        for lane, numbers in enumerate(measure(manifest.boxes(shards), ndim, keys).T):
            np.add.at(found[:, lane], table.shard_tensor[shards], numbers)
    for block in blocks(len(cut)):
        whole, ndim = manifest.whole_boxes(cut[block])
        expected[cut[block]] = measure(whole, ndim, keys)
    differing = (found % np.uint64(PRIME) != expected).any(axis=1)
    for index in np.flatnonzero(differing).tolist():
        tensor = table.header.tensors[index]
        held = [manifest.shard(i).box for i in manifest.shards_of(index).tolist()]
        if fault := tiling_fault(tensor.shape, held):  # pragma: no branch: measures err to one side
            raise CorruptError(f"tensor {dotted(tensor.path)}: {fault}")


def check_shapes(tensors: Iterable[Tensor]) -> None:
    """Check what a reader checks of shapes: of tensors in memory, only an empty one can fail.

    Raises:
        CorruptError: a shape spans 2^63 bytes or more; the text names the tensor.
    """
    for tensor in tensors:
        if spanned_bytes(tensor.dtype, tensor.shape) > spec.TENSOR_BYTES_MAX:
            raise CorruptError(
                f"tensor {dotted(tensor.path)} has no elements, but its shape "
                f"{list(tensor.shape)!s:.80} spans 2^63 bytes or more"
            )
