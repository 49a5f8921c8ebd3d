"""Links of chains: which checkpoint the next one is made from, and what is known of it.

The coordinator chooses; each rank has in memory what it wrote last, or reads it back.
"""

import logging
import os
from typing import TYPE_CHECKING, Any

from ._agreed import Agreed
from .codecs.groups import units_of
from .engine.basis import Basis, keep_basis, last_link, take_basis
from .engine.chain import open_chain, read_chain
from .engine.pool import lease
from .errors import CorruptError, NotCommittedError, VersionError
from .format import spec
from .format.manifest import content_digest
from .format.names import step_of
from .layout import Shard
from .options import SLOT_BYTES, Options
from .plan.load_plan import plan_load
from .state.tensors import TORCH_DTYPES

if TYPE_CHECKING:
    from .codecs.base import Codec
    from .stores.local import LocalStore

logger = logging.getLogger("holdfast")


def choose_base(store: "LocalStore", codec: "Codec | None", rank: int) -> dict[str, Any] | None:
    """Choose what the checkpoint at ``store`` is to be made from; None: it stands by itself.

    The one that this process saved last in the same directory; else the newest step before it.
    Run by the coordinator, which tells the others.
    """
    if codec is None or codec.every == 1:
        return None
    run = os.path.dirname(store.location)
    location = last_link(run, rank) or _step_before(store)
    if not location:
        return None
    name = os.path.basename(location)
    try:
        chain = open_chain(store.sibling(name))
    except (CorruptError, NotCommittedError, VersionError) as error:
        logger.warning("%s stands by itself: %s", store.location, error)
        return None
    table = chain[-1].manifest.table
    links = table.header.base.links + 1 if table.header.base else 1
    if links >= codec.every:
        return None
    digest = content_digest(table)
    return {"name": name, "digest": digest, "links": links, "save_id": table.header.save_id}


def _step_before(store: "LocalStore") -> str:
    """Return the location of the newest committed step before this one; empty: there is none."""
    run, name = os.path.split(store.location)
    step = step_of(name)
    if step is None or not os.path.isdir(run):
        return ""
    found = [(known, other) for other in os.listdir(run) if (known := step_of(other)) is not None]
    for known, other in sorted(found, reverse=True):
        if known < step and store.sibling(other).exists(spec.MANIFEST_NAME):
            return os.path.join(run, other)
    return ""


def begin_link(agreed: Agreed, rank: int, options: Options) -> Basis | None:
    """Find, or read, what this rank's shards are made from; None where there are no links."""
    codec, header = agreed.codec, agreed.files.header
    if codec is None or codec.every == 1:
        return None
    run = os.path.dirname(agreed.store.location)
    basis = take_basis(run, rank, header.chunk_elements)
    groups = [group for coding in header.codecs for group in coding.groups]
    kept: set[Shard] = set()
    for unit in units_of(agreed.shards, header.tensors, groups):
        roles = [role for role, _ in unit]
        kept.update(s for role, s in unit if codec.keeps(role, s.tensor.dtype, roles))
    is_kept = bool(header.base) and basis.save_id == agreed.base_save_id
    missing = basis.begin(
        agreed.shards, kept.__contains__, is_link=bool(header.base), is_kept=is_kept
    )
    if header.base and missing:
        _read_base(agreed, basis, missing, options)
    return basis


def _read_base(agreed: Agreed, basis: Basis, shards: list[Shard], options: Options) -> None:
    base = agreed.files.header.base
    assert base is not None  # the caller has looked
    chain = open_chain(agreed.store.sibling(base.name))
    manifest = chain[-1].manifest
    index = {tensor: number for number, tensor in enumerate(manifest.table.header.tensors)}
    there = [shard for shard in shards if shard.tensor in index]
    wanted, targets = {}, {}
    for shard in there:
        values = basis.room(shard).view(TORCH_DTYPES[shard.tensor.dtype]).view(shard.box.shape)
        key = (*shard.tensor.path, str(shard.box))
        wanted[key] = (index[shard.tensor], [shard.box])
        targets[key] = [(values, shard.box)]
    with lease(agreed.store.vfs, agreed.store.location, options) as leased:
        read_chain(chain, leased, plan_load(manifest, wanted, SLOT_BYTES), targets)
    for shard in there:
        basis.fill(shard)


def end_link(agreed: Agreed, rank: int, basis: Basis | None) -> None:
    """Keep what was written, now committed, for the next link."""
    if basis is not None:
        basis.settle(agreed.store.location, agreed.files.header.save_id)
        keep_basis(os.path.dirname(agreed.store.location), rank, basis)
