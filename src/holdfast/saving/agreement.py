"""What the ranks of a save agree on: the same plan on all of them, new or used again.

Knows no files; the same answers give the same plan.
"""

import socket
from dataclasses import dataclass
from typing import Any

from ..arguments import check_alike, decode_arguments
from ..chains.base_choice import Writing
from ..codecs.base import Codec
from ..engine.file_plan import WriterPlan, lay_out
from ..engine.pool import check_pool
from ..engine.registry import make_codec
from ..group.base import COORDINATOR, BriefPhase
from ..group.replies import decode_replies
from ..layout import Path, Tensor
from ..plan import known
from ..plan.requests import (
    Names,
    Request,
    Values,
    decode_requests,
    encode_boxes,
    encode_object,
)
from ..plan.save_plan import plan_save
from ..plan.shard_table import ShardTable
from ..state.tree import Leaves
from ..stores.local import LocalStore
from .request import check_room


@dataclass(frozen=True, slots=True)
class Described:
    """What one rank holds.

    Attributes:
        held: what a plan depends on.
        before: the plan of an earlier save in which that was the same.
    """

    store: LocalStore
    leaves: Leaves
    request: Request
    held: known.Held
    before: known.Known | None


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a rank does of the save that all have agreed on.

    Attributes:
        files: its header has no objects yet: the coordinator collects them in the end.
        codec: how all chunks are stored.
        objects: texts of the values that this rank holds.
        size_bytes: of the tensors of all ranks.
        base_save_id: of the base, if the header has one.
    """

    store: LocalStore
    files: WriterPlan
    made: known.Known
    codec: Codec
    objects: dict[Path, bytes]
    size_bytes: int
    base_save_id: str

    def writing(self, rank: int) -> Writing:
        """Return what there is to know of its base."""
        header = self.files.header
        return Writing(self.store, header, self.shards, self.codec, self.base_save_id, rank)

    @property
    def shards(self) -> ShardTable:
        """Those that this rank writes, in order."""
        return self.made.shards


def request_for(leaves: Leaves, *, compare: bool) -> Request:
    """Put together what this rank holds.

    Args:
        compare: whether other ranks hold it too, and it has to be equal.
    """
    digests = {
        path: digest
        for path, tensor in leaves.tensors.items()
        if compare and (digest := tensor.digest()) is not None
    }
    texts: dict[int, bytes] = {}  # parameters of one group share their options
    objects = {
        path: texts.get(id(value)) or texts.setdefault(id(value), encode_object(value, path))
        for path, value in leaves.objects.items()
    }
    values = Values(digests, objects, frozenset(leaves.exact & digests.keys()))
    tensors, counts, numbers = list[Tensor](), list[int](), list[int]()
    for leaf in leaves.tensors.values():
        tensors.append(leaf.tensor)
        if leaf.plain:  # held whole
            counts.append(1)
            numbers += (0,) * len(leaf.tensor.shape)
            numbers += leaf.tensor.shape
            continue
        counts.append(len(leaf.boxed))
        for _, box in leaf.boxed:
            numbers += box.offset
            numbers += box.shape
    names = Names(tuple(tensors), leaves.ties(), leaves.mesh)
    return Request(names, encode_boxes(counts, numbers), values, socket.gethostname())


def arguments_of_all(told: BriefPhase) -> list[dict[str, Any]]:
    """Return what each rank was called with; nothing where a plan made before, and numbers, did.

    Raises:
        OptionError: the ranks ask for different saves.
    """
    firsts = [decode_arguments(reply.get("arguments")) for reply in decode_replies(told.answers)]
    arguments = [first["settings"] | first["arguments"] for first in firsts]
    for given in arguments:
        del given["pool_bytes"]  # a rank's own affair
        del given["writers"]  # the coordinator's count
        given["metrics"] = given["metrics"] or arguments[COORDINATOR]["metrics"]
    if arguments:
        check_alike(firsts[COORDINATOR]["what"], arguments)
    return firsts


def agree(mine: Described, told: BriefPhase, rank: int) -> Agreed:
    """Plan, on every rank alike, from what all ranks told; or take the plan made before.

    Raises:
        StateError: the ranks disagree.
        NoSpaceError: the state cannot fit on the disk.
        OptionError: the pool of a rank is too small for its share.
    """
    if told.sums is not None and mine.before is not None:
        made, word, firsts = mine.before, known.decode_word(told.sums), []
        codec = make_codec(made.settings["codec"])
    else:
        replies = decode_replies(told.answers)
        firsts = [decode_arguments(reply["arguments"]) for reply in replies]
        word = firsts[COORDINATOR]["word"]
        requests = decode_requests([reply["request"] for reply in replies])
        chosen = firsts[COORDINATOR]["settings"]
        sizes = chosen["file_bytes"], chosen["chunk_elements"]
        codec = make_codec(chosen["codec"])
        plan = plan_save(requests, *sizes, chosen["writers"], codec)
        made = known.know(mine.held, plan, chosen, requests, rank, told.answers)
    size_bytes = made.plan.size_bytes
    header = made.header(word)
    if codec.is_plain:  # what another codec leaves is known when it is written
        check_room(mine.store.location, size_bytes, word.get("free_bytes"))
    file_bytes = made.settings["file_bytes"]
    for other, first in enumerate(firsts):
        if first["settings"]["pool_bytes"] is not None:
            shards = made.plan.shards(other)
            files = WriterPlan(header, other, 0, shards.size_bytes, file_bytes)
            needed = lay_out(files, shards).size_bytes
            check_pool(first["settings"]["pool_bytes"], needed, other)
    files = WriterPlan(header, rank, 0, made.shards.size_bytes, file_bytes)
    save_id = word["base"]["save_id"] if word["base"] else ""
    return Agreed(mine.store, files, made, codec, mine.request.values.objects, size_bytes, save_id)
