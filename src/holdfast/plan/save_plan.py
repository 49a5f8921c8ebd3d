"""Who writes which shard of a save. Pure; knows no torch, no files.

Each rank describes what it holds (`LocalState`); `plan_save` merges those of all ranks into one
`SavePlan`, the same on every rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter, itemgetter, mul
from typing import Any

import numpy as np

from ..boxes import I64, Boxes
from ..cached import cached_property
from ..codecs.base import Codec
from ..codecs.raw import Raw
from ..errors import StateError
from ..format.coding import RAW, Coding
from ..format.header import Header
from ..format.links import TensorLoss
from ..format.names import display_names, dotted
from ..format.rows import Planned, planned_of
from ..layout import ITEM_BYTES, Path, Tensor
from .balance import assign, chosen_writers, cut_share
from .dedup import merge_objects, merge_tensors, merge_ties
from .local_states import LocalState, decode_object, distinct
from .shard_table import ShardTable
from .tiling import check_tiling
from .together import by_groups, join_groups, part_groups

# Running means and variances of a layer are smaller (16384 features in f32), its weights larger.
STATISTICS_BYTES_MAX = 64 << 10
_RAW = Raw()


@dataclass(frozen=True, eq=False)
class SavePlan:
    """Who does what, as every rank sees it.

    Attributes:
        ties: (further path, index of the tensor).
        objects: (path, first rank that holds it).
        forced: tensors of which the replicas differ, and one is kept.
        tensor, boxes: what is written: that of each rank behind that of the rank before, in order.
        first: where the boxes of each rank begin, and the end of the last.
        chunk_elements: as in `Options`.
        codec, coding: of all tensors.
    """

    mesh: dict[str, Any] | None
    tensors: tuple[Tensor, ...]
    ties: tuple[tuple[Path, int], ...]
    objects: tuple[tuple[Path, int], ...]
    forced: frozenset[Path]
    tensor: I64
    boxes: Boxes
    first: I64
    chunk_elements: int
    codec: Codec = _RAW
    coding: Coding = RAW

    @cached_property
    def planned(self) -> Planned:
        """What all ranks write, as the table of the checkpoint will have it."""
        columns = self.tensor, self.boxes, self.first
        return planned_of(self.tensors, self.chunk_elements, *columns)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        items = map(ITEM_BYTES.__getitem__, map(attrgetter("dtype"), self.tensors))
        return sum(map(mul, map(prod, map(attrgetter("shape"), self.tensors)), items))

    def shards(self, rank: int) -> ShardTable:
        """Return what a rank writes, in order."""
        rows = slice(int(self.first[rank]), int(self.first[rank + 1]))
        return ShardTable(self.tensors, self.tensor[rows], self.boxes[rows])


def plan_save(
    local_states: Sequence[LocalState],
    file_bytes: int,
    chunk_elements: int,
    writers: str | int,
    codec: Codec = _RAW,
) -> SavePlan:
    """Merge what all ranks hold: every element is written once, by a rank that holds it.

    Args:
        file_bytes: largest data file; larger boxes are cut, since a shard lies in one file.
        chunk_elements, writers: as in `Options`.
        codec: of all tensors.

    Raises:
        StateError: the ranks disagree about a tensor's dtype or shape, or about a value; or their
            boxes do not make whole tensors.
    """
    tensors, rows = merge_tensors(local_states)
    ties = merge_ties(local_states, tensors, rows)
    objects = merge_objects([local_state.values.objects for local_state in local_states])
    index = {tensor.path: number for number, tensor in enumerate(tensors)}
    _check_paths(local_states, index, objects)
    forced = _forced_writers(local_states, tensors, index)
    tied = np.array([tensor.path in ties for tensor in tensors], np.bool_)
    rows = rows[(rows.boxes.elements > 0) & ~tied[rows.tensor]]
    place = np.cumsum(~tied) - 1  # among the tensors that are kept
    kept = [tensor for tensor in tensors if tensor.path not in ties]
    coding = Coding(codec.name, codec.groups(kept))
    own = np.flatnonzero(~tied).tolist()
    groups = [{role: own[n] for role, n in group.items()} for group in coding.groups]
    fixed = {index[path]: rank for path, rank in forced.items()}
    joined, mine, members = join_groups(tensors, rows, groups, fixed.keys())
    share = assign(
        joined,
        mine,
        len(local_states),
        fixed,
        chosen_writers(writers, [local_state.node for local_state in local_states]),
        chunk_elements,
    )
    share = part_groups(len(tensors), share, members)
    check_tiling(tensors, rows, share, tied)
    share = cut_share(tensors, share, file_bytes // 2)
    if groups:
        share = by_groups(len(tensors), share, groups)
    return SavePlan(
        local_states[0].names.mesh,
        tuple(kept),
        tuple((path, int(place[index[target]])) for path, target in ties.items()),
        tuple(objects.items()),
        frozenset(forced),
        place[share.tensor],
        share.boxes,
        np.searchsorted(share.writer, np.arange(len(local_states) + 1)),
        chunk_elements,
        codec,
        coding,
    )


def _check_paths(
    local_states: Sequence[LocalState], tensors: Mapping[Path, int], objects: Mapping[Path, int]
) -> None:
    """Check that no place holds things of two kinds.

    Raises:
        StateError: one does; the text lists every such place, and a rank for each kind.
    """
    both = tensors.keys() & objects.keys()
    known = tensors.keys() | objects.keys()
    above = {path[:n] for path in {path[:-1] for path in known} for n in range(1, len(path) + 1)}
    both |= above & known
    if both:
        faults = "; ".join(sorted(_kinds(local_states, path) for path in both))
        raise StateError(
            f"a name has values of several kinds: {faults}. Give the same kind on every rank, or "
            "different names"
        )


def _kinds(local_states: Sequence[LocalState], path: Path) -> str:
    """Say what stands at a path, and on which rank first."""
    found: dict[str, int] = {}
    for rank, local_state in enumerate(local_states):
        held = [tensor.path for tensor in local_state.names.tensors]
        below = any(p[: len(path)] == path != p for p in (*held, *local_state.values.objects))
        kinds = {"a tensor": path in held, "a value": path in local_state.values.objects}
        for kind in [kind for kind, there in (kinds | {"a container": below}).items() if there]:
            found.setdefault(kind, rank)
    told = " and ".join(f"{kind} on rank {rank}" for kind, rank in found.items())
    return f"{dotted(path)} is {told}"


def _forced_writers(
    local_states: Sequence[LocalState], tensors: Sequence[Tensor], index: Mapping[Path, int]
) -> dict[Path, int]:
    """Find replicas that differ: rank 0's statistics are kept, others are mistakes.

    Small floating-point ones are per-rank statistics (BatchNorm under DDP), of which training
    frameworks keep rank 0's. Integers and bytes are counters and random states, large ones are
    parts of something, as an optimizer's state of any size is: to keep one of them silently would
    be wrong.
    """
    first: dict[Path, tuple[int, bytes]] = {}
    differing: dict[Path, int] = {}
    states: set[Path] = set()
    for values, ranks in distinct([local_state.values for local_state in local_states]):
        states |= values.exact
        for path, digest in values.digests.items():
            rank, known = first.setdefault(path, (ranks[0], digest))
            if known != digest:
                differing[path] = rank
    held = {path: tensors[index[path]] for path in differing}
    large = [path for path, tensor in held.items() if tensor.size_bytes > STATISTICS_BYTES_MAX]
    if large:
        names = ", ".join(sorted(display_names(large).values()))
        raise StateError(
            f"the ranks hold different values of {names}; expected equal values for an ordinary "
            "tensor of this size. Give each rank's part of a tensor as a DTensor or a "
            "holdfast.Shard, and each rank's own tensor its own name"
        )
    exact = [p for p, tensor in held.items() if p in states or not _is_statistic(tensor.dtype)]
    if exact:
        names = ", ".join(sorted(display_names(exact).values()))
        raise StateError(
            f"the ranks hold different values of {names}; expected equal values for a replicated "
            "tensor. Give each rank's part of a tensor as a DTensor or a holdfast.Shard, and each "
            "rank's own tensor its own name, such as "
            'state[f"rng.{rank}"]'
        )
    return differing


def _is_statistic(dtype: str) -> bool:
    return dtype[0] in "fbc" and dtype != "bool"


def objects_from(plan: SavePlan, rank: int, held: dict[Path, bytes]) -> list[str]:
    """Return the values that the coordinator has from this rank: those that it is first to hold."""
    return [held[path].decode() for path, first in plan.objects if first == rank]


def header_with(
    plan: SavePlan, header: Header, held: Sequence[list[str]], losses: tuple[TensorLoss, ...]
) -> Header:
    """Return a header with the values of all ranks, in the plan's order; equal ones are one object.

    Args:
        held: the `objects_from` of every rank.
        losses: of all ranks.
    """
    texts = [*map(iter, held)]
    found = [(path, next(texts[rank])) for path, rank in plan.objects]
    values = {
        text: decode_object(text.encode()) for text in dict.fromkeys(map(itemgetter(1), found))
    }
    objects = tuple([(path, values[text]) for path, text in found])
    return replace(header, objects=objects, losses=losses)
