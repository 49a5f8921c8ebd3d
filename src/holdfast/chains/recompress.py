"""A checkpoint written again, shard by shard, under another codec: aside, or in its own place.

Memory is bounded by the largest parameter of a rank, not by the checkpoint.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..codecs.base import Codec
from ..codecs.groups import units_of
from ..engine.basis import Basis
from ..engine.chain import Chain, open_chain
from ..engine.commit import begin, check_absent, commit
from ..engine.discard import remove_files
from ..engine.file_plan import WriterPlan
from ..engine.ledger import Ledger
from ..engine.origin import OnDemand
from ..engine.pool import lease
from ..engine.read_pipeline import read_parts
from ..engine.registry import LOSSLESS, find_codec
from ..engine.replace import commit_again
from ..engine.write_pipeline import write_shards
from ..format import spec
from ..format.coding import Coding
from ..format.header import Header
from ..format.links import Base
from ..format.rows import Planned, Written, planned_of, written_in
from ..format.table import content_digest
from ..layout import Box, Shard, batches
from ..options import SLOT_BYTES, STREAM_BYTES, Options, options_of
from ..plan.shard_table import table_of
from ..state.tensors import TORCH_DTYPES
from ..stores.base import Store
from ..stores.url import open_store
from ..worker import in_worker
from .base_choice import Writing, begin_link, choose_base, end_link, join_losses, losses_of

AHEAD_BYTES = 256 << 20  # of shards read at once, if no single one is larger
Report = Callable[[int], None]  # called with the bytes of elements done since the last call


@in_worker
def recompress(
    source: "str | os.PathLike[str]",
    target: "str | os.PathLike[str]",
    *,
    codec: str | Codec,
    options: Options | None = None,
    report: Report = lambda _: None,
) -> None:
    """Write a checkpoint again under another codec, in a new directory.

    With a delta codec, the new checkpoint is a delta of the step before it in the new directory.

    Args:
        source: directory of the checkpoint.
        target: new directory.
        codec: as for `save`.
        options: settings such as ``io`` and ``trust``.
        report: called with the bytes of elements read since the last call.

    Raises:
        NotCommittedError: there is no checkpoint at ``source``.
        AlreadyCommittedError: there is a checkpoint at ``target``.
        CorruptError: the source, or one of its bases, fails a check.

    Example:
        ``holdfast.recompress("runs/a/step-00001000", "small/step-00001000", codec="lossless")``
    """
    options = options_of(options)
    there = open_store(target, "target")
    chain = open_chain(open_store(source, "source"), trust=options.trust)
    chosen = find_codec(codec)
    check_absent(there)
    word = choose_base(there, chosen, 0) if chosen.every > 1 else None
    base = Base(word["name"], word["digest"], word["links"]) if word else None
    header = rewritten_header(chain[-1].manifest.table.header, chosen, base)
    writing = make_writing(there, header, chain, chosen, word["save_id"] if word else "")
    try:
        made = write_again(chain, writing, options, report)
        begun = begin(there, _with_losses(header, made.basis), *made.told)
        commit(there, begun)
    except BaseException:
        if not there.exists(spec.MANIFEST_NAME):
            remove_files(there, header.save_id)
        raise
    if made.basis:
        end_link(writing, made.basis)


@in_worker
def rebase(
    path: "str | os.PathLike[str]",
    *,
    options: Options | None = None,
    report: Report = lambda _: None,
) -> bool:
    """Turn a delta checkpoint into a full one, in place.

    Its elements stay the same to the bit, so deltas of it stay valid. The old files are deleted
    once the new ones are durable; a load that runs at that moment fails.

    Args:
        path: directory of the checkpoint.
        options: settings such as ``io`` and ``trust``.
        report: called with the bytes of elements read since the last call.

    Returns:
        False if it was a full checkpoint already.

    Raises:
        NotCommittedError: there is no checkpoint.
        CorruptError: the checkpoint, or one of its bases, fails a check; nothing was changed.

    Example:
        ``holdfast.rebase("runs/a/step-00002000")``
    """
    options = options_of(options)
    store = open_store(path)
    chain = open_chain(store, trust=options.trust)
    manifest = chain[-1].manifest
    old = manifest.table.header
    if old.base is None:
        return False
    header = rewritten_header(old, LOSSLESS, None)
    writing = make_writing(store, header, chain, LOSSLESS, "")
    try:
        made = write_again(chain, writing, options, report)
    except BaseException:
        remove_files(store, header.save_id)
        raise
    content = content_digest(manifest.table)
    commit_again(store, begin(store, header, *made.told), content)
    if store.exists(spec.SIGNATURE_NAME):
        store.remove(spec.SIGNATURE_NAME)  # it was of what is stored no more
    remove_files(store, old.save_id)
    return True


def _with_losses(header: Header, basis: Basis | None) -> Header:
    """Note what was lost now; else what had been lost before."""
    lost = join_losses([losses_of(basis, header)]) if basis else ()
    return replace(header, losses=lost or header.losses)


def rewritten_header(old: Header, codec: Codec, base: Base | None) -> Header:
    """Return the header of a checkpoint that is written again, by this holdfast."""
    coding = Coding(codec.name, codec.groups(old.tensors))
    save_id = secrets.token_hex(16)
    return replace(old, save_id=save_id, codecs=(coding,), codec_of=(), base=base)


def make_writing(
    store: Store, header: Header, chain: Chain, codec: Codec, base_save_id: str
) -> Writing:
    """Say what is written of a checkpoint: all shards of the tensors that the header has."""
    manifest, kept = chain[-1].manifest, set(header.tensors)
    count = len(manifest.table.shard_tensor)
    every = (manifest.shard(index) for index in range(count))
    shards = [shard for shard in every if shard.tensor in kept]
    groups = [group for coding in header.codecs for group in coding.groups]
    ordered = [s for unit in units_of(shards, header.tensors, groups) for _, s in unit]
    table = table_of(ordered, header.tensors)
    return Writing(store, header, table, codec, base_save_id, 0)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What was written: as `commit` takes it, and what the next link is made from."""

    told: tuple[Planned, list[Written]]
    basis: Basis | None


def write_again(chain: Chain, writing: Writing, options: Options, report: Report) -> Rewritten:
    """Write shards as the first rank, durably."""
    header, store, shards = writing.header, writing.store, writing.shards
    files = WriterPlan(header, 0, 0, shards.size_bytes, options.file_bytes)
    basis = begin_link(writing, options) if writing.codec.every > 1 else None
    source = _Source(chain, shards.shards, options, report)
    asked = OnDemand(shards, source, header.chunk_elements)
    with lease(store, options) as leased:
        tables = write_shards(store, leased, files, shards, asked, writing.codec, basis, Ledger())
    # Of the first rank alone: the header may name four thousand million of them.
    first = np.array([0, len(shards)], np.int64)
    elements = header.chunk_elements
    planned = planned_of(header.tensors, elements, shards.tensor, shards.boxes, first)
    return Rewritten((planned, [written_in(tables)]), basis)


class _Source:
    """Reads the shards that are asked for one after the other, some ahead."""

    def __init__(
        self, chain: Chain, shards: Sequence[Shard], options: Options, report: Report
    ) -> None:
        self._chain, self._shards, self._report = chain, shards, report
        self._place = {shard: number for number, shard in enumerate(shards)}
        # A pool of another size than the one that is written from, which is in use.
        size = (options.pool_bytes or STREAM_BYTES) + SLOT_BYTES
        self._options = replace(options, pool_bytes=size)
        self._held: dict[Shard, torch.Tensor] = {}

    def __call__(self, shard: Shard) -> tuple[torch.Tensor, Box]:
        if shard not in self._held:
            self._held = self._read(self._place[shard])
        memory = self._held.pop(shard)
        self._report(memory.nbytes)
        return memory.view(TORCH_DTYPES[shard.tensor.dtype]).view(shard.box.shape), shard.box

    def _read(self, number: int) -> dict[Shard, torch.Tensor]:
        ahead = next(batches(self._shards[number:], lambda shard: shard.size_bytes, AHEAD_BYTES))
        parts = {
            shard: torch.empty(shard.size_bytes, dtype=torch.uint8, device="cpu") for shard in ahead
        }
        store = self._chain[-1].store
        with lease(store, self._options) as leased:
            read_parts(self._chain, leased, parts)
        return parts
