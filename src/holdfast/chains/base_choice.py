"""Links of chains: which checkpoint the next one is made from, and what is known of it.

The coordinator chooses; each rank has in memory what it wrote last, or reads it back.
"""

import logging
import operator
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain as joined
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codecs.base import Loss
from ..codecs.groups import units_of
from ..engine.basis import Basis, keep_basis, last_link, take_basis
from ..engine.chain import Chain, open_chain
from ..engine.known import known_chain, remember
from ..engine.pool import lease
from ..engine.read_pipeline import read_parts
from ..engine.retire import is_leaving
from ..errors import CorruptError, NotCommittedError, OptionError, VersionError
from ..format import spec
from ..format.header import Header
from ..format.links import TensorLoss
from ..format.names import STEP_PATTERN, step_of
from ..layout import Shard
from ..options import Options
from ..plan.shard_table import ShardTable, cut

if TYPE_CHECKING:
    from ..codecs.base import Codec
    from ..stores.base import Store

logger = logging.getLogger("holdfast")

_is_lower = operator.lt  # of two steps
Losses = list[tuple[Any, ...]]  # index of a tensor, and the fields of its `Loss`


def choose_base(store: "Store", codec: "Codec", rank: int) -> dict[str, Any] | None:
    """Choose what the checkpoint at ``store`` is to be made from; None: it stands by itself.

    The one that this process saved last in the same directory; else the newest step before it.
    Steps are made from lower steps alone, and nothing else is: retention looks at no others, and
    keeps all below a step that cannot be read.
    Run by the coordinator, which tells the others.

    Raises:
        OptionError: the store cannot hold chains.
    """
    if not store.can_link:
        raise OptionError(
            f"{store.location}: this store cannot hold chains of deltas. Choose a codec "
            'without a base, such as "lossless"'
        )
    run = os.path.dirname(store.location)
    location = last_link(run, rank)
    # Not what this one replaces.
    names = map(os.path.basename, (location, store.location))
    below, step = map(STEP_PATTERN.fullmatch, names)
    may_be = _is_lower(int(below[1]), int(step[1])) if below and step else below is step
    is_own = may_be and location not in ("", store.location)
    base = store.sibling(os.path.basename(location)) if is_own else None
    known = known_chain(base) if base is not None else None
    if base is None or (known is None and not base.exists(spec.MANIFEST_NAME)):
        location, is_own = step_before(store), False
        if not location:
            return None
        base = store.sibling(os.path.basename(location))
    name = os.path.basename(location)
    if is_leaving(base):
        logger.warning("%s is saved in full: its base %s is being deleted", store.location, name)
        return None
    try:
        known = (
            known or known_chain(base) or [remember(link.manifest) for link in open_chain(base)][-1]
        )
        if not is_own:  # whoever published it may have died, or hang, before it was durable
            base.sync_directory()
    except (CorruptError, NotCommittedError, VersionError) as error:
        logger.warning("%s is saved in full: %s", store.location, error)
        return None
    if known.links >= codec.every:
        return None
    told = {"digest": known.content, "links": known.links, "save_id": known.save_id}
    return {"name": name, **told}


def step_before(store: "Store") -> str:
    """Return the location of the newest committed step before this one; empty: there is none."""
    run, name = os.path.split(store.location)
    step = step_of(name)
    if step is None or store.above().kind("") != "directory":
        return ""
    names = store.above().scan()
    found = [(known, other) for other in names if (known := step_of(other)) is not None]
    for known, other in sorted(found, reverse=True):
        if known < step and store.sibling(other).exists(spec.MANIFEST_NAME):
            return os.path.join(run, other)
    return ""


@dataclass(frozen=True, slots=True)
class Writing:
    """What one rank writes of a checkpoint that may be a link.

    Attributes:
        base_save_id: of the base, if the header has one.
    """

    store: "Store"
    header: Header
    shards: ShardTable
    codec: "Codec"
    base_save_id: str
    rank: int

    @property
    def run(self) -> str:
        """The directory that the chain is in."""
        return os.path.dirname(self.store.location)


def begin_link(writing: Writing, options: Options) -> Basis:
    """Find, or read, what the shards are made from."""
    codec, header = writing.codec, writing.header
    basis = take_basis(writing.run, writing.rank, header.chunk_elements)
    groups = [group for coding in header.codecs for group in coding.groups]
    kept: set[Shard] = set()
    every = writing.shards.shards
    for unit in units_of(every, header.tensors, groups):
        roles = [role for role, _ in unit]
        for role, shard in unit:
            if codec.keeps(role, shard.tensor.dtype, roles):
                kept.add(shard)
    is_link = header.base is not None
    is_kept = is_link and basis.save_id == writing.base_save_id
    counts = cut(writing.shards, header.chunk_elements).counts.astype(np.int64)
    missing = basis.begin(every, counts.tolist(), kept, is_link=is_link, is_kept=is_kept)
    if header.base and missing:
        try:
            chain = open_chain(writing.store.sibling(header.base.name))
            _read_base(chain, basis, missing, options)
        except CorruptError as error:  # what it does not refer to, it does not need
            logger.error("%s is saved without its base: %s", writing.store.location, error)
    return basis


def _read_base(chain: Chain, basis: Basis, shards: list[Shard], options: Options) -> None:
    manifest, store = chain[-1].manifest, chain[-1].store
    known = set(manifest.table.header.tensors)
    there = [shard for shard in shards if shard.tensor in known]
    with lease(store, options) as leased:
        read_parts(chain, leased, {shard: basis.room(shard) for shard in there})
    for shard in there:
        basis.fill(shard)


def end_link(writing: Writing, basis: Basis) -> None:
    """Keep what was written, now committed, for the next link."""
    keep_basis(writing.run, writing.rank, basis, writing.store.location, writing.header.save_id)


def losses_of(basis: Basis, header: Header) -> Losses:
    """Return what a rank's share of the tensors has lost, for the coordinator."""
    index = {tensor.path: number for number, tensor in enumerate(header.tensors)}
    return [(index[path], *astuple(loss)) for path, loss in basis.losses.items()]


def join_losses(told: Sequence[Losses]) -> tuple[TensorLoss, ...]:
    """Add up what all ranks have lost; 7 digits of it are as many as anyone reads."""
    found: dict[int, Loss] = {}
    for index, *numbers in joined.from_iterable(told):
        found[index] = found.get(index, Loss()) + Loss(*numbers)
    return tuple(
        TensorLoss(index, *(float(f"{number:.6e}") for number in astuple(found[index])))
        for index in sorted(found)
    )
