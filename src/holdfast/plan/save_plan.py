"""Who writes which shard of a save. Pure; knows no torch, no files.

Each rank describes what it holds (`Request`); `plan_save` merges the requests of all into one
`SavePlan`, the same on every rank.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..boxes import I64, Boxes
from ..codecs.base import Codec
from ..codecs.raw import Raw
from ..errors import StateError
from ..format.header import RAW, Coding
from ..format.names import display_names, dotted
from ..format.values import parse_json
from ..layout import ITEM_BYTES, Path, Tensor
from .balance import assign, chosen_writers, cut_share
from .dedup import merge_objects, merge_tensors, merge_ties
from .requests import Request, decode_object, distinct
from .shard_table import ShardTable
from .tiling import check_tiling
from .together import by_groups, join_groups, part_groups

# Running means and variances of a layer are smaller (16384 features in f32), its weights larger.
STATISTICS_BYTES_MAX = 64 << 10
_RAW = Raw()


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Who does what, as every rank sees it.

    Attributes:
        ties: (further path, index of the tensor).
        objects: (path, first rank that holds it).
        forced: tensors of which the replicas differ, and one is kept.
        tensor, boxes: what is written: that of each rank behind that of the rank before, in order.
        first: where the boxes of each rank begin, and the end of the last.
        coding: of all tensors.
    """

    mesh: dict[str, Any] | None
    tensors: tuple[Tensor, ...]
    ties: tuple[tuple[Path, int], ...]
    objects: tuple[tuple[Path, int], ...]
    forced: frozenset[Path]
    tensor: I64
    boxes: Boxes
    first: I64
    coding: Coding = RAW

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum([prod(t.shape) * ITEM_BYTES[t.dtype] for t in self.tensors])

    def shards(self, rank: int) -> ShardTable:
        """Return what a rank writes, in order."""
        rows = slice(int(self.first[rank]), int(self.first[rank + 1]))
        return ShardTable(self.tensors, self.tensor[rows], self.boxes[rows])


def plan_save(
    requests: Sequence[Request],
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
    tensors, rows = merge_tensors(requests)
    ties = merge_ties(requests, tensors, rows)
    objects = merge_objects([request.values.objects for request in requests])
    index = {tensor.path: number for number, tensor in enumerate(tensors)}
    _check_paths(requests, index, objects)
    forced = _forced_writers(requests, tensors, index)
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
        len(requests),
        fixed,
        chosen_writers(writers, [request.node for request in requests]),
        chunk_elements,
    )
    share = part_groups(len(tensors), share, members)
    check_tiling(tensors, rows, share, tied)
    share = cut_share(tensors, share, file_bytes // 2)
    if groups:
        share = by_groups(len(tensors), share, groups)
    return SavePlan(
        requests[0].names.mesh,
        tuple(kept),
        tuple((path, int(place[index[target]])) for path, target in ties.items()),
        tuple(objects.items()),
        frozenset(forced),
        place[share.tensor],
        share.boxes,
        np.searchsorted(share.writer, np.arange(len(requests) + 1)),
        coding,
    )


def _check_paths(
    requests: Sequence[Request], tensors: Mapping[Path, int], objects: Mapping[Path, int]
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
        faults = "; ".join(sorted(_kinds(requests, path) for path in both))
        raise StateError(
            f"one name stands for things of several kinds: {faults}. Give the same kind on every "
            "rank, or names of their own"
        )


def _kinds(requests: Sequence[Request], path: Path) -> str:
    """Say what stands at a path, and on which rank first."""
    found: dict[str, int] = {}
    for rank, request in enumerate(requests):
        held = [tensor.path for tensor in request.names.tensors]
        below = any(p[: len(path)] == path != p for p in (*held, *request.values.objects))
        kinds = {"a tensor": path in held, "a value": path in request.values.objects}
        for kind in [kind for kind, there in (kinds | {"a container": below}).items() if there]:
            found.setdefault(kind, rank)
    told = " and ".join(f"{kind} on rank {rank}" for kind, rank in found.items())
    return f"{dotted(path)} is {told}"


def _forced_writers(
    requests: Sequence[Request], tensors: Sequence[Tensor], index: Mapping[Path, int]
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
    for values, ranks in distinct([request.values for request in requests]):
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
            f"the ranks hold different values of {names}; an ordinary tensor of this size must be "
            "equal on all. Where each rank holds a part of one tensor, it must give its part as a "
            "DTensor or a holdfast.Shard; what belongs to one rank needs a name of its own"
        )
    exact = [p for p, tensor in held.items() if p in states or not _is_statistic(tensor.dtype)]
    if exact:
        names = ", ".join(sorted(display_names(exact).values()))
        raise StateError(
            f"the ranks hold different values of {names}; a replicated tensor must be equal on "
            "all. Give parts of one tensor as DTensors or holdfast.Shards, and what belongs to one "
            'rank a name of its own, such as state[f"rng.{rank}"]'
        )
    return differing


def _is_statistic(dtype: str) -> bool:
    return dtype[0] in "fbc" and dtype != "bool"


def encode_objects(plan: SavePlan, rank: int, held: dict[Path, bytes]) -> bytes:
    """Write the values that the coordinator has from this rank: those that it is first to hold."""
    return json.dumps(
        [held[path].decode() for path, first in plan.objects if first == rank]
    ).encode()


def decode_objects(plan: SavePlan, encoded: Sequence[bytes]) -> tuple[tuple[Path, Any], ...]:
    """Return the values of all ranks, in the plan's order; equal ones are one object."""
    texts = [iter(parse_json(data)) for data in encoded]
    found = [(path, next(texts[rank])) for path, rank in plan.objects]
    values = {text: decode_object(text.encode()) for text in dict.fromkeys(t for _, t in found)}
    return tuple([(path, values[text]) for path, text in found])
