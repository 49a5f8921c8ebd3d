"""Which data files of a local step are on the disks of other hosts, and so not missing here.

Where hosts have a disk each, a step is on all of them together, and MANIFEST on one. A job says in
``.store`` which of its ranks share a disk (`format/local_mark.py`). Knows stores and the format.
"""

from ..errors import StoreError
from ..format import spec
from ..format.local_mark import MARK_BYTES_MAX, MARK_NAME, LocalMark, decode_mark
from ..format.manifest import Manifest
from ..stores.base import Store


def files_elsewhere(store: Store, manifest: Manifest) -> frozenset[str]:
    """Return the places of the data files that are not here, and that another host has.

    Of a step whose job had another number of ranks, nothing is known: none.
    """
    mark, world_size = _mark_above(store), manifest.table.header.world_size
    ranks = manifest.table.file_rank.tolist()
    return frozenset(
        f"{store.location}/{name}"
        for name, rank in zip(manifest.file_names, ranks, strict=True)
        if mark.is_elsewhere(rank, world_size) and not store.exists(name)
    )


def has_no_manifest(store: Store) -> bool:
    """Return whether the MANIFEST of a step is on the disk of another host."""
    return _mark_above(store).lacks_manifests and store.exists(spec.DATA_DIRECTORY)


def _mark_above(store: Store) -> LocalMark:
    """Read what the run that holds a step says of itself; nothing where it is no local run."""
    try:
        data = store.above().get(MARK_NAME, MARK_BYTES_MAX)
    except StoreError:
        return LocalMark()
    return decode_mark(data) or LocalMark()
