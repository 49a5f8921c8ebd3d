"""What the ranks of a save agree on: the same plan on all of them, new or used again.

Knows no files; the same answers give the same plan.
"""

import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arguments import check_alike, decode_arguments
from ..chains.base_choice import Writing
from ..codecs.base import Codec
from ..engine.file_plan import WriterPlan, lay_out
from ..engine.pool import check_pool
from ..engine.registry import make_codec
from ..group.base import COORDINATOR
from ..group.phase import BriefPhase
from ..group.replies import decode_replies
from ..layout import Path, Tensor
from ..plan import cached_plans
from ..plan.local_states import (
    LocalState,
    Names,
    Values,
    decode_local_states,
    encode_object,
)
from ..plan.save_plan import plan_save
from ..state.tree import Leaves
from ..stores.base import Store
from .request import check_room


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank holds.

    Attributes:
        key: what a plan depends on.
        before: the plan of an earlier save in which that was the same.
        word: what the coordinator alone knows; empty on other ranks.
        step: as this rank was given it.
    """

    store: Store
    leaves: Leaves
    local_state: LocalState
    key: cached_plans.PlanKey
    before: cached_plans.CachedPlan | None
    word: dict[str, Any]
    step: int | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a rank does of the save that all have agreed on.

    Attributes:
        files: its header has no objects yet: the coordinator collects them in the end.
        codec: how all chunks are stored.
        objects: texts of the values that this rank holds.
        size_bytes: of the tensors of all ranks.
        writing: the same, for whoever makes a link.
    """

    store: Store
    files: WriterPlan
    cached: cached_plans.CachedPlan
    codec: Codec
    objects: dict[Path, bytes]
    size_bytes: int
    writing: Writing


def local_state_for(leaves: Leaves, *, compare: bool) -> LocalState:
    """Put together what this rank holds.

    Args:
        compare: whether other ranks hold it too, and it has to be equal.
    """
    digests, objects = dict[Path, bytes](), dict[Path, bytes]()
    for path, tensor in leaves.tensors.items() if compare else ():
        if (digest := tensor.digest()) is not None:
            digests[path] = digest
    texts: dict[int, bytes] = {}  # parameters of one group share their options
    for path, value in leaves.objects.items():
        if (text := texts.get(id(value))) is None:
            text = texts[id(value)] = encode_object(value, path)
        objects[path] = text
    values = Values(digests, objects, frozenset(leaves.exact & digests.keys()))
    tensors, counts, numbers = list[Tensor](), list[int](), list[int]()
    for leaf in leaves.tensors.values():
        named = leaf.tensor
        tensors.append(named)
        if leaf.plain:  # held whole
            counts.append(1)
            shape = named.shape
            numbers += (0,) * len(shape) + shape
            continue
        counts.append(len(leaf.boxed))
        for _, box in leaf.boxed:
            numbers += box.offset
            numbers += box.shape
    names = Names(tuple(tensors), leaves.ties, leaves.mesh)
    boxes = bytes(counts), np.array(numbers, "<i8").tobytes()
    return LocalState(names, boxes, values, socket.gethostname())


def arguments_of_all(told: BriefPhase) -> list[dict[str, Any]]:
    """Return what each rank was called with; nothing where a cached plan, and numbers, did.

    Raises:
        OptionError: the ranks ask for different saves.
    """
    if not told.answers:
        return []
    firsts = [decode_arguments(reply.get("arguments")) for reply in decode_replies(told.answers)]
    arguments = [first["settings"] | first["arguments"] for first in firsts]
    for given in arguments:
        del given["pool_bytes"]  # a rank's own affair
        del given["writers"]  # the coordinator's count
        given["metrics"] = given["metrics"] or arguments[COORDINATOR]["metrics"]
    if arguments:
        check_alike(firsts[COORDINATOR]["what"], arguments)
    return firsts


def agree(proposal: Proposal, told: BriefPhase, rank: int) -> Agreement:
    """Plan, on every rank alike, from what all ranks told; or take the cached plan.

    Raises:
        StateError: the ranks disagree.
        NoSpaceError: the state cannot fit on the disk.
        OptionError: the pool of a rank is too small for its share.
    """
    if told.sums is not None and proposal.before is not None:
        word = cached_plans.decode_word(told.sums) if told.sums else proposal.word
        cached, firsts = proposal.before, []
    else:
        replies, firsts = decode_replies(told.answers), arguments_of_all(told)
        word = firsts[COORDINATOR]["word"]
        local_states = decode_local_states([reply["local_state"] for reply in replies])
        chosen = firsts[COORDINATOR]["settings"]
        sizes = chosen["file_bytes"], chosen["chunk_elements"]
        plan = plan_save(local_states, *sizes, chosen["writers"], make_codec(chosen["codec"]))
        cached = cached_plans.cacheable(
            proposal.key, plan, chosen, local_states, rank, told.answers
        )
    codec, size_bytes = cached.plan.codec, cached.plan.size_bytes
    header = cached.header(word)
    free_bytes = word.get("free_bytes")
    if free_bytes is not None and codec.is_plain:  # what another leaves is known when written
        check_room(proposal.store.location, size_bytes, free_bytes)
    file_bytes = cached.settings["file_bytes"]
    for other, first in enumerate(firsts):
        if first["settings"]["pool_bytes"] is not None:
            shards = cached.plan.shards(other)
            files = WriterPlan(header, other, 0, shards.size_bytes, file_bytes)
            needed = lay_out(files, shards).size_bytes
            check_pool(first["settings"]["pool_bytes"], needed, other)
    files = WriterPlan(header, rank, 0, cached.shards.size_bytes, file_bytes)
    save_id = word["base"]["save_id"] if word["base"] else ""
    return Agreement(
        proposal.store,
        files,
        cached,
        codec,
        proposal.local_state.values.objects,
        size_bytes,
        Writing(proposal.store, header, cached.shards, codec, save_id, rank),
    )
