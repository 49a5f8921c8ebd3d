"""A chain: a checkpoint, the base it was made from, and so on down to one that needs none.

Opens all of them, without reading elements (`read_pipeline` does) and without torch. Knows stores;
no memory.
"""

from contextlib import suppress
from dataclasses import dataclass

from ..errors import CorruptError, NotCommittedError, StoreError
from ..format import spec
from ..format.links import Base
from ..format.manifest import Manifest
from ..format.names import dotted
from ..format.table import content_digest
from ..options import Keys
from ..stores.base import Store
from .check import read_manifest
from .read import still_there
from .trust import check_of, check_of_base


@dataclass(frozen=True, slots=True)
class Link:
    """One checkpoint of a chain."""

    store: Store
    manifest: Manifest


Chain = tuple[Link, ...]  # from the one that needs none to the newest


def open_chain(store: Store, manifest: Manifest | None = None, trust: Keys | None = None) -> Chain:
    """Open a checkpoint with everything below it that its chunks may need.

    Args:
        manifest: the checkpoint's, where it has been read.
        trust: else, the keys one of which has to have signed it.

    Raises:
        NotCommittedError: there is no checkpoint.
        CorruptError: it fails a check; or a base is missing, or is not the one it was made from.
    """
    links = [Link(store, manifest or read_manifest(store, check_of(trust)))]
    with still_there(store):
        while len(links[-1].manifest.based):
            links.append(open_base(links[-1]))
    return tuple(reversed(links))


def open_readable(store: Store, manifest: Manifest) -> Chain:
    """Open a checkpoint with what is below it, as far as that can be opened.

    For reading what does not refer to what is missing.
    """
    links = [Link(store, manifest)]
    with suppress(CorruptError):
        while len(links[-1].manifest.based):
            links.append(open_base(links[-1]))
    return tuple(reversed(links))


def open_base(link: Link) -> Link:
    """Open what a link was made from.

    Raises:
        CorruptError: it is missing, fails a check, or is another.
        VersionError: a newer holdfast wrote it.
    """
    base = link.manifest.table.header.base
    assert base is not None  # a manifest whose chunks refer to one has it
    where = f"{link.store.location} is a delta of {base.name} in the same directory"
    store = link.store.sibling(base.name)
    try:
        signed = link.manifest.signed
        manifest = read_manifest(store, check_of_base(signed) if signed else None)
    except NotCommittedError as error:
        raise CorruptError(f"{where}, {_why_missing(store, error)}") from error
    except CorruptError as error:
        raise type(error)(f"{where}, which is damaged: {error}") from error
    header = manifest.table.header
    if content_digest(manifest.table) != base.digest:
        raise CorruptError(
            f"{where}; found another checkpoint there (step {header.step}, save "
            f"{header.save_id}), of another run or saved again. Put the right one there"
        )
    if header.base and header.base.links >= base.links:
        raise CorruptError(
            f"{where}: expected fewer than {base.links} bases below that one, found "
            f"{header.base.links}. Use another checkpoint"
        )
    _check_tensors(link.manifest, manifest, base)
    return Link(store, manifest)


def _why_missing(store: Store, error: NotCommittedError) -> str:
    """Say what became of a base: it was committed once, or it would have no delta."""
    with suppress(StoreError):
        if store.list(spec.DATA_DIRECTORY):
            return (
                "which has data files but no MANIFEST: MANIFEST is lost. Run 'holdfast repair "
                f"{store.location}' to see whether it can be rebuilt"
            )
    return f"which is missing: {error}. Put it back, or use another checkpoint"


def _check_tensors(manifest: Manifest, below: Manifest, base: Base) -> None:
    """Check that the base has what chunks refer to."""
    owner = manifest.table.shard_tensor
    chunks = manifest.table.shard_chunks
    first = manifest.shard_first_row
    held = {tensor.path: tensor for tensor in below.table.header.tensors}
    for shard in range(len(owner)):
        start = int(first[shard])
        if manifest.based[start : start + int(chunks[shard])].any():
            tensor = manifest.table.header.tensors[int(owner[shard])]
            if held.get(tensor.path) != tensor:
                name = dotted(tensor.path)
                raise CorruptError(
                    f"its base, {base.name}, has no {name} of the same dtype and shape. Use "
                    "another checkpoint"
                )
